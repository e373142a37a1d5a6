"""Where things lie on disk when nobody says otherwise."""
from __future__ import annotations

import os


def default_root() -> str:
    """Return the folder that holds every role's data folder.

    ``LLMGW_DATA_DIR``, else /var/lib/llmgw for root, else the user's data folder.
    """
    named = os.environ.get("LLMGW_DATA_DIR", "")
    if named:
        return os.path.abspath(named)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return "/var/lib/llmgw"
    base = os.environ.get("XDG_DATA_HOME", "")
    if not base.startswith("/"):
        base = os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(base, "llmgw")


def role_dir(role: str, given: str = "") -> str:
    """Return the absolute data folder of ``role`` (server, agent, router, up)."""
    return os.path.abspath(given) if given else os.path.join(default_root(), role)


def endpoint_file(server_dir: str) -> str:
    """Where a listening server writes {url, admin_token_file}, for ctl on the same machine."""
    return os.path.join(server_dir, "endpoint.json")


def token_file(server_dir: str, role: str) -> str:
    """Where the server keeps a role's first token (0600)."""
    return os.path.join(server_dir, "tokens", role)
