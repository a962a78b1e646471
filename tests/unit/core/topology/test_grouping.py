"""Tests of the sidecar's link rates and of the controller's grouping.

A link is known after three probes. Its rate is the one that all but one of the last five probes
reached, and at most the rate that a probe can resolve. Unknown links are probed soon. Known links
are probed in turn, one every five seconds, used or not.

A controller budgets neighbours only. It reports each grouping to its trainer with a reason, and
restores it after a restart. It probes workers that are not neighbours, and refuses invalid
groupings. A lost gateway is replaced at once; a gateway that has not joined yet is not.

Left out: the choice of groups (tests/property/test_clusters.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import (
    Capacity,
    CapacitySource,
    Directive,
    Grouping,
    Peers,
    StepTiming,
)
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.spec import Job, load_job
from dlion_core.resource_control.resource_controller import ResourceController
from dlion_core.topology.grouping import (
    MAX_MEASURABLE_BYTES_PER_S,
    PAIR_PROBE_S,
    PAIR_RETRY_S,
    GroupingState,
    PairBandwidths,
)
from local_run import job_document

SITES = {"a": 3, "b": 2}
BY_SITES = Grouping(0, Rank(0), ((0, 1, 2), (3, 4)), (0, 3))
FAST, SLOW = 20_000_000, 1_000_000


def job_of() -> Job:
    exchange = {"policy": "full", "topology": "clustered"}
    return load_job(job_document(SITES, exchange=exchange))


def members(job: Job, *, lost: tuple[int, ...] = (), joined_count: int = 5) -> Peers:
    found = tuple(
        Member(
            worker, 1, MemberState.LOST if worker.rank in lost else MemberState.READY, "h:1", "h:2"
        )
        for worker in job.workers()[:joined_count]
    )
    return Peers(Membership(1, job.key, 5, found), 100)


def controllers(count: int = 5) -> list[ResourceController]:
    job = job_of()
    made = [ResourceController(job, Rank(rank)) for rank in range(count)]
    for controller in made:
        controller.handle(members(job), 0.0)
    return made


def step(controller: ResourceController, iteration: int, now_s: float) -> None:
    controller.handle(StepTiming(iteration, 10, 0.1, 0.1, 0.1), now_s)


def probe_all(
    made: list[ResourceController], groups: list[set[int]], now_s: float, times: int = 3
) -> None:
    """Probe each link so many times; then let all workers report to all."""
    for rank, controller in enumerate(made):
        for peer in range(len(made)):
            together = any({rank, peer} <= group for group in groups)
            for _ in range(times if peer != rank else 0):
                controller.probed(Rank(peer), FAST if together else SLOW, 1.0, now_s)
    report_all(made)


def report_all(made: list[ResourceController]) -> None:
    for sender in made:
        for receiver in made:
            if receiver is not sender:
                receiver.handle_capacity(sender.own(), 1)


def last(controller: ResourceController) -> Directive:
    assert controller.directive is not None
    return controller.directive


# ---- rates of pairs ----------------------------------------------------------------------------


def test_the_rate_of_a_link_is_one_that_all_but_one_of_the_last_probes_reached() -> None:
    rates = PairBandwidths(Rank(0))
    known = []
    for rate in (4e6, 1e6, 3e6, 5e6, 6e6, 7e6, 8e6):
        rates.probed(Rank(1), rate)
        known.append(rates.own().get(Rank(1)))
    assert known == [None, None, 3e6, 3e6, 3e6, 3e6, 5e6]


def test_rates_that_a_probe_cannot_distinguish_are_equal_and_the_slower_direction_counts() -> None:
    rates = PairBandwidths(Rank(0))
    for _ in range(3):
        rates.probed(Rank(1), 1e9)
        rates.probed(Rank(2), 3e6)
    rates.add_peer_rates(Rank(2), {Rank(0): 2e6, Rank(1): 5e6})
    assert rates.for_ranks([0, 1, 2]) == {
        (0, 1): MAX_MEASURABLE_BYTES_PER_S,
        (0, 2): 2e6,
        (1, 2): 5e6,
    }
    assert rates.for_ranks([0, 1]) == {(0, 1): MAX_MEASURABLE_BYTES_PER_S}


def test_unknown_links_are_probed_soon_and_known_ones_in_turn() -> None:
    rates, probed, now_s = PairBandwidths(Rank(0)), [], 0.0
    while now_s < 2 * PAIR_RETRY_S + 1:
        while (peer := rates.next_to_probe([Rank(1), Rank(2)], now_s)) is not None:
            probed.append((now_s, peer))
            if peer == 1:  # the other worker does not answer
                rates.probed(peer, 1e6)
        now_s += 1.0
    assert probed == [(0.0, 1), (0.0, 2), (2.0, 1), (2.0, 2), (4.0, 1), (4.0, 2)]
    for _ in range(3):
        rates.probed(Rank(2), 1e6)
    later = [
        (at, peer)
        for at in range(5, 30)
        if (peer := rates.next_to_probe([Rank(1), Rank(2)], float(at))) is not None
    ]
    assert later == [(9, 1), (14, 2), (19, 1), (24, 2), (29, 1)]
    assert PAIR_PROBE_S == 5.0


def test_a_link_without_a_result_does_not_delay_the_probes_of_others() -> None:
    rates, probed = PairBandwidths(Rank(0)), []
    for now_s in range(300):
        while (peer := rates.next_to_probe([Rank(1), Rank(2), Rank(3)], float(now_s))) is not None:
            probed.append(peer)
            if peer != 3:
                rates.probed(peer, 1e6)
    assert min(probed.count(Rank(1)), probed.count(Rank(2))) >= 300 / PAIR_PROBE_S / 2
    assert probed.count(Rank(3)) >= 300 / PAIR_RETRY_S - 1


# ---- the controller ----------------------------------------------------------------------------


def test_before_links_are_known_groups_are_the_sites() -> None:
    made = controllers()
    assert [controller.grouping for controller in made] == [BY_SITES] * 5
    assert {m.identity.rank for m in made[0].neighbours()} == {1, 2, 3}
    assert {m.identity.rank for m in made[1].neighbours()} == {0, 2}
    assert [last(controller).grouping for controller in made] == [BY_SITES] * 5


def test_a_grouping_of_the_decider_reaches_each_trainer_with_its_reason() -> None:
    made = controllers()
    probe_all(made, [{0, 1}, {2, 3, 4}], 1.0)
    for controller in reversed(made):
        controller.regroup_if_due(1.0)
    report_all(made)
    wanted = Grouping(1, Rank(0), ((0, 1), (2, 3, 4)), (0, 3))
    for controller in made:
        assert last(controller).grouping == wanted
        assert "worker 0 made groups (1) of links: 0 1 | 3 2 4" in last(controller).reason
    # budgets are for neighbours, at the rates that the probes have found
    assert set(last(made[2]).budget_bytes) == {3, 4}
    assert set(last(made[3]).budget_bytes) == {0, 2, 4}
    assert last(made[2]).bandwidth_bytes_per_s == {0: SLOW, 1: SLOW, 3: FAST, 4: FAST}


def test_links_used_by_training_are_probed_too_and_keep_their_budget() -> None:
    made = controllers()
    controller = made[0]
    for at in range(20):
        while controller.link_to_probe(float(at)) is not None:
            pass
    probe_all(made, [{0, 1, 2}, {3, 4}], 20.0)
    probed = [controller.link_to_probe(float(at)) for at in range(20, 60)]
    assert {m.identity.rank for m in probed if m is not None} == {1, 2, 3, 4}
    budgets = dict(last(controller).budget_bytes)
    assert controller.probed(Rank(1), 10, 1.0, 21.0) is None
    assert last(controller).budget_bytes == budgets


def test_a_lost_gateway_is_replaced_at_once_and_its_return_changes_nothing() -> None:
    made = controllers()
    job = job_of()
    for controller in made:
        step(controller, 1, 1.0)
    for controller in made[1:]:
        controller.handle(members(job, lost=(0,)), 2.0)
    report_all(made[1:])
    wanted = Grouping(1, Rank(1), BY_SITES.groups, (1, 3))
    assert [controller.grouping for controller in made[1:]] == [wanted] * 4
    for controller in made:
        controller.handle(members(job), 3.0)
    report_all(made)
    assert [controller.grouping for controller in made] == [wanted] * 5


def test_a_worker_that_has_not_joined_yet_can_be_a_gateway() -> None:
    job = job_of()
    controller = ResourceController(job, Rank(0))
    controller.handle(members(job, joined_count=2), 0.0)
    controller.regroup_if_due(1.0)
    assert controller.grouping == BY_SITES


def test_a_restarted_sidecar_gets_its_grouping_from_the_trainer() -> None:
    made = controllers()
    probe_all(made, [{0, 1}, {2, 3, 4}], 1.0)
    made[0].regroup_if_due(1.0)
    restarted = ResourceController(job_of(), Rank(0))
    restarted.handle(last(made[0]), 2.0)
    restarted.handle(members(job_of()), 2.0)
    assert restarted.grouping == made[0].grouping
    assert {m.identity.rank for m in restarted.neighbours()} == {1, 3}


def test_an_invalid_grouping_is_refused() -> None:
    controller = controllers()[0]
    capacity = Capacity(Rank(1), 10.0, 2.0, CapacitySource.RATE, 1, grouping=BY_SITES)
    controller.handle_capacity(capacity, 1)
    for wrong in (
        replace(BY_SITES, version=1, groups=((0, 1), (3, 4)), gateways=(0, 3)),
        replace(BY_SITES, version=1, gateways=(3, 0)),
    ):
        with pytest.raises(ContractError):
            controller.handle_capacity(replace(capacity, grouping=wrong), 1)
    assert controller.grouping == BY_SITES


def test_of_two_groupings_with_one_version_the_larger_is_kept() -> None:
    """The order of arrival does not matter: all sidecars keep the same grouping."""
    lesser, larger = (
        Grouping(3, Rank(rank), BY_SITES.groups, BY_SITES.gateways) for rank in (1, 2)
    )
    for first, second in ((lesser, larger), (larger, lesser)):
        state = GroupingState(job_of(), Rank(0))
        assert state.take(first)
        assert state.take(second) is (second is larger)
        assert not state.take(second)
        assert state.held == larger
