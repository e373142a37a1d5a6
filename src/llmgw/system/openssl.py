"""Certificates, made by the openssl program (1.1.1 to 3.x): all in configuration files, no flags that differ.

``openssl ca`` and not ``x509 -req``: only it can date a certificate back, for nodes whose clock is behind.
"""
from __future__ import annotations

import base64
import hashlib
import ipaddress
import os
import secrets
import shutil
import ssl
import time
from typing import Iterable, Optional, Tuple

from llmgw.domain.command import Command
from llmgw.domain.errors import CommandFailed, RequirementMissing
from llmgw.system import files
from llmgw.system.process import Processes

BACK_SECONDS = 24 * 3600.0
TIMEOUT_SECONDS = 60.0
_CONFIG = """\
[req]
distinguished_name = dn
prompt = no
[dn]
CN = {name}
[ca]
default_ca = this
[this]
database = index
serial = serial
unique_subject = no
new_certs_dir = .
default_md = sha256
policy = any
[any]
commonName = supplied
[extensions]
{extensions}
"""
_CA = """\
basicConstraints = critical,CA:TRUE,pathlen:0
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
"""
# Python 3.13 refuses a certificate without key identifiers and key usage.
_LEAF = """\
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid:always
subjectAltName = {names}
"""


def program() -> str:
    """Return the path of openssl; RequirementMissing, naming the package, when there is none."""
    found = shutil.which("openssl", path=_path())
    if found is None:
        raise RequirementMissing(
            "the program openssl is missing: off loopback llmgw listens with TLS only, and openssl makes "
            "its certificates",
            hint="install the package openssl (apt-get install openssl, dnf install openssl), or name a certificate "
                 "of your own in server.yaml: tls: {certificate: FILE, key: FILE}")
    return found


def make_key(path: str) -> None:
    """Write a new P-256 key to ``path``."""
    _run("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-pkeyopt",
         "ec_param_enc:named_curve", "-out", path)
    os.chmod(path, 0o600)


def make_ca(folder: str, name: str, now: float, days: int) -> None:
    """Write ``ca.key`` and a self-signed ``ca.pem`` into ``folder``."""
    key, out = os.path.join(folder, "ca.key"), os.path.join(folder, "ca.pem")
    make_key(key)
    _sign(folder, name, _CA, key, out, ("-selfsign", "-keyfile", key), now, days)


def make_certificate(folder: str, ca: Tuple[str, str], key: str, out: str, names: Iterable[str], now: float,
                     days: int) -> None:
    """Write a certificate of ``key`` for ``names`` (hosts, addresses) to ``out``; ``folder`` is for scratch files."""
    listed = list(names)
    _sign(folder, listed[0][:64], _LEAF.format(names=",".join(map(_alternative, listed))), key, out,
          ("-cert", ca[0], "-keyfile", ca[1]), now, days)


def ends_at(certificate: str) -> float:
    """Return when the (first) certificate of a file ends, by the wall clock."""
    said = _run("x509", "-noout", "-enddate", "-in", certificate).strip()
    try:
        return float(ssl.cert_time_to_seconds(said.partition("=")[2]))
    except ValueError:
        raise CommandFailed(f"openssl says of {certificate}: {said:.100}") from None


def key_pin(certificate: str) -> str:
    """Return the base64 sha256 of the public key of a file's first certificate, as curl takes it for a pin."""
    pem = _run("x509", "-noout", "-pubkey", "-in", certificate)
    der = base64.b64decode("".join(row for row in pem.splitlines() if not row.startswith("-")))
    return base64.b64encode(hashlib.sha256(der).digest()).decode("ascii")


def _sign(folder: str, name: str, extensions: str, key: str, out: str, signer: Tuple[str, ...], now: float,
          days: int) -> None:
    config, request = os.path.join(folder, "openssl.cnf"), os.path.join(folder, "request.pem")
    files.write_atomic(config, _CONFIG.format(name=name, extensions=extensions).encode())
    files.write_atomic(os.path.join(folder, "index"), b"")
    files.write_atomic(os.path.join(folder, "serial"), b"5A" + secrets.token_hex(15).upper().encode())
    _run("req", "-new", "-config", config, "-key", key, "-out", request)
    _run("ca", "-batch", "-notext", "-config", config, "-name", "this", "-extensions", "extensions",
         "-startdate", _stamp(now - BACK_SECONDS), "-enddate", _stamp(now + days * 86400.0), "-in", request,
         "-out", out, *signer, cwd=folder)


def _stamp(at: float) -> str:
    return time.strftime("%Y%m%d%H%M%SZ", time.gmtime(at))


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"


def _path() -> str:
    return os.environ.get("PATH", "") + os.pathsep + "/usr/local/bin:/usr/bin:/bin"


def _run(*words: str, cwd: Optional[str] = None) -> str:
    command = Command((program(), *words), env={"PATH": _path(), "LANG": "C"}, cwd=cwd)
    done = Processes().run(command, timeout=TIMEOUT_SECONDS)
    if done.code != 0:
        lines = [line for line in done.err.splitlines() if line.strip()]
        raise CommandFailed(f"openssl {words[0]} failed: {'; '.join(lines[-3:])[:400] or f'exit code {done.code}'}")
    return done.out
