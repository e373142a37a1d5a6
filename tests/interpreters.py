"""Find the real interpreters of this machine; shims that answer and fail are no interpreters."""
from __future__ import annotations

import functools
import glob
import os
import shutil
import subprocess
from typing import List, Optional

import pytest

WHICH = "import sys; sys.stdout.write('%d.%d %s' % (sys.version_info[0], sys.version_info[1], sys.executable))"


@functools.lru_cache(maxsize=None)
def find(version: str) -> Optional[str]:
    """Return the path of a working CPython ``version`` ("3.9"), None when there is none."""
    for path in _places(version):
        try:
            outcome = subprocess.run([path, "-c", WHICH], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                     timeout=30, check=False)
        except OSError:
            continue
        words = outcome.stdout.decode("utf-8", "replace").split(" ", 1)
        if outcome.returncode == 0 and words[0] == version and os.path.exists(words[1]):
            return words[1]
    return None


def need(version: str) -> str:
    """Return that interpreter, or skip the test with a message."""
    path = find(version)
    if path is None:
        pytest.skip(f"no Python {version} on this machine")
    return path


def _places(version: str) -> List[str]:
    root = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    kept = sorted(glob.glob(os.path.join(root, "versions", version + ".*", "bin", "python" + version)))
    found = shutil.which("python" + version)
    return kept + ([found] if found else [])
