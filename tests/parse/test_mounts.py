from __future__ import annotations

import pytest

from llmgw.parse.mounts import network_filesystem

MOUNTS = """/dev/sda1 / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
filer:/x /srv/shared nfs4 rw 0 0
//box/y /srv/my\\040share cifs rw 0 0
/dev/sdb1 /srv/shared/local xfs rw 0 0
broken
"""


@pytest.mark.parametrize("path, kind", [
    ("/var/lib/llmgw", ""), ("/srv/shared/a", "nfs4"), ("/srv/shared", "nfs4"), ("/srv/sharedness", ""),
    ("/srv/shared/local/a", ""), ("/srv/my share/a", "cifs"), ("/tmp/x", "")])
def test_the_longest_mount_point_decides(path, kind):
    assert network_filesystem(MOUNTS, path) == kind


def test_a_root_on_nfs_counts():
    assert network_filesystem("server:/ / nfs rw 0 0\n", "/a") == "nfs"
    assert network_filesystem("", "/a") == ""
