"""Test the loss and round trips of links with real namespaces, queues and packets that are lost.

Of two full links of one worker, only the one that loses packets has a large share of them. The
counts of both add up to the kernel's count for the whole namespace.

Left out: the kernel's messages (tests/unit/worker/sidecar/test_link_connections), pods.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlion_api.addresses import join_host_port
from dlion_api.errors import UnavailableError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_cli.findings.load_problems import LOST_FRACTION
from dlion_environments.plan import BYTES_PER_MBIT, Conditions, Pipe, Plan, WorkerConditions
from dlion_local.emulation.network.in_namespace import in_namespace, run_tool
from dlion_local.emulation.network.namespaces import NamespaceNetwork, namespaces_unavailable
from dlion_worker.sidecar.link_connections import LinkConnections, SiteConnections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(namespaces_unavailable()), reason=namespaces_unavailable() or "-"),
]
SENDER, LOSSY, WHOLE = (Rank(rank) for rank in range(3))
SITES = {LOSSY: SiteName("b"), WHOLE: SiteName("c")}
MBIT_PER_S, LOSS = 20.0, 0.1


@pytest.fixture
def network() -> Iterator[NamespaceNetwork]:
    ranks = frozenset((SENDER, LOSSY, WHOLE))
    workers = []
    for rank in sorted(ranks):
        pipe = Pipe(ranks - {rank}, MBIT_PER_S * BYTES_PER_MBIT)
        workers.append(WorkerConditions(rank, None, (pipe,), (pipe,), {}, frozenset()))
    identities = tuple(WorkerIdentity(rank, SiteName("a"), "g", rank) for rank in sorted(ranks))
    conditions = Conditions(tuple(workers))
    made = NamespaceNetwork(Plan("lossy", identities, 1.0, 1.0, conditions))
    rule = f"INPUT -p tcp -m statistic --mode random --probability {LOSS} -j DROP"
    with closing(made):
        made.start()
        entered = "netns", "exec", made.namespace(LOSSY), "iptables", "-A", *rule.split()
        try:
            run_tool("ip", *entered)
        except UnavailableError as error:
            if os.environ.get("DLION_REQUIRE_TESTBED"):
                raise
            pytest.skip(f"no iptables with the kernel module xt_statistic: {error}")
        yield made


def segments_sent_again() -> int:
    """Return the count of this thread's network namespace, since its creation."""
    text = Path("/proc/thread-self/net/snmp").read_text()
    names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


@contextmanager
def full_link(network: NamespaceNetwork, receiver: Rank) -> Iterator[str]:
    """Send as much as the link carries, inside the context; yield the receiver's address."""
    with network.listener(receiver) as listener:
        sending = network.dial(SENDER, receiver, listener.getsockname()[1])
        receiving, _ = listener.accept()
    ended = threading.Event()

    def repeat(act: Callable[[], object]) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                act()

    acts = (lambda: sending.send(bytes(1 << 16)), lambda: receiving.recv(1 << 20))
    threads = [threading.Thread(target=repeat, args=(act,)) for act in acts]
    with sending, receiving:
        sending.settimeout(0.2)
        receiving.settimeout(0.2)
        for thread in threads:
            thread.start()
        try:
            host, port = sending.getpeername()[:2]
            yield join_host_port(host, port)
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def test_only_the_link_that_loses_packets_has_a_large_share_of_them(
    network: NamespaceNetwork,
) -> None:
    with full_link(network, LOSSY) as lossy, full_link(network, WHOLE) as whole:
        links = LinkConnections()
        links.set_addresses([(lossy, SITES[LOSSY]), (whole, SITES[WHOLE])])

        def sample() -> tuple[Mapping[SiteName, SiteConnections], int]:
            return links.sample(), segments_sent_again()

        time.sleep(2.0)
        by_site, resent = in_namespace(network.namespace(SENDER), sample)
    lost = {site: x.retransmitted_segments / x.sent_segments for site, x in by_site.items()}
    assert lost[SITES[LOSSY]] == pytest.approx(LOSS, rel=0.4)
    assert lost[SITES[WHOLE]] < LOST_FRACTION
    # The connections go on between the two readings.
    both = sum(each.retransmitted_segments for each in by_site.values())
    assert both == pytest.approx(resent, abs=5)
    for each in by_site.values():
        assert each.round_trip_s is not None
        assert each.min_round_trip_s is not None
        assert 0 < each.min_round_trip_s <= each.round_trip_s < 1
