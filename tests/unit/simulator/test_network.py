"""Tests of transfers through shared pipes: their time alone and beside others, of one worker and of
the workers of a site.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from dlion_api.names import Rank
from dlion_environments.plan import (
    BYTES_PER_MBIT,
    Conditions,
    Pipe,
    WorkerConditions,
    tcp_bytes_per_s,
)
from dlion_simulator.clock import VirtualClock
from dlion_simulator.network import WIRE_EFFICIENCY, VirtualNetwork
from site_plans import plan_of_sites

RATE = 1e6
MBIT_PER_S = RATE / WIRE_EFFICIENCY / BYTES_PER_MBIT


def conditions(uplink: list[float], *, cut: frozenset[Rank] = frozenset()) -> Conditions:
    """Workers with an uplink and a downlink of that rate each, shared by all links."""
    everyone = frozenset(Rank(k) for k in range(len(uplink)))
    return Conditions(
        tuple(
            WorkerConditions(
                rank=Rank(k),
                uplink=(Pipe(everyone - {k}, rate / WIRE_EFFICIENCY),),
                downlink=(Pipe(everyone - {k}, rate / WIRE_EFFICIENCY),),
                cut_peers=cut if k not in cut else everyone - {k},
            )
            for k, rate in enumerate(uplink)
        )
    )


def finished(
    network: VirtualNetwork, clock: VirtualClock, transfers: list[tuple[int, int, int]]
) -> dict[tuple[int, int], float]:
    times: dict[tuple[int, int], float] = {}

    def through(link: tuple[int, int]) -> None:
        times[link] = clock.now_s

    for sender, receiver, size in transfers:
        network.begin(Rank(sender), Rank(receiver), size, partial(through, (sender, receiver)))
    while clock.advance():
        pass
    return times


def test_a_single_transfer_has_the_rate_of_the_slower_end() -> None:
    clock = VirtualClock()
    network = VirtualNetwork(clock, conditions([4 * RATE, RATE]))
    assert finished(network, clock, [(0, 1, 2_000_000)]) == {(0, 1): pytest.approx(2.0)}


def test_an_uplink_is_shared_and_an_ended_transfer_leaves_its_share_to_the_rest() -> None:
    clock = VirtualClock()
    network = VirtualNetwork(clock, conditions([RATE, 9 * RATE, 9 * RATE]))
    times = finished(network, clock, [(0, 1, 1_000_000), (0, 2, 500_000)])
    assert times[0, 2] == pytest.approx(1.0)
    assert times[0, 1] == pytest.approx(1.5)


def test_the_rate_that_one_receiver_cannot_use_goes_to_the_others() -> None:
    clock = VirtualClock()
    network = VirtualNetwork(clock, conditions([RATE, RATE / 4, RATE]))
    times = finished(network, clock, [(0, 1, 250_000), (0, 2, 750_000)])
    assert times == {(0, 1): pytest.approx(1.0), (0, 2): pytest.approx(1.0)}


def test_a_change_of_rate_applies_to_running_transfers() -> None:
    clock = VirtualClock()
    network = VirtualNetwork(clock, conditions([RATE, RATE]))
    clock.after(1.0, lambda: network.set_conditions(conditions([RATE / 2, RATE])))
    assert finished(network, clock, [(0, 1, 2_000_000)]) == {(0, 1): pytest.approx(3.0)}


def test_a_cut_link_carries_nothing_until_it_is_restored() -> None:
    clock = VirtualClock()
    network = VirtualNetwork(clock, conditions([RATE, RATE], cut=frozenset({Rank(1)})))
    clock.after(5.0, lambda: network.set_conditions(conditions([RATE, RATE])))
    assert finished(network, clock, [(0, 1, 1_000_000)]) == {(0, 1): pytest.approx(6.0)}


def test_loss_limits_a_link_by_the_formula_and_others_get_the_rest() -> None:
    lossy = Conditions(
        tuple(
            replace(
                worker,
                latency_s={Rank(1): 0.02} if worker.rank == 0 else {Rank(0): 0.03},
                loss_fraction={Rank(1): 0.02} if worker.rank == 0 else {},
            )
            for worker in conditions([RATE, RATE, RATE]).workers
        )
    )
    left = tcp_bytes_per_s(0.02, 0.05)
    assert left < RATE / 2
    clock = VirtualClock()
    times = finished(VirtualNetwork(clock, lossy), clock, [(0, 1, 1_000_000), (0, 2, 1_000_000)])
    assert times[0, 1] == pytest.approx(1_000_000 / left)
    assert times[0, 2] == pytest.approx(1_000_000 / (RATE - left))
    clock = VirtualClock()
    both = finished(VirtualNetwork(clock, lossy), clock, [(0, 1, 500_000), (1, 0, 1_000_000)])
    assert both[0, 1] == pytest.approx(500_000 / left)
    assert both[1, 0] == pytest.approx(1.0)


def test_a_cancelled_transfer_never_ends_and_leaves_its_share() -> None:
    clock = VirtualClock()
    network = VirtualNetwork(clock, conditions([RATE, RATE, RATE]))
    cancelled = network.begin(Rank(0), Rank(2), 10**9, lambda: pytest.fail("cancelled"))
    clock.after(1.0, lambda: network.end(cancelled))
    assert finished(network, clock, [(0, 1, 1_000_000)]) == {(0, 1): pytest.approx(1.5)}


@pytest.mark.parametrize("links", [[(0, 2), (1, 3)], [(0, 2), (1, 2)], [(2, 0), (3, 1)]])
def test_two_workers_of_a_site_have_half_of_its_rate_each(links: list[tuple[int, int]]) -> None:
    clock = VirtualClock()
    network = VirtualNetwork(clock, plan_of_sites("aabc", MBIT_PER_S).initial)
    times = finished(network, clock, [(*link, 1_000_000) for link in links])
    assert times == {link: pytest.approx(2.0) for link in links}


def test_a_worker_that_is_the_only_sender_has_the_whole_rate_of_its_site() -> None:
    clock = VirtualClock()
    network = VirtualNetwork(clock, plan_of_sites("aab", MBIT_PER_S).initial)
    times = finished(network, clock, [(0, 2, 1_000_000), (1, 2, 500_000), (2, 0, 1_000_000)])
    assert times[1, 2] == pytest.approx(1.0)
    assert times[0, 2] == pytest.approx(1.5), "all that the other worker left"
    assert times[2, 0] == pytest.approx(1.0), "the other direction"


def test_traffic_inside_a_site_takes_nothing_of_its_uplink() -> None:
    clock = VirtualClock()
    made = plan_of_sites("aab", MBIT_PER_S, insideSites={"mbitPerS": 4 * MBIT_PER_S})
    network = VirtualNetwork(clock, made.initial)
    times = finished(network, clock, [(0, 1, 4_000_000), (1, 2, 1_000_000)])
    assert times == {(0, 1): pytest.approx(1.0), (1, 2): pytest.approx(1.0)}


def test_a_change_of_a_sites_rate_applies_to_all_its_workers() -> None:
    clock = VirtualClock()
    changes = [{"at": {"seconds": 1}, "betweenSitesMbitPerS": MBIT_PER_S / 2}]
    made = plan_of_sites("aab", MBIT_PER_S, changes=changes)
    network = VirtualNetwork(clock, made.initial)
    clock.after(1.0, lambda: network.set_conditions(made.changes[0].conditions))
    times = finished(network, clock, [(0, 2, 1_000_000), (1, 2, 1_000_000)])
    assert times == {(0, 2): pytest.approx(3.0), (1, 2): pytest.approx(3.0)}


def test_with_a_rate_for_each_link_the_workers_of_a_site_share_nothing() -> None:
    clock = VirtualClock()
    network = VirtualNetwork(clock, plan_of_sites("aab", MBIT_PER_S, linkShape="perPeer").initial)
    times = finished(network, clock, [(0, 2, 1_000_000), (1, 2, 1_000_000)])
    assert times == {(0, 2): pytest.approx(1.0), (1, 2): pytest.approx(1.0)}
