"""Check every flag that llmgw would give an engine against the engine's own help, on this machine.

No control plane, no GPU and no model are needed. Exit code 3 when a flag is gone.
"""
from __future__ import annotations

import argparse
import os
from typing import Any, Dict, List, Mapping, Optional, Tuple

from llmgw.ctl import output
from llmgw.domain.engine import ENGINES, LLAMA_CPP
from llmgw.domain.errors import ConfigError, UsageError
from llmgw.engines import registry, widest
from llmgw.engines.base import Engine
from llmgw.engines.widest import Status
from llmgw.parse import cluster_yaml
from llmgw.probe import gpus
from llmgw.probe.engine_check import Asker, EngineCheck, ProgramCheck
from llmgw.system import data_dir, files, installed
from llmgw.system.process import Processes
from llmgw.system.scratch import scratch_dir

FOUND_PROBLEMS = 3
MAX_HELP_BYTES = 8 << 20


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.set_defaults(offline=True)
    parser.add_argument("engine", metavar="ENGINE", choices=ENGINES, help=f"one of {', '.join(ENGINES)}")
    program = parser.add_mutually_exclusive_group()
    program.add_argument("--binary", metavar="PATH", default="", help="the llama-server to ask")
    program.add_argument("--python", metavar="PATH", default="", help="the Python of the environment to ask")
    parser.add_argument("--data-dir", metavar="FOLDER", default="",
                        help="the agent's data folder, whose newest version is asked when no path is given")
    parser.add_argument("--config", metavar="FILE", help="a server.yaml whose args: are checked too "
                                                         "(default: server.yaml here, if there is one)")
    parser.add_argument("--help-file", metavar="PROGRAM=FILE", action="append", default=[],
                        help="check a program against a saved help instead of asking it; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def action(options: argparse.Namespace) -> int:
    """Check, tell, and return 3 when a flag is missing or does not take its value."""
    engine = registry.get(options.engine)
    program = _program(options, engine)
    args = _args(options.config, options.engine)
    with scratch_dir("llmgw-engine-check-") as folder:
        helps = _saved(options.help_file, engine)
        has_gpu = bool(gpus.probe(Processes()).gpus)
        found = Asker(Processes(), folder, has_gpu).check(engine, program, args, helps)
    if options.json:
        output.write_json(as_data(found))
    else:
        _show(found, program)
    return FOUND_PROBLEMS if found.faults else 0


def _program(options: argparse.Namespace, engine: Engine) -> str:
    """Return the path to ask: the one that was named, else the newest that the agent installed here."""
    wrong = options.python if engine.name == LLAMA_CPP else options.binary
    if wrong:
        raise UsageError(f"{engine.name} is not checked so: {wrong}",
                         hint="give " + ("--binary PATH" if engine.name == LLAMA_CPP else "--python PATH"))
    named = options.binary or options.python
    if named:
        return os.path.abspath(named)
    engines = os.path.join(data_dir.role_dir("agent", options.data_dir), "engines")
    here = [item for item in installed.find(engines) if item.name == engine.name]
    if not here:
        return ""
    newest = max(here, key=lambda item: item.installed_at)
    return os.path.join(newest.folder, newest.program)


def _args(path: Optional[str], engine: str) -> Tuple[str, ...]:
    """Return all ``args:`` of the models of this engine."""
    if path is None and not os.path.isfile("server.yaml"):
        return ()
    path = path or "server.yaml"
    data = files.read_bytes(path, limit=1 << 20)
    if data is None:
        raise ConfigError(f"{path}: no such file")

    def read_file(name: str) -> bytes:
        return files.read_bytes(os.path.join(os.path.dirname(os.path.abspath(path)), name), limit=1 << 20) or b""

    reserved = {name: one.reserved_flags for name, one in registry.ENGINES.items()}
    config = cluster_yaml.decode(data, path, read_file, reserved)
    return tuple(word for model in config.models if model.engine == engine for word in model.args)


def _saved(named: List[str], engine: Engine) -> Mapping[str, str]:
    """Return saved helps by the title of their program."""
    titles = {_plain(wide.title): wide.title for wide in widest.programs(engine, "", "/")}
    found: Dict[str, str] = {}
    for entry in named:
        name, equals, path = entry.rpartition("=")
        title = titles.get(_plain(name))
        if not equals or title is None:
            raise UsageError(f"--help-file {entry!r:.100}: no such program",
                             hint=f"write PROGRAM=FILE, PROGRAM one of: {', '.join(sorted(titles.values()))}")
        data = files.read_bytes(path, limit=MAX_HELP_BYTES)
        if data is None:
            raise UsageError(f"--help-file {path}: no such file")
        found[title] = data.decode("utf-8", "replace")
    return found


def _plain(title: str) -> str:
    return title.strip().lower().replace(" ", "-")


def _show(found: EngineCheck, program: str) -> None:
    """Print one line a flag, and a summary."""
    about = found.version or ("version unknown" if program else "not asked: no program is known here")
    devices = ", ".join(found.devices) or "none seen"
    output.write(output.clean(f"{found.engine}: {about}; devices: {devices}"))
    for one in found.programs:
        output.write("")
        if one.skipped:
            output.write(output.clean(f"{one.title}: skipped: {one.skipped}"))
            continue
        output.write(output.clean(f"{one.title}:" + (f" warning: its help looks cut: {one.truncated}"
                                                     if one.truncated else "")))
        for verdict in one.verdicts:
            output.write(output.clean(f"  {verdict.status.value:<9} {verdict.flag}").rstrip()
                         if not verdict.message else
                         output.clean(f"  {verdict.status.value:<9} {verdict.flag}: {verdict.message}"))
    output.write("")
    output.write(summary(found))


def summary(found: EngineCheck) -> str:
    """Return the last line: how many flags of how many programs, and how they fared."""
    asked = [one for one in found.programs if not one.skipped]
    skipped = len(found.programs) - len(asked)
    counts = _counts(asked)
    flags = sum(counts.values())
    said = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count) or "nothing was checked"
    return (f"{flags} {'flag' if flags == 1 else 'flags'} of {len(asked)} "
            f"{'program' if len(asked) == 1 else 'programs'}: {said}" + (f"; {skipped} skipped" if skipped else ""))


def _counts(programs: List[ProgramCheck]) -> Dict[Status, int]:
    counts = {status: 0 for status in Status}
    for one in programs:
        for verdict in one.verdicts:
            counts[verdict.status] += 1
    return counts


def as_data(found: EngineCheck) -> Dict[str, Any]:
    """Return the check as data for programs."""
    return {"ok": not found.faults, "engine": found.engine, "version": found.version, "devices": list(found.devices),
            "summary": summary(found), "programs": [
                {"program": one.title, "skipped": one.skipped, "truncated": one.truncated,
                 "flags": [{"flag": verdict.flag, "status": verdict.status.value, "message": verdict.message}
                           for verdict in one.verdicts]} for one in found.programs]}
