"""What an environment may hold."""
from __future__ import annotations

import os
from typing import FrozenSet, Iterator

from llmgw.domain.errors import EngineFailed


_STARTERS = ("sitecustomize", "usercustomize")


def check_environment(label: str, folder: str, base: str, pth: FrozenSet[str]) -> None:
    """Refuse an environment with a .pth file that nobody expects, or a link that leads out of it.

    A .pth file runs at every start of Python, and so does a module of a certain name: that is
    how a stolen account of one package got into many machines (reliability.md, S17).
    ``base``: the Python it is made on.
    """
    allowed = (os.path.realpath(folder), os.path.realpath(base))
    for path in _entries(folder):
        name = os.path.basename(path)
        if (name.endswith(".pth") and name not in pth) or _starts(path):
            raise EngineFailed(f"{label}: a package brings {os.path.relpath(path, folder)}, which would run at every "
                               "start of Python", hint="no such file is expected of it: find out what it is for")
        if os.path.islink(path):
            target = os.path.realpath(path)
            if not any(target == place or target.startswith(place + os.sep) for place in allowed):
                raise EngineFailed(f"{label}: {os.path.relpath(path, folder)} leads out of the environment, "
                                   f"to {target}")


def _starts(path: str) -> bool:
    """Say whether Python imports this at every start, by its name."""
    first = path.rpartition("/site-packages/")[2].partition(os.sep)[0]
    return first.partition(".")[0] in _STARTERS


def _entries(folder: str) -> Iterator[str]:
    """Yield every file and link below ``folder``; links are not followed."""
    for place, folders, names in os.walk(folder):
        for name in names:
            yield os.path.join(place, name)
        for name in folders:
            if os.path.islink(os.path.join(place, name)):
                yield os.path.join(place, name)
