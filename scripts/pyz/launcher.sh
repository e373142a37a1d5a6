#!/bin/sh
# llmgw: one file. sh finds a Python 3.9+, Python then reads the zip that follows.
seen=
for p in "${LLMGW_PYTHON:-python3}" python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 /usr/libexec/platform-python; do
  command -v "$p" >/dev/null 2>&1 || continue
  # Its real name, so that a slow shim (pyenv) is asked once, and one that answers and fails is passed over.
  q=$("$p" -ISc 'import sys; sys.version_info >= (3, 9) and sys.stdout.write(sys.executable or "")' 2>/dev/null)
  [ -n "$q" ] && exec "$q" -I "$0" "$@"
  seen="$seen $p"
done
echo "llmgw: needs Python 3.9 or newer; none found (too old or broken:${seen:- none at all})." >&2
echo "llmgw: install one (Debian/Ubuntu: apt-get install python3; RHEL 8: dnf install python3.11) or set LLMGW_PYTHON=/path/to/python3" >&2
exit 69
