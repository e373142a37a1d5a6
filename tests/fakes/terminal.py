"""A terminal of any size around a real process: what is on its screen, and keys into it."""
from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time

import pyte

KEYS = {"up": "\x1bOA", "down": "\x1bOB", "right": "\x1bOC", "left": "\x1bOD", "enter": "\r", "escape": "\x1b", "tab": "\t"}


class Terminal:
    """Starts ``command`` in a pseudo-terminal; pyte keeps the screen. Use it in ``with``."""

    def __init__(self, command, env, columns=80, rows=24):
        self._lock = threading.Lock()
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        self._set_size(columns, rows)
        self.raw = b""
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while True:
            with contextlib.suppress(OSError):
                if not select.select([self._master], [], [], 0.2)[0]:
                    if self.process.poll() is not None:
                        return
                    continue
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)

    def _set_size(self, columns, rows):
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns, rows):
        with self._lock:
            self.screen.resize(rows, columns)
        self._set_size(columns, rows)
        os.killpg(self.process.pid, signal.SIGWINCH)

    @property
    def lines(self):
        with self._lock:
            return [line.rstrip() for line in self.screen.display]

    @property
    def text(self):
        return "\n".join(self.lines)

    def press(self, *keys):
        for key in keys:
            os.write(self._master, KEYS.get(key, key).encode())

    def until(self, condition, seconds=60.0):
        """Wait for a text on the screen, or for a function of it; return the screen."""
        check = condition if callable(condition) else lambda text: condition in text
        deadline = time.monotonic() + seconds
        while not check(self.text):
            assert time.monotonic() < deadline, f"not on the screen: {condition}\n{self.text}"
            time.sleep(0.02)
        return self.text

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._reader.join(10)
        os.close(self._master)
