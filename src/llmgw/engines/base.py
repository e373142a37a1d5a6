"""What every engine module answers; the registry maps names to these."""
from __future__ import annotations

from dataclasses import dataclass
from typing import FrozenSet, Optional, Tuple

from llmgw.domain.command import Command
from llmgw.domain.model import ModelSpec
from llmgw.domain.replica import ShardWanted
from llmgw.domain.route import Gauges
from llmgw.domain.secret import Secret


@dataclass(frozen=True)
class Place:
    """Where a shard lives on its node: paths and ports, chosen by the agent."""

    program: str              # the engine's binary, or its Python
    library_dirs: Tuple[str, ...]
    model_path: str           # the first (or only) file of the weights, or their folder
    work_dir: str             # the shard's own folder
    key_file: str             # 0600, holds the replica's key
    template_file: str        # empty when the model brings its own template
    port: int
    threads: Optional[int] = None   # CPU threads for a shard without GPU
    projector_path: str = ""  # of a vision model of llama.cpp
    launcher: str = ""        # our own file that its Python runs, where it needs one
    inner_ports: Tuple[int, ...] = ()   # for what its programs say to each other: as many as the engine asked for
    interface: str = "lo"     # the network interface that they do it on; empty when its name is not known
    meet_file: str = ""       # not there yet: where the programs of one node may find each other instead of at a port


@dataclass(frozen=True)
class Program:
    """One OS process of a shard: sidecars start, and are ready, before the engine."""

    name: str                 # "engine", or the sidecar's name
    command: Command
    title: str = ""           # what its help is called, such as "vllm serve"
    help: Tuple[str, ...] = ()     # the words that make it print its help
    sections: Tuple[str, ...] = ()  # lines that a whole help of it holds
    ready_at: Tuple[str, int] = ("", 0)   # of a sidecar: where it listens once it is ready


class Engine:
    """Knowledge of one engine; pure. Subclasses fill in all of it."""

    name = ""
    health_path = "/health"
    metrics_path = "/metrics"
    models_path = "/v1/models"
    # What the gate lets through, as (method, path). Everything else of the engine stays inside.
    allowed_paths: FrozenSet[Tuple[str, str]] = frozenset()
    # Flags of ``args:`` that llmgw sets itself or that open the node; refused when the file is loaded.
    reserved_flags: FrozenSet[str] = frozenset()
    # What ``Place.model_path`` is: the folder of the weights, or their first file.
    takes_folder = False
    over_nodes = False                # whether one replica can run over several nodes
    named_by_folder = False           # it serves its model under the name of the folder
    launcher = ""                     # which file of launchers/ its Python runs
    # Flags that it takes and its help does not list.
    unlisted_flags: FrozenSet[str] = frozenset()
    dashes_are_underscores = False    # whether it takes --a_b for --a-b
    key_file_name = "key"

    def inner_ports(self, shard: ShardWanted) -> int:
        """Return how many ports its programs need besides the one it serves on."""
        return 0

    def unknown_ports(self, shard: ShardWanted) -> int:
        """Return how many ports, chosen by nobody, it opens on every address of the node."""
        return 0

    def key_file(self, key: Secret) -> bytes:
        """Return what ``Place.key_file`` holds."""
        return key.reveal().encode("ascii") + b"\n"

    def programs(self, shard: ShardWanted, place: Place) -> Tuple[Program, ...]:
        """Return the programs of ``shard`` in the order in which they start."""
        raise NotImplementedError

    def gauges(self, page: bytes) -> Gauges:
        """Return the numbers of a metrics page; what it does not hold is None."""
        raise NotImplementedError

    def work(self, page: bytes) -> Optional[float]:
        """Return a number of a metrics page that grows while the engine computes; None when unknown."""
        return self.gauges(page).generated_tokens

    def smallest_request(self, model: ModelSpec) -> Tuple[str, bytes]:
        """Return the path and body of a request for one token, or one embedding."""
        raise NotImplementedError
