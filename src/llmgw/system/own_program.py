"""How this very llmgw is started again: the same interpreter, the same file."""
from __future__ import annotations

import os
import sys
from typing import Dict, Tuple

import llmgw


def own_command() -> Tuple[str, ...]:
    """Return the words that start what is running now: the pyz, or the package in its folder."""
    program = os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    if program and os.path.isfile(program) and _is_pyz(program):
        return (sys.executable, program)
    return (sys.executable, "-m", "llmgw")


def own_environment() -> Dict[str, str]:
    """Return what ``own_command`` needs besides a clean environment: nothing for a pyz."""
    if own_command()[-2:] != ("-m", "llmgw"):
        return {}
    return {"PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(llmgw.__file__)))}


def own_file() -> str:
    """Return the path of the llmgw.pyz that runs; empty when the package runs from its folder."""
    command = own_command()
    return "" if command[-2:] == ("-m", "llmgw") else command[-1]


def _is_pyz(path: str) -> bool:
    """Say whether a file ends like a zip: a shebang may stand before one, a script has none."""
    with open(path, "rb") as source:
        source.seek(0, os.SEEK_END)
        source.seek(max(0, source.tell() - 4096))
        return b"PK\x05\x06" in source.read()
