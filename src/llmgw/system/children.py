"""Long-running children that end with their owner: own session, log file, a pipe that tells them."""
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Dict, List, Optional, Sequence

from llmgw.domain.errors import CommandFailed
from llmgw.system import files
from llmgw.system.owned import OWNER_FD

LOG_TAIL_BYTES = 16 << 10


class Child:
    """One role of ours as a process. Its output goes to ``log_path``; the run before stays as ``.1``."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log_path: str) -> None:
        self.name, self.log_path = name, log_path
        self._process = process
        self.pid = process.pid

    @property
    def code(self) -> Optional[int]:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def ask_to_stop(self) -> None:
        """Send TERM; whoever ended already has no say in it."""
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Say whether it ended within ``seconds``."""
        try:
            self._process.wait(max(seconds, 0.0))
            return True
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> None:
        """End its whole session's group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def last_lines(self) -> List[str]:
        """Return the last lines of its log."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
                return log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []


class Owner:
    """Starts children and holds the pipe whose end tells them that their owner is gone."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = files.make_dir(log_dir)
        self._read, self._write = os.pipe()      # both close-on-exec; only the read end is passed on

    def start(self, name: str, argv: Sequence[str], env: Dict[str, str]) -> Child:
        """Start ``argv`` with exactly ``env`` in a session of its own."""
        log_path = os.path.join(self._log_dir, f"{name}.log")
        with files.storing("write", log_path):
            if os.path.exists(log_path):
                os.replace(log_path, log_path + ".1")
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                list(argv), env={**env, OWNER_FD: str(self._read)}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True, pass_fds=(self._read,))
        except OSError as error:
            raise CommandFailed(f"cannot start {name}: {error.strerror or error}") from error
        finally:
            os.close(log)
        return Child(name, process, log_path)

    def start_in_sight(self, argv: Sequence[str], env: Dict[str, str], name: str) -> Child:
        """Start a short-lived child whose words go to our own stderr."""
        try:
            process = subprocess.Popen(
                list(argv), env={**env, OWNER_FD: str(self._read)}, stdin=subprocess.DEVNULL, stdout=2,
                start_new_session=True, pass_fds=(self._read,))
        except OSError as error:
            raise CommandFailed(f"cannot start {name}: {error.strerror or error}") from error
        return Child(name, process, "")

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
