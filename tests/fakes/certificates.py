"""A real CA and certificates for tests, made by the openssl program through the product's own code."""
from __future__ import annotations

import pathlib
import time

from llmgw.system import openssl


class TestCa:
    """``pem`` is its certificate; ``certificate(NAMES)`` gives the files of a new one."""

    __test__ = False

    def __init__(self, folder, name="test CA", now=None):
        self.folder = pathlib.Path(folder)
        self.now = time.time() if now is None else now
        self.folder.mkdir(parents=True, exist_ok=True)
        openssl.make_ca(str(self.folder), name, self.now, 3650)
        self.files = (str(self.folder / "ca.pem"), str(self.folder / "ca.key"))
        self.pem = (self.folder / "ca.pem").read_text()

    def certificate(self, *names, days=30):
        """Return the paths of certificate and key."""
        number = len(list(self.folder.glob("leaf-*")))
        place = self.folder / f"leaf-{number}"
        place.mkdir()
        key, out = str(place / "key.pem"), str(place / "cert.pem")
        openssl.make_key(key)
        openssl.make_certificate(str(place), self.files, key, out, names, self.now, days)
        return out, key

    def both(self, *names):
        """Return the path of one file with certificate and key."""
        certificate, key = self.certificate(*names)
        path = pathlib.Path(certificate).with_name("both.pem")
        path.write_text(pathlib.Path(certificate).read_text() + pathlib.Path(key).read_text())
        return str(path)
