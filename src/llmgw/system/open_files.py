"""How many files and sockets this process may have open."""
from __future__ import annotations

import resource

ENOUGH = 65536


def raise_open_files() -> int:
    """Raise the soft limit as far as the hard one allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (ValueError, OSError):         # macOS refuses more than its own maximum
            pass
    return ENOUGH if soft == resource.RLIM_INFINITY else soft
