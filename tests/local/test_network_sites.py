"""Test shaped links of sites, with the relay and with real namespaces.

The workers of a site share the rate of one worker to and from other sites, and each link has the
same part. Traffic inside a site uses none of it. A new rate applies to all of them. A cut site is
silent and continues when restored. Nothing stays behind.

Left out: links of workers that share nothing (test_network_relay, test_network_namespaces).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attempts import first_that_holds
from dlion_api.names import Rank
from dlion_environments.plan import BYTES_PER_MBIT
from dlion_local.emulation.measurement import measure_transfers
from dlion_local.emulation.network import namespaces
from dlion_local.emulation.network.in_namespace import in_namespace
from dlion_local.emulation.network.namespaces import NamespaceNetwork, namespaces_unavailable
from dlion_local.emulation.network.relay_network import RelayNetwork, UnshapedNetwork
from site_plans import plan_of_sites

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlion_environments.plan import Plan

NAMESPACES = pytest.param(
    "namespaces",
    marks=[
        pytest.mark.root,
        pytest.mark.skipif(bool(namespaces_unavailable()), reason=namespaces_unavailable() or "-"),
    ],
)
SITES = "aabbc"
BETWEEN, INSIDE, SLOWER = 20.0, 60.0, 5.0
LONG_S = 30.0
SILENCE_S = 0.3
"""How long to listen for a message that must not arrive."""
CHANGES = [
    {"at": {"seconds": 1}, "betweenSitesMbitPerS": SLOWER},
    {"at": {"seconds": 2}, "cutSites": ["b"]},
]
PLAN = plan_of_sites(
    SITES,
    BETWEEN,
    sites=[{"name": "a", "workers": 2}, {"name": "b", "workers": 2}, {"name": "c", "workers": 1}],
    insideSites={"mbitPerS": INSIDE},
    changes=CHANGES,
)


def left_behind() -> set[str]:
    """Return namespaces and interfaces of the runner that such a network could leave behind."""
    folder = Path("/run/netns")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    return {name for name in names if f"-{os.getpid()}-" in name} | {
        name for name in links if name.startswith((f"dl{os.getpid()}x", "up", "down", "site"))
    }


@pytest.fixture(params=["relay", NAMESPACES])
def start(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[Plan], UnshapedNetwork]]:
    """Start the network of a plan; at the end nothing of it may be left."""
    started: list[UnshapedNetwork] = []

    def start_network(plan: Plan) -> UnshapedNetwork:
        is_relay = request.param == "relay"
        started.append(RelayNetwork(plan, tmp_path) if is_relay else NamespaceNetwork(plan))
        started[-1].start()
        return started[-1]

    yield start_network
    for network in started:
        network.close()
    assert left_behind() == set()


@pytest.fixture
def network(start: Callable[[Plan], UnshapedNetwork]) -> UnshapedNetwork:
    return start(PLAN)


def rates(network: UnshapedNetwork, *links: tuple[int, int]) -> list[float]:
    """Return Mbit/s of each link with all of them busy."""
    pairs = [(Rank(sender), Rank(receiver)) for sender, receiver in links]
    done = measure_transfers(network, pairs, seconds=1.5)
    return [one.bytes_per_s(skip_s=0.5) / BYTES_PER_MBIT for one in done]


@pytest.mark.parametrize(
    "links",
    [
        pytest.param([(0, 2), (1, 4)], id="from one site to two"),
        pytest.param([(4, 0), (2, 1)], id="from two sites to one"),
        pytest.param([(0, 2), (0, 3), (1, 2)], id="links of one worker and of another"),
    ],
)
def test_workers_of_a_site_share_the_rate_of_one(
    network: UnshapedNetwork, links: list[tuple[int, int]]
) -> None:
    def alone_and_beside() -> tuple[float, list[float]]:
        return rates(network, links[0])[0], rates(network, *links)

    def is_shared(measured: tuple[float, list[float]]) -> bool:
        alone, beside = measured
        is_like_one = 0.85 <= sum(beside) / alone <= 1.1 and max(beside) <= 1.4 * min(beside)
        return 0.85 <= alone / BETWEEN <= 1.05 and is_like_one

    first_that_holds(alone_and_beside, is_shared, attempts=8)


def test_a_worker_alone_at_its_site_has_the_smaller_of_both_rates(
    start: Callable[[Plan], UnshapedNetwork],
) -> None:
    workers = [{"count": 2, "cores": 1, "mbitPerS": BETWEEN}]
    network = start(plan_of_sites("ab", SLOWER, workers=workers))
    first_that_holds(lambda: rates(network, (0, 1))[0] / SLOWER, lambda rate: 0.85 <= rate <= 1.05)


@pytest.mark.root
@pytest.mark.skipif(bool(namespaces_unavailable()), reason=namespaces_unavailable() or "-")
def test_workers_of_a_site_with_many_links_share_its_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces, "MAX_SITE_LEAVES", 1)
    network = NamespaceNetwork(PLAN)
    network.start()
    try:
        for links in ([(0, 2), (1, 4)], [(4, 0), (2, 1)]):
            first_that_holds(
                lambda links=links: sum(rates(network, *links)) / BETWEEN,
                lambda rate: 0.85 <= rate <= 1.1,
            )
    finally:
        network.close()


def test_traffic_inside_a_site_uses_none_of_its_uplink(network: UnshapedNetwork) -> None:
    def measured() -> tuple[float, float]:
        inside, between = rates(network, (0, 1), (1, 2))
        return inside / INSIDE, between / BETWEEN

    first_that_holds(measured, lambda them: min(them) >= 0.85 and max(them) <= 1.05)


def test_a_new_rate_holds_for_all_workers_of_a_site(network: UnshapedNetwork) -> None:
    network.apply(PLAN.changes[0].conditions)
    first_that_holds(
        lambda: sum(rates(network, (0, 2), (1, 4))), lambda rate: 0.8 <= rate / SLOWER <= 1.1
    )
    network.apply(PLAN.initial)
    first_that_holds(
        lambda: sum(rates(network, (0, 2), (1, 4))), lambda rate: 0.85 <= rate / BETWEEN <= 1.1
    )


def test_a_cut_site_is_silent_and_continues_when_restored(network: UnshapedNetwork) -> None:
    connections = []
    for sender, receiver in ((0, 2), (2, 3), (1, 4)):
        with network.listener(Rank(receiver)) as listener:
            port = listener.getsockname()[1]
            sending = network.dial(Rank(sender), Rank(receiver), port)
            receiving, _ = listener.accept()
        receiving.settimeout(LONG_S)
        connections.append((sending, receiving))
    try:
        network.apply(PLAN.changes[1].conditions)
        for sending, _ in connections:
            sending.sendall(b"word")
        (_, cut), *others = connections
        assert [receiving.recv(4) for _, receiving in others] == [b"word", b"word"]
        cut.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            cut.recv(4)
        network.apply(PLAN.changes[0].conditions)
        cut.settimeout(LONG_S)  # TCP retries after its own delay
        assert cut.recv(4) == b"word"
    finally:
        for one in (one for pair in connections for one in pair):
            one.close()


@pytest.mark.parametrize("letters", ["aaaa", "aabb", "abcc", "abcd"])
def test_all_workers_are_reached_and_nothing_stays(
    letters: str, start: Callable[[Plan], UnshapedNetwork]
) -> None:
    network = start(plan_of_sites(letters, BETWEEN))
    for rank in range(1, 4):
        with network.listener(Rank(rank)) as listener:
            network.dial(Rank(0), Rank(rank), listener.getsockname()[1]).close()
            listener.accept()[0].close()


@pytest.mark.root
@pytest.mark.skipif(bool(namespaces_unavailable()), reason=namespaces_unavailable() or "-")
def test_a_sites_rate_does_not_limit_traffic_to_the_runner() -> None:
    network = NamespaceNetwork(PLAN)
    network.start()
    try:
        with socket.create_server((network.coordinator_host(), 0)) as server:
            address = server.getsockname()
            worker = in_namespace(
                network.namespace(Rank(0)),
                lambda: socket.create_connection(address, timeout=LONG_S),
            )
            accepted, _ = server.accept()
        with worker, accepted:
            for sender, receiver in ((worker, accepted), (accepted, worker)):
                # 0.4 s at the site's rate
                first_that_holds(lambda a=sender, b=receiver: seconds(a, b), lambda it: it < 0.25)
    finally:
        network.close()


def seconds(sender: socket.socket, receiver: socket.socket) -> float:
    """Return the seconds that a megabyte takes."""
    started_s, left_bytes = time.monotonic(), 1_000_000
    sending = threading.Thread(target=sender.sendall, args=(bytes(left_bytes),))
    sending.start()
    while left_bytes:
        left_bytes -= len(receiver.recv(left_bytes))
    sending.join()
    return time.monotonic() - started_s
