"""/proc/net/tcp and tcp6: who listens where. Addresses are hex words of four bytes, each in the machine's order."""
from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import List, Tuple

_LISTEN = "0A"
_LINE = re.compile(r"\s*\d+: ([0-9A-Fa-f]{8}|[0-9A-Fa-f]{32}):([0-9A-Fa-f]{4}) [0-9A-Fa-f]+:[0-9A-Fa-f]{4} "
                   r"([0-9A-Fa-f]{2}) \S+ \S+ \S+ +\d+ +\d+ (\d+)")


@dataclass(frozen=True)
class Listener:
    """A listening socket; ``address`` as people write it."""

    address: str
    port: int
    inode: str

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.address)

    @property
    def plain_address(self) -> str:
        """The address; of one that IPv6 wraps (::ffff:10.0.0.1), the IPv4 address inside."""
        found = ipaddress.ip_address(self.address)
        inner = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return str(inner or found)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches ``address``; ::ffff:127.0.0.1 is loopback, too."""
    found = ipaddress.ip_address(address)
    inner = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (inner or found).is_loopback


def listeners(text: str, byteorder: str = "little") -> Tuple[Listener, ...]:
    """Return the listening sockets of a file; lines that are none are passed over."""
    found: List[Listener] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and match.group(3) == _LISTEN:
            found.append(Listener(_address(match.group(1), byteorder), int(match.group(2), 16), match.group(4)))
    return tuple(found)


def _address(text: str, byteorder: str) -> str:
    data = bytes.fromhex(text)
    if byteorder == "little":
        data = b"".join(data[at:at + 4][::-1] for at in range(0, len(data), 4))
    return str(ipaddress.ip_address(data))
