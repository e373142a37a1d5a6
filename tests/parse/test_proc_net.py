"""Who listens where, as the kernel writes it."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.parse.proc_net import Listener, is_loopback, listeners

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:07E8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1234 1 0000000000000000 100 0 0 10 0
   1: 0100007F:1EDC 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 77 1 0000000000000000 100 0 0 10 0
   2: 0100007F:1EDC 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 78 1 0000000000000000 20 4 30 10 -1
"""
TCP6 = """  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 5 1 0 100 0 0 10 0
   1: 00000000000000000000000001000000:0051 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 6 1 0 100 0 0 10 0
   2: 0000000000000000FFFF00000100007F:0052 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 7 1 0 100 0 0 10 0
"""


def test_listening_sockets_are_read_and_connections_are_not():
    assert listeners(TCP) == (Listener("0.0.0.0", 2024, "1234"), Listener("127.0.0.1", 7900, "77"))
    assert [(item.address, item.port, item.is_loopback) for item in listeners(TCP6)] == [
        ("::", 80, False), ("::1", 81, True), ("::ffff:127.0.0.1" if ":ffff:127" in listeners(TCP6)[2].address else "::ffff:7f00:1", 82, True)]


def test_a_machine_of_the_other_byte_order_is_read_too():
    assert listeners(TCP.replace("0100007F", "7F000001"), "big")[1].address == "127.0.0.1"


@pytest.mark.parametrize("address, only_here", [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
                                                ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("fe80::1", False)])
def test_what_only_this_machine_reaches(address, only_here):
    assert is_loopback(address) is only_here


@given(st.text(max_size=200))
@settings(deadline=None)
def test_any_text_is_passed_over(text):
    assert all(0 <= item.port < 65536 for item in listeners(text))
