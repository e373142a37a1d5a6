#!/bin/sh
# Print the newest Python from 3.13 down to 3.9 that runs and can make virtual environments.
# With versions as words, only those count. Asks the interpreters themselves: a pyenv shim answers to `command -v` and then fails.
[ $# -gt 0 ] || set -- 3.13 3.12 3.11 3.10 3.9
tried=
for version; do
  for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/"python$version" python3; do
    command -v "$python" >/dev/null 2>&1 || continue
    found=$("$python" -c 'import sys; sys.stdout.write("%d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.executable))' 2>/dev/null) || continue
    [ "${found%% *}" = "$version" ] || continue
    if "$python" -c 'import venv, ensurepip, sqlite3, ssl' 2>/dev/null; then
      echo "${found#* }"
      exit 0
    fi
    tried="$tried ${found#* }"
  done
done
if [ -n "$tried" ]; then
  echo "no virtual environment can be made with$tried: it lacks venv, ensurepip, sqlite3 or ssl" >&2
  echo "  try: apt-get install python3-venv" >&2
else
  echo "no Python 3.9 to 3.13 found" >&2
  echo "  try: apt-get install python3 python3-venv, or make PYTHON=/path/to/python3" >&2
fi
exit 1
