"""What /proc/self/mounts says about the filesystem of a path."""
from __future__ import annotations

import re

NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre",
                     "beegfs", "gpfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone"})


def network_filesystem(mounts: str, path: str) -> str:
    """Return the kind of network filesystem that holds the absolute ``path``, empty when it is local."""
    longest, kind = -1, ""
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), words[1])
        below = point.rstrip("/") + "/"
        if (path == point or path.startswith(below)) and len(below) >= longest:
            longest, kind = len(below), words[2]
    return kind if kind in NETWORK else ""
