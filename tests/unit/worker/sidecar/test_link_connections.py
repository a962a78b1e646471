"""Tests of loss and round trips by site, with the kernel's own list of sockets.

A real connection is found at its address, of both IP families, and its counts grow. What sites add
up to never shrinks: connections end, counts start again from 0. Truncated lists are no error.

Left out: look-ups of host names (tests/unit/worker/test_host_names), real loss
(tests/local/test_lossy_links), a real sidecar (tests/local/test_sidecar).
"""

from __future__ import annotations

import socket
import struct
import threading
from ipaddress import ip_address
from typing import TYPE_CHECKING

import pytest

from dlion_api.addresses import join_host_port
from dlion_api.names import SiteName
from dlion_worker.sidecar import link_connections
from dlion_worker.sidecar.link_connections import LinkConnections, SiteConnections
from dlion_worker.tcp_connections import TcpConnection, _read_messages
from ipv6 import needs_ipv6
from look_ups import look_ups_end

if TYPE_CHECKING:
    from collections.abc import Iterable

A, B = SiteName("a"), SiteName("b")
NEAR, FAR = (ip_address("10.0.0.7"), 7440), (ip_address("fd00::9"), 7440)


def links(*pairs: tuple[str, SiteName]) -> LinkConnections:
    made = LinkConnections()
    made.set_addresses(pairs)
    return made


@pytest.mark.parametrize(
    ("listening", "dialled"),
    [
        ("127.0.0.1", "127.0.0.1"),
        pytest.param("127.0.0.1", "::ffff:127.0.0.1", marks=needs_ipv6),
        pytest.param("::1", "::1", marks=needs_ipv6),
    ],
)
def test_a_connection_has_its_segments_and_round_trip(listening: str, dialled: str) -> None:
    families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in (listening, dialled)]
    with (
        socket.create_server((listening, 0), family=families[0]) as server,
        socket.socket(families[1]) as sender,
    ):
        port = server.getsockname()[1]
        sender.connect((dialled, port))
        receiver, _ = server.accept()
        found = links((join_host_port(listening, port), B), (f"10.0.0.7:{port}", A))
        with receiver:
            before = found.sample()[B]
            for _ in range(5):
                sender.sendall(b"x")
                receiver.recv(1)
            (site, now), *others = found.sample().items()
    assert (site, others) == (B, [])
    assert now.sent_segments == before.sent_segments + 5
    assert now.retransmitted_segments == 0
    assert now.round_trip_s is not None
    assert now.min_round_trip_s is not None
    assert 0 < now.min_round_trip_s <= now.round_trip_s < 1
    ended = found.sample()[B]
    assert ended == SiteConnections(now.sent_segments, 0)


def connection(
    cookie: int, sent: int, again: int = 0, *, rtt_s: float = 0.1, at: object = NEAR
) -> TcpConnection:
    assert isinstance(at, tuple)
    return TcpConnection(cookie, at, sent, again, rtt_s, rtt_s / 2)


def test_the_connections_of_a_site_add_up_and_never_shrink() -> None:
    found = links(("10.0.0.7:7440", A), ("10.0.0.8:7440", A), ("[fd00::9]:7440", B))
    other = ip_address("10.0.0.8"), 7440
    samples: list[tuple[list[TcpConnection], int, int, float | None]] = [
        ([connection(1, 100, 3), connection(2, 10, 1, rtt_s=0.4, at=other)], 110, 4, 0.4),
        ([connection(1, 150, 3), connection(2, 10, 2, rtt_s=0.2, at=other)], 160, 5, 0.2),
        ([connection(1, 151, 3)], 161, 5, 0.1),  # the second one has ended
        ([connection(3, 7, 7)], 168, 12, 0.1),  # and the first one was replaced
        ([], 168, 12, None),
    ]
    for connections, sent, again, longest_s in samples:
        foreign = connection(9, 1000, at=(ip_address("10.0.0.7"), 50000))
        by_site = found.add([*connections, foreign, connection(8, 20, at=FAR)])
        assert (by_site[A].sent_segments, by_site[A].retransmitted_segments) == (sent, again)
        assert by_site[A].round_trip_s == longest_s
        assert by_site[B] == SiteConnections(20, 0, 0.1, 0.05)


def test_counts_that_start_again_go_on() -> None:
    found = links(("10.0.0.7:7440", A))
    most = (1 << 32) - 1
    found.add([connection(1, most, most)])
    assert found.add([connection(1, 4, 0)])[A].sent_segments == most + 5
    assert found.add([connection(1, 4, 0)])[A].retransmitted_segments == most + 1


@pytest.mark.parametrize("address", ["peer.example:7440", "10.0.0.7:x", "", "10.0.0.7", ":7440"])
def test_what_is_no_address_is_left_out(address: str) -> None:
    assert links((address, A)).add([connection(1, 5)]) == {}


def test_the_connection_to_a_host_name_is_found_at_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as sender:
            sender.sendall(b"x")
            found = links((f"localhost:{port}", A))
            found.sample()
            look_ups_end()
            assert found.sample()[A].sent_segments == 1, "since its beginning"
            found.set_addresses([(f"localhost:{port}", A), (f"127.0.0.1:{port}", B)])
            assert found.sample()[A].round_trip_s is None, "both sites are reached there"


def test_a_connection_is_counted_once_although_its_peer_was_away() -> None:
    """A peer is lost for the coordinator while its link stays up."""
    found = links(("10.0.0.7:7440", A))
    found.add([connection(1, 1_000_000, 500)])
    found.set_addresses(())
    found.add([connection(1, 1_000_005, 500)])
    found.set_addresses([("10.0.0.7:7440", A)])
    now = found.add([connection(1, 1_000_010, 501)])[A]
    assert (now.sent_segments, now.retransmitted_segments) == (1_000_010, 501)


def test_a_connection_counts_from_its_beginning_although_its_peer_is_reported_later() -> None:
    found = links()
    assert found.add([connection(1, 3)]) == {}
    found.set_addresses([("10.0.0.7:7440", A)])
    assert found.add([connection(1, 4)])[A].sent_segments == 4


def test_samples_of_several_threads_are_added_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus and `dlion top` may read at once. The first reader is the slower one."""
    sent, is_read, is_over = iter(range(1, 3)), threading.Event(), threading.Event()

    def read() -> list[TcpConnection]:
        segments = next(sent)
        if not is_read.is_set():
            is_read.set()
            is_over.wait(0.2)
        return [connection(1, segments)]

    monkeypatch.setattr(link_connections, "tcp_connections", read)
    found = links(("10.0.0.7:7440", A))
    slower = threading.Thread(target=found.sample)
    slower.start()
    is_read.wait()
    assert found.sample()[A].sent_segments == 2
    is_over.set()
    slower.join()
    assert found.add([connection(1, 2)])[A].sent_segments == 2


def test_a_kernel_that_lists_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> list[TcpConnection]:
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(link_connections, "tcp_connections", refused)
    assert links(("10.0.0.7:7440", A)).sample() == {}


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body


def body(info: bytes) -> bytes:
    """One connection to 10.0.0.7:7440 with that `tcp_info`, after another attribute."""
    head = struct.pack("=BBBBHH", socket.AF_INET, 1, 0, 0, 0, socket.htons(7440))
    addresses = bytes(16) + ip_address("10.0.0.7").packed + bytes(12)
    socket_facts = head + addresses + struct.pack("=IQ5I", 0, 77, 0, 0, 0, 0, 0)
    return (
        socket_facts + struct.pack("=HHB3x", 5, 8, 1) + struct.pack("=HH", 4 + len(info), 2) + info
    )


def info(values: Iterable[tuple[int, int]], size: int = 232) -> bytes:
    made = bytearray(size)
    for offset, value in values:
        struct.pack_into("=I", made, offset, value)
    return bytes(made)


def test_messages_of_the_kernel_are_read_up_to_the_last_one() -> None:
    whole = info([(68, 12_500), (100, 3), (148, 0xFFFFFFFF), (156, 400)])
    old = info([(68, 12_500)], size=104)  # of Linux before 4.6
    found: list[TcpConnection] = []
    assert _read_messages(message(20, body(old)) + message(20, body(whole)), found)
    assert found == [TcpConnection(77, NEAR, 400, 3, 0.0125, None)]
    assert not _read_messages(message(3, bytes(4)) + message(20, body(whole)), found)
    assert len(found) == 1
    with pytest.raises(OSError, match="no connections") as error:
        _read_messages(message(2, struct.pack("=i", -13)), found)
    assert error.value.errno == 13


@pytest.mark.parametrize("wrong", [message(2, b""), struct.pack("=IHHII", 0, 20, 0, 1, 0)])
def test_an_invalid_list_is_an_error(wrong: bytes) -> None:
    with pytest.raises(OSError, match="not valid"):
        _read_messages(wrong, [])


def test_a_message_without_a_socket_is_left_out() -> None:
    found: list[TcpConnection] = []
    assert _read_messages(message(20, bytes(8)), found)
    assert found == []
