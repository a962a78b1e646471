"""Test what links report of their TCP connections, with the kernel's own list.

A link has the figures of this process's connections to its peer, not of another process's. A peer
that is reached by a host name has them once the name is looked up. Peers at one address have none.
Without the kernel's list nothing changes.

Left out: real loss (tests/local/test_lossy_links), the report (tests/unit/results/test_report).
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest

from dlion_api.names import Rank
from dlion_core.links.events import LinkCounters
from dlion_worker.transport import connection_facts
from dlion_worker.transport.connection_facts import CountedLinks
from look_ups import look_ups_end

LINK = LinkCounters(
    connected=True, queued_bytes=0, unacknowledged_bytes=0, window_bytes=0, sent_total=5,
    acknowledged_total=5, dropped_messages=0,
)  # fmt: skip
CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', {})); sys.stdin.read()"


def links(*addresses: str) -> dict[Rank, LinkCounters]:
    return {Rank(rank): replace(LINK, address=each) for rank, each in enumerate(addresses)}


def with_connections(found: dict[Rank, LinkCounters]) -> dict[Rank, LinkCounters]:
    return CountedLinks(lambda: found).read(is_last=True)


def test_a_link_has_the_figures_of_the_own_connections_to_its_peer() -> None:
    with ExitStack() as closing:
        server = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        peer = f"127.0.0.1:{server.getsockname()[1]}"
        for count in (3, 2):
            sender = closing.enter_context(socket.create_connection(server.getsockname()))
            receiver = closing.enter_context(server.accept()[0])
            for _ in range(count):
                sender.sendall(b"x")
                receiver.recv(1)
        found = with_connections(links(peer, "127.0.0.1:1", "no host:1", ""))
        facts = found[Rank(0)].connection
        assert facts is not None
        assert (facts.sent_segments, facts.retransmitted_segments) == (5, 0)
        assert facts.min_round_trip_s is not None
        assert 0 < facts.min_round_trip_s <= facts.round_trip_s < 1
        assert all(each.connection is None for rank, each in found.items() if rank)
        shared = with_connections(links(peer, peer))
        assert all(each.connection is None for each in shared.values())


def test_a_link_by_host_name_has_the_figures_once_the_name_is_looked_up() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
    ):
        sender.sendall(b"x")
        port = server.getsockname()[1]
        reached = links(f"localhost:{port}", f"unknown.invalid:{port}")
        counted = CountedLinks(lambda: reached)
        assert counted.read(is_last=False) == reached, (
            "a report during the run has no figures of connections"
        )
        look_ups_end()
        found = counted.read(is_last=True)
        reached = links(f"localhost:{port}", f"127.0.0.1:{port}")
        shared = counted.read(is_last=True)
    facts = found[Rank(0)].connection
    assert facts is not None
    assert facts.sent_segments == 1
    assert found[Rank(1)].connection is None
    assert all(each.connection is None for each in shared.values()), "both are reached there"


def test_connections_of_other_processes_do_not_count() -> None:
    """Other than an own one that is open at the same time."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as own_server,
        socket.create_connection(own_server.getsockname()),
    ):
        server.settimeout(30)
        port, own_port = (each.getsockname()[1] for each in (server, own_server))
        with subprocess.Popen(
            [sys.executable, "-c", CONNECT.format(port)], stdin=subprocess.PIPE
        ) as other:
            receiver, _ = server.accept()
            with receiver:
                found = with_connections(links(f"127.0.0.1:{port}", f"127.0.0.1:{own_port}"))
            other.communicate()
    assert found[Rank(0)].connection is None
    assert found[Rank(1)].connection is not None


def test_a_kernel_that_lists_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(connection_facts, "own_connections", refused)
    assert with_connections(links("127.0.0.1:1")) == links("127.0.0.1:1")
