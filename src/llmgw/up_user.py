"""Whom the engines of ``up`` run as: a newcomer's first run works in any folder, and says what it gives up for that."""
from __future__ import annotations

import os
import stat
from typing import Callable

from llmgw.domain.errors import LlmgwError
from llmgw.system import accounts, files


def engine_user(folder: str, say: Callable[[str], None]) -> str:
    """Return what the agent is to be told, empty for nothing; the folder is opened for the engines' user to pass.

    As root engines run as llmgw-engine. Where that user cannot be, or may not come
    as far as ``folder``, they run as root, and that is said.
    """
    if not accounts.is_root() or os.environ.get("LLMGW_ENGINE_USER"):
        return ""
    problem = _problem(folder)
    if not problem:
        return ""
    say(f"engines run as root: {problem}")
    return "root"


def _problem(folder: str) -> str:
    if not accounts.sees_others():
        return "this root may not look into the processes of other users, as in a container"
    user = accounts.find(accounts.ENGINE_USER)
    above = os.path.dirname(folder)
    accounts.open_above(folder)
    closed = accounts.closed(user, above)
    if closed:
        return (f"the user {accounts.ENGINE_USER} may not enter {closed}; with a --data-dir elsewhere, such as below "
                "/var/lib, it would run them")
    try:
        accounts.need(accounts.ENGINE_USER)
    except LlmgwError as error:
        return error.message
    with files.storing("open to the engine user", folder):
        mode = stat.S_IMODE(os.stat(folder).st_mode)
        if not mode & 0o001:
            os.chmod(folder, mode | 0o011)
    return ""
