"""Addresses as people write them."""
from __future__ import annotations

import ipaddress
import re
from typing import Tuple

from llmgw.domain.errors import ParseError

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,20})?")
_LISTEN = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):([0-9]{1,5})")
_URL = re.compile(r"(https?)://([^/@\s]+)/?")
_NO_PORT = re.compile(r"\[[^\[\]]+\]|[^\[\]:]+")


def host(text: str) -> str:
    """Return ``text`` when it can be a host name or an IP address."""
    if not _HOST.fullmatch(text):
        raise ParseError(f"not a host name or IP address: {text!r:.100}")
    return text


def host_port(text: str) -> Tuple[str, int]:
    """Return the two parts of ``HOST:PORT`` or ``[IPv6]:PORT``; port 0 means a free one."""
    match = _LISTEN.fullmatch(text)
    if match is None or int(match.group(3)) > 65535:
        raise ParseError(f"not an address to listen on: {text!r:.100}", hint="write it as HOST:PORT")
    return host(match.group(1) or match.group(2)), int(match.group(3))


def joined(host: str, port: int) -> str:
    """Return ``HOST:PORT``, or ``[IPv6]:PORT``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def absolute_path(text: str) -> str:
    """Return ``text`` when it is an absolute path."""
    if not text.startswith("/"):
        raise ParseError(f"expected an absolute path, got {text!r:.100}")
    return text


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a program that listens there. A name other than localhost may not be."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_url(text: str) -> str:
    """Return ``http(s)://HOST[:PORT]`` without a slash at its end."""
    match = _URL.fullmatch(text)
    if match is None:
        raise ParseError(f"not a server address: {text!r:.100}", hint="write it as https://HOST:PORT")
    place = match.group(2)
    try:
        if _NO_PORT.fullmatch(place):
            host(place.strip("[]"))
        else:
            host_port(place)
    except ParseError:
        raise ParseError(f"not a server address: {text!r:.100}",
                         hint="write it as https://HOST:PORT") from None
    return f"{match.group(1)}://{place}"
