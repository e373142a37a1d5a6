"""The names and addresses of this machine, as others may know it."""
from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
from typing import List, Tuple

LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915         # Linux
_IF_INET6 = "/proc/net/if_inet6"


def own_names() -> List[str]:
    """Return localhost, the host's names and its addresses, loopback first; what cannot be found out is left out."""
    name = socket.gethostname()
    found = ["localhost", "127.0.0.1", "::1", name, socket.getfqdn(name), *own_addresses()]
    return list(dict.fromkeys(item.lower() for item in found if item and _is_name(item)))


def own_addresses() -> List[str]:
    """Return the addresses of this machine's interfaces, without loopback."""
    found = [*(address for _, address in _of_interfaces()),
             _towards("192.0.2.1", socket.AF_INET), _towards("2001:db8::1", socket.AF_INET6)]
    return [item for item in dict.fromkeys(found) if item and not ipaddress.ip_address(item).is_loopback]


def interface_of(address: str) -> str:
    """Return the network interface that has this address; empty when none is seen to have it."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if wanted.is_loopback:
        return LOOPBACK
    found = _of_interfaces() if wanted.version == 4 else _of_interfaces_6()
    return next((name for name, item in found if ipaddress.ip_address(item) == wanted), "")


def towards(host: str, port: int) -> str:
    """Return the address of this machine that a connection to ``host`` comes from; empty when there is no way there."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)              # of a datagram socket: nothing is sent
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return ""


def _towards(host: str, family: int) -> str:
    """Return the address that packets to ``host`` would leave from; nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _of_interfaces() -> List[Tuple[str, str]]:
    """Return (name, first IPv4 address) of each."""
    if sys.platform != "linux":
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
            except OSError:                         # an interface without an IPv4 address
                continue
    return found


def _of_interfaces_6() -> List[Tuple[str, str]]:
    """Return (name, address) of each IPv6 address: it is 32 hex digits, the name is the last word of its line."""
    try:
        with open(_IF_INET6, encoding="ascii") as source:
            words = [line.split() for line in source]
    except OSError:                                 # a kernel without IPv6
        return []
    return [(line[5], str(ipaddress.IPv6Address(int(line[0], 16)))) for line in words if len(line) == 6]


def _is_name(text: str) -> bool:
    """Whether a certificate can be made for it: host names may have come from anywhere."""
    return all(letter.isascii() and (letter.isalnum() or letter in ".-_:") for letter in text) and len(text) < 254
