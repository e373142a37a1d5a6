"""Which interface has an address: gloo and NCCL take its name."""
from __future__ import annotations

import socket

import pytest

from llmgw.system import addresses


def test_the_interface_of_an_own_address_is_one_of_the_machines_and_a_strangers_has_none():
    names = {name for _, name in socket.if_nameindex()}
    assert all(addresses.interface_of(found) in names - {"lo"} for found in addresses.own_addresses())
    assert addresses.interface_of("198.51.100.7") == addresses.interface_of("2001:db8::7") == ""


@pytest.mark.parametrize("address, name", [("127.0.0.1", "lo"), ("127.0.0.2", "lo"), ("::1", "lo"), ("", ""), ("node-1", "")])
def test_loopback_is_lo_and_what_is_no_address_has_no_interface(address, name):
    assert addresses.interface_of(address) == name
