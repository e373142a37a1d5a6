"""The files of a shard, and its programs in their order, marked as ours."""
from __future__ import annotations

import dataclasses
import os
from typing import List

from llmgw.agent import shard_row, sidecars, weights
from llmgw.agent.board import Usable
from llmgw.agent.engine_user import EngineUser, work_dir
from llmgw.agent.layout import Layout
from llmgw.agent.ports import Ports
from llmgw.agent.shard_row import ShardRow
from llmgw.domain.errors import PortTaken
from llmgw.domain.replica import ShardWanted
from llmgw.engines.base import Engine, Place, Program
from llmgw.system import accounts, addresses, files, shipped


def next_row(row: ShardRow, wanted: ShardWanted, engine: Engine, ports: Ports) -> ShardRow:
    """Return the row of the next start, with all ports that it takes, each tested; PortTaken when there are too few."""
    gang = wanted.gang
    meets = gang is not None and wanted.rank == 0
    port = ports.take()
    try:
        inner = ports.take_all(engine.inner_ports(wanted) + meets, gang.address if gang else "127.0.0.1")
    except PortTaken:
        ports.give_back((port,))
        raise
    return dataclasses.replace(
        row, incarnation=row.incarnation + 1, port=port, identity=None, ready=False, sidecars=(),
        turn=gang.turn if gang else 0, meet_port=inner[0] if meets else 0, inner_ports=inner[meets:])


def prepared(wanted: ShardWanted, engine: Engine, usable: Usable, row: ShardRow, layout: Layout,
             user: EngineUser) -> List[Program]:
    """Write what the shard's programs read, and return them."""
    assert row.port is not None
    folder = layout.shard(wanted.id)
    key_file = os.path.join(folder, engine.key_file_name)
    template = os.path.join(folder, "template.jinja")
    run_as = user.of_shard(folder, row.port)
    files.write_atomic(key_file, engine.key_file(wanted.key))
    if run_as is not None:
        accounts.give(key_file, run_as, 0o600)
    if wanted.model.chat_template:
        files.write_atomic(template, wanted.model.chat_template.encode("utf-8"), 0o644)
    meet_file = os.path.join(work_dir(folder), "meet")
    files.remove(meet_file)           # of a run that was killed: who reads it again waits for ever
    held = layout.weights(wanted.weights.name, wanted.weights.fingerprint)
    first = os.path.join(held, weights.first_file(wanted.weights))
    place = Place(program=usable.program, library_dirs=usable.library_dirs, launcher=_launcher(engine, layout),
                  model_path=_model_folder(wanted, engine, folder, held) if engine.takes_folder else first,
                  work_dir=work_dir(folder), key_file=key_file,
                  template_file=template if wanted.model.chat_template else "", port=row.port,
                  inner_ports=row.inner_ports, meet_file=meet_file,
                  interface=addresses.interface_of(wanted.gang.address) if wanted.gang else addresses.LOOPBACK,
                  projector_path=weights.projector_file(held, wanted.weights))
    if wanted.gang is not None and wanted.rank == 0:
        wanted = dataclasses.replace(wanted, gang=dataclasses.replace(wanted.gang, meet_port=row.meet_port))
    marks = {shard_row.OWNER: layout.root, shard_row.PORT: str(row.port),
             shard_row.SHARD: f"{wanted.id}.{row.incarnation}"}
    made = [sidecars.marked(one, marks, run_as) for one in engine.programs(wanted, place)]
    files.write_atomic(os.path.join(folder, "command"), "".join(f"{one.command}\n" for one in made).encode())
    return made


def _model_folder(wanted: ShardWanted, engine: Engine, folder: str, held: str) -> str:
    """Return the folder of the weights, under the model's name where the engine takes that from it."""
    if not engine.named_by_folder:
        return held
    named = os.path.join(files.make_dir(os.path.join(folder, "model"), 0o755), wanted.model.name)
    files.remove(named)
    with files.storing("link", named):
        os.symlink(held, named)
    return named


def _launcher(engine: Engine, layout: Layout) -> str:
    """Copy what the engine's Python runs to the data folder: a cache that llmgw itself runs from may vanish."""
    if not engine.launcher:
        return ""
    path = os.path.join(files.make_dir(layout.tools, 0o755), engine.launcher)
    data = shipped.launcher(engine.launcher)
    if files.read_bytes(path) != data:
        files.write_atomic(path, data, 0o644)
    return path
