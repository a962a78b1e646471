"""What a sidecar knows of all links, and what a director makes of its grouping.

Proves: a link is known after three probes, counts as what all but one of five saw, and no faster
than a probe can tell; unknown links are probed soon, known ones in turn, one every five seconds,
whoever uses them; a director budgets neighbours alone, tells its trainer of every grouping and why,
takes its grouping up again after a restart, probes who is no neighbour, believes no nonsense; a
gateway that is lost is replaced at once, one that has not come yet is not.
Left out: which groups (tests/property/test_clusters.py).
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


def members(job: Job, *, lost: tuple[int, ...] = (), come: int = 5) -> Peers:
    found = tuple(
        Member(
            worker, 1, MemberState.LOST if worker.rank in lost else MemberState.READY, "h:1", "h:2"
        )
        for worker in job.workers()[:come]
    )
    return Peers(Membership(1, job.key, 5, found), 100)


def directors(count: int = 5) -> list[ResourceController]:
    job = job_of()
    made = [ResourceController(job, Rank(rank)) for rank in range(count)]
    for director in made:
        director.handle(members(job), 0.0)
    return made


def step(director: ResourceController, iteration: int, now_s: float) -> None:
    director.handle(StepTiming(iteration, 10, 0.1, 0.1, 0.1), now_s)


def probe_all(
    made: list[ResourceController], groups: list[set[int]], now_s: float, times: int = 3
) -> None:
    """Every link, so many times; then all tell all."""
    for rank, director in enumerate(made):
        for peer in range(len(made)):
            together = any({rank, peer} <= group for group in groups)
            for _ in range(times if peer != rank else 0):
                director.probed(Rank(peer), FAST if together else SLOW, 1.0, now_s)
    tell_all(made)


def tell_all(made: list[ResourceController]) -> None:
    for teller in made:
        for hearer in made:
            if hearer is not teller:
                hearer.handle_capacity(teller.own(), 1)


def last(director: ResourceController) -> Directive:
    assert director.directive is not None
    return director.directive


# ---- rates of pairs ----------------------------------------------------------------------------


def test_a_link_counts_as_what_all_but_one_of_the_last_probes_saw() -> None:
    rates = PairBandwidths(Rank(0))
    known = []
    for rate in (4e6, 1e6, 3e6, 5e6, 6e6, 7e6, 8e6):
        rates.probed(Rank(1), rate)
        known.append(rates.own().get(Rank(1)))
    assert known == [None, None, 3e6, 3e6, 3e6, 3e6, 5e6]


def test_what_a_probe_cannot_tell_apart_is_the_same_and_the_slower_direction_counts() -> None:
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
    rates, asked, now_s = PairBandwidths(Rank(0)), [], 0.0
    while now_s < 2 * PAIR_RETRY_S + 1:
        while (peer := rates.next_to_probe([Rank(1), Rank(2)], now_s)) is not None:
            asked.append((now_s, peer))
            if peer == 1:  # the other one does not answer
                rates.probed(peer, 1e6)
        now_s += 1.0
    assert asked == [(0.0, 1), (0.0, 2), (2.0, 1), (2.0, 2), (4.0, 1), (4.0, 2)]
    for _ in range(3):
        rates.probed(Rank(2), 1e6)
    later = [
        (at, peer)
        for at in range(5, 30)
        if (peer := rates.next_to_probe([Rank(1), Rank(2)], float(at))) is not None
    ]
    assert later == [(9, 1), (14, 2), (19, 1), (24, 2), (29, 1)]
    assert PAIR_PROBE_S == 5.0


def test_a_link_of_which_nothing_is_found_out_keeps_no_other_from_its_turn() -> None:
    rates, asked = PairBandwidths(Rank(0)), []
    for now_s in range(300):
        while (peer := rates.next_to_probe([Rank(1), Rank(2), Rank(3)], float(now_s))) is not None:
            asked.append(peer)
            if peer != 3:
                rates.probed(peer, 1e6)
    assert min(asked.count(Rank(1)), asked.count(Rank(2))) >= 300 / PAIR_PROBE_S / 2
    assert asked.count(Rank(3)) >= 300 / PAIR_RETRY_S - 1


# ---- the director ------------------------------------------------------------------------------


def test_before_links_are_known_groups_are_the_sites() -> None:
    made = directors()
    assert [director.grouping for director in made] == [BY_SITES] * 5
    assert {m.identity.rank for m in made[0].neighbours()} == {1, 2, 3}
    assert {m.identity.rank for m in made[1].neighbours()} == {0, 2}
    assert [last(director).grouping for director in made] == [BY_SITES] * 5


def test_a_grouping_of_the_decider_reaches_every_trainer_with_its_reason() -> None:
    made = directors()
    probe_all(made, [{0, 1}, {2, 3, 4}], 1.0)
    for director in reversed(made):
        director.regroup_if_due(1.0)
    tell_all(made)
    wanted = Grouping(1, Rank(0), ((0, 1), (2, 3, 4)), (0, 3))
    for director in made:
        assert last(director).grouping == wanted
        assert "worker 0 made groups (1) of links: 0 1 | 3 2 4" in last(director).reason
    # budgets are for neighbours, at the rates that the probes have found
    assert set(last(made[2]).budget_bytes) == {3, 4}
    assert set(last(made[3]).budget_bytes) == {0, 2, 4}
    assert last(made[2]).bandwidth_bytes_per_s == {0: SLOW, 1: SLOW, 3: FAST, 4: FAST}


def test_links_that_training_uses_are_probed_too_and_their_budget_stands() -> None:
    made = directors()
    director = made[0]
    for at in range(20):
        while director.link_to_probe(float(at)) is not None:
            pass
    probe_all(made, [{0, 1, 2}, {3, 4}], 20.0)
    probed = [director.link_to_probe(float(at)) for at in range(20, 60)]
    assert {m.identity.rank for m in probed if m is not None} == {1, 2, 3, 4}
    budgets = dict(last(director).budget_bytes)
    assert director.probed(Rank(1), 10, 1.0, 21.0) is None
    assert last(director).budget_bytes == budgets


def test_a_lost_gateway_is_replaced_at_once_and_its_return_changes_nothing() -> None:
    made = directors()
    job = job_of()
    for director in made:
        step(director, 1, 1.0)
    for director in made[1:]:
        director.handle(members(job, lost=(0,)), 2.0)
    tell_all(made[1:])
    wanted = Grouping(1, Rank(1), BY_SITES.groups, (1, 3))
    assert [director.grouping for director in made[1:]] == [wanted] * 4
    for director in made:
        director.handle(members(job), 3.0)
    tell_all(made)
    assert [director.grouping for director in made] == [wanted] * 5


def test_who_has_not_come_yet_is_a_gateway_all_the_same() -> None:
    job = job_of()
    director = ResourceController(job, Rank(0))
    director.handle(members(job, come=2), 0.0)
    director.regroup_if_due(1.0)
    assert director.grouping == BY_SITES


def test_a_sidecar_that_restarts_takes_its_grouping_up_from_the_trainer() -> None:
    made = directors()
    probe_all(made, [{0, 1}, {2, 3, 4}], 1.0)
    made[0].regroup_if_due(1.0)
    anew = ResourceController(job_of(), Rank(0))
    anew.handle(last(made[0]), 2.0)
    anew.handle(members(job_of()), 2.0)
    assert anew.grouping == made[0].grouping
    assert {m.identity.rank for m in anew.neighbours()} == {1, 3}


def test_nonsense_about_groups_is_refused() -> None:
    director = directors()[0]
    said = Capacity(Rank(1), 10.0, 2.0, CapacitySource.RATE, 1, grouping=BY_SITES)
    director.handle_capacity(said, 1)
    for wrong in (
        replace(BY_SITES, version=1, groups=((0, 1), (3, 4)), gateways=(0, 3)),
        replace(BY_SITES, version=1, gateways=(3, 0)),
    ):
        with pytest.raises(ContractError):
            director.handle_capacity(replace(said, grouping=wrong), 1)
    assert director.grouping == BY_SITES


def test_of_two_groupings_of_one_version_the_larger_one_is_held() -> None:
    """Whichever arrives first: all sidecars come to the same one."""
    lesser, larger = (
        Grouping(3, Rank(rank), BY_SITES.groups, BY_SITES.gateways) for rank in (1, 2)
    )
    for first, second in ((lesser, larger), (larger, lesser)):
        state = GroupingState(job_of(), Rank(0))
        assert state.take(first)
        assert state.take(second) is (second is larger)
        assert not state.take(second)
        assert state.held == larger
