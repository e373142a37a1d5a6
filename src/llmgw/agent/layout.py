"""Where things lie in an agent's data folder."""
from __future__ import annotations

import os

from llmgw.domain.digest import blob_path, sha256_hex
from llmgw.domain.names import file_name
from llmgw.system.installed import version_dir


class Layout:
    """The paths below one data folder. Nothing here touches the disk."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.credential = os.path.join(root, "state", "credential.json")
        self.desired = os.path.join(root, "state", "desired.json")
        self.engines = os.path.join(root, "engines")
        self.blobs = os.path.join(root, "blobs")
        self.models = os.path.join(root, "models")
        self.shards = os.path.join(root, "shards")
        self.gate = os.path.join(root, "gate")
        self.gate_table = os.path.join(root, "gate", "table.json")
        self.packages_log = os.path.join(root, "packages.log")
        self.tools = os.path.join(root, "tools")              # uv, and the Pythons that environments run on
        self.uv_cache = os.path.join(root, "tools", "uv-cache")
        self.lists = os.path.join(root, "state", "packages")  # of environments that are gone
        self.gate_log = os.path.join(root, "gate", "gate.log")

    def engine(self, name: str, version: str) -> str:
        return version_dir(self.engines, name, version)

    def engine_scratch(self, name: str, version: str) -> str:
        return os.path.join(self.engines, file_name(name), f".{file_name(version)}.scratch")

    def blob(self, digest: str) -> str:
        return os.path.join(self.root, blob_path(digest))

    def partial(self, digest: str) -> str:
        return os.path.join(self.root, "blobs", "partial", sha256_hex(digest))

    def weights(self, name: str, fingerprint: str) -> str:
        """One folder per manifest: what an older replica has mapped stays while a newer one is fetched."""
        return os.path.join(self.models, file_name(name), file_name(fingerprint)[:24])

    def shard(self, shard_id: str) -> str:
        return os.path.join(self.shards, file_name(shard_id))
