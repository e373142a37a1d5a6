"""Does an installed engine still take the flags llmgw gives it? Asked once of each version, before it is offered."""
from __future__ import annotations

import json
import logging
import os
from typing import Callable, Dict, List, Optional, Tuple

from llmgw import __version__
from llmgw.agent.layout import Layout
from llmgw.domain.command import RunAs
from llmgw.domain.errors import LlmgwError
from llmgw.engines import registry
from llmgw.probe.engine_check import Asker
from llmgw.system import accounts, files
from llmgw.system.process import Processes
from llmgw.system.scratch import scratch_dir

log = logging.getLogger(__name__)

SHOWN = 5                         # faults in a sentence
KEPT = 50                         # answers on the disk


class FlagCheck:
    """Keeps what each program said: asking a Python engine takes half a minute."""

    def __init__(self, processes: Processes, layout: Layout, has_gpu: Callable[[], bool],
                 run_as: Callable[[], Optional[RunAs]] = lambda: None) -> None:
        self._processes, self._has_gpu, self._run_as = processes, has_gpu, run_as
        self._path = os.path.join(layout.root, "state", "flags.json")
        self._known: Dict[str, List[str]] = self._read()

    def faults(self, engine: str, program: str, says: str) -> Tuple[str, ...]:
        """Return a sentence for each flag that is gone; none when the program cannot be asked, which others tell."""
        key = " ".join((__version__, engine, program, says, _stamp(program)))
        if key not in self._known:
            self._known[key] = list(self._ask(engine, program))
            self._write()
        return tuple(self._known[key])

    def _ask(self, engine: str, program: str) -> Tuple[str, ...]:
        if engine not in registry.ENGINES:
            return ()
        with scratch_dir("llmgw-flags-") as folder:
            run_as = self._run_as()
            if run_as is not None:
                accounts.give(folder, run_as, 0o700)
            found = Asker(self._processes, folder, self._has_gpu()).check(registry.get(engine), program)
        for one in found.programs:
            if one.skipped or one.truncated:
                log.info("flags not checked engine=%s program=%s: %s", engine, one.title, one.skipped or one.truncated)
        return found.faults

    def _read(self) -> Dict[str, List[str]]:
        try:
            data = json.loads(files.read_bytes(self._path) or b"{}")
            return {str(key): [str(item) for item in value] for key, value in data.items()}
        except (ValueError, TypeError, AttributeError, LlmgwError):
            return {}

    def _write(self) -> None:
        for key in list(self._known)[:-KEPT]:
            del self._known[key]
        try:
            files.write_json(self._path, self._known)
        except LlmgwError as error:
            log.debug("not kept: %s", error.message)


def sentence(label: str, faults: Tuple[str, ...]) -> str:
    """Return why an engine with these faults is not used."""
    more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return f"{label} runs, and is not used: {'; '.join(faults[:SHOWN])}{more}"


HINT = "name a version under engines: that this llmgw knows, or use a newer llmgw"


def _stamp(program: str) -> str:
    try:
        seen = os.stat(program)
    except OSError:
        return ""
    return f"{seen.st_mtime_ns} {seen.st_size}"
