"""Groups of workers by their links, their changes, and agreement on them.

Planted groups are found, for any number and sizes, in rates with noise; equal links are never
separated. Level and misfit are those of a naive reference. The graph of a grouping joins complete
groups by gateways. It stays connected after any departure, because another gateway takes over.

Small changes, short changes and unknown rates do not regroup; a lasting change does once. With
workers that move between groups, groups last longer than those of a k-means split. More traffic
also stays inside the real groups than with that split and with a split made once.

Sidecars get reports in any order, late, twice or not for a while, with several deciders meanwhile.
They end with the same grouping.

Left out: links (tests/local/test_clustered.py), probes (tests/unit/core/topology/test_grouping.py).
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Grouping
from dlion_api.spec import load_job
from dlion_core.topology import clusters
from dlion_core.topology.clusters import SEPARATION, find_groups, graph_of_groups, misfit
from dlion_core.topology.grouping import GroupingState
from dlion_core.topology.regrouping import CHECK_INTERVAL_S, MIN_GAIN, PATIENCE, Regrouping
from example_counts import examples
from local_run import job_document

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

Rates = dict[tuple[Rank, Rank], float]

FAST, SLOW = 10e6, 1e6
"""Bytes per second: a factor of ten, and noise of up to a factor of 1.4 either way."""


def rates_of(planted: Sequence[Collection[int]], rng: random.Random, noise: float = 0.3) -> Rates:
    """Rates that are fast inside planted groups and slow between them."""
    group_of = {rank: at for at, group in enumerate(planted) for rank in group}
    return {
        (Rank(one), Rank(other)): (FAST if group_of[one] == group_of[other] else SLOW)
        * math.exp(rng.uniform(-noise, noise))
        for one, other in combinations(sorted(group_of), 2)
    }


def as_groups(planted: Sequence[Collection[int]]) -> Any:
    return tuple(sorted(tuple(sorted(group)) for group in planted))


@st.composite
def plantings(draw: st.DrawFn, least: int = 2) -> list[list[int]]:
    """Two to four groups of one to six workers, with any ranks; not all of them of one."""
    sizes = draw(
        st.lists(st.integers(1, 6), min_size=least, max_size=4).filter(lambda s: max(s) > 1)
    )
    ranks = draw(st.permutations(range(sum(sizes))))
    return [list(ranks[sum(sizes[:at]) : sum(sizes[: at + 1])]) for at in range(len(sizes))]


# ---- groups --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(80))
@given(planted=plantings(), seed=st.integers(0, 10_000))
def test_planted_groups_are_found(planted: list[list[int]], seed: int) -> None:
    rates = rates_of(planted, random.Random(seed))
    found = find_groups(rates, SEPARATION)
    assert found == as_groups(planted)
    assert misfit(found, rates, SEPARATION) == 0.0


@settings(deadline=None, max_examples=examples(80))
@given(
    count=st.integers(2, 14),
    rate=st.floats(1e3, 1e9),
    noise=st.floats(0.0, 0.5),
    seed=st.integers(0, 10_000),
)
def test_random_differences_of_links_separate_no_workers(
    count: int, rate: float, noise: float, seed: int
) -> None:
    rng = random.Random(seed)
    rates = {
        (Rank(one), Rank(other)): rate * math.exp(rng.uniform(-noise, noise))
        for one, other in combinations(range(count), 2)
    }
    assert find_groups(rates, SEPARATION) == (tuple(range(count)),)


def test_a_link_or_two_on_the_wrong_side_change_no_group() -> None:
    planted = [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    rates = rates_of(planted, random.Random(1))
    rates[Rank(0), Rank(1)] = SLOW
    rates[Rank(4), Rank(5)] = FAST
    assert find_groups(rates, SEPARATION) == as_groups(planted)
    wrong = misfit(as_groups(planted), rates, SEPARATION)
    assert 0.0 < wrong < 0.15


def naive_level(rates: Sequence[float], separation: float) -> float:
    """The level of the best cut of the sorted logarithms, by the definition of the variance
    between."""
    logs = sorted(math.log(rate) for rate in rates)
    best, level, gap = -1.0, 0.0, 0.0
    for cut in range(1, len(logs)):
        low, high = logs[:cut], logs[cut:]
        means = sum(low) / len(low), sum(high) / len(high)
        mean = sum(logs) / len(logs)
        between = sum(
            len(part) / len(logs) * (m - mean) ** 2
            for part, m in zip((low, high), means, strict=True)
        )
        if between > best + 1e-12:
            best, level, gap = between, math.exp(sum(means) / 2), means[1] - means[0]
    return level if gap >= math.log(separation) else 0.0


@settings(deadline=None)
@given(rates=st.lists(st.floats(1e3, 1e9), max_size=25))
def test_the_level_is_the_one_that_separates_rates_best(rates: list[float]) -> None:
    found, wanted = clusters.fast_level(rates, SEPARATION), naive_level(rates, SEPARATION)
    if found != pytest.approx(wanted, rel=1e-6):  # two cuts may be as good as each other
        assert found * wanted > 0
        assert _between(rates, found) == pytest.approx(_between(rates, wanted), rel=1e-6)


def _between(rates: Sequence[float], level: float) -> float:
    logs = np.log(rates)
    low, high = logs[logs <= math.log(level)], logs[logs > math.log(level)]
    return float(len(low) * len(high) * (high.mean() - low.mean()) ** 2)


@settings(deadline=None, max_examples=examples(60))
@given(planted=plantings(), others=plantings(), seed=st.integers(0, 1000))
def test_misfit_is_the_wrong_share_of_all_links(
    planted: list[list[int]], others: list[list[int]], seed: int
) -> None:
    rates = rates_of(planted, random.Random(seed), noise=0.8)
    ranks = sorted(rank for group in planted for rank in group)
    guess = [[rank for rank in group if rank in ranks] for group in others]
    guess.append([rank for rank in ranks if not any(rank in group for group in guess)])
    level = naive_level(list(rates.values()), SEPARATION)
    wrong = total = 0.0
    for (one, other), rate in rates.items():
        together = any(one in group and other in group for group in guess)
        total += abs(math.log(rate) - math.log(level)) if level else 1
        if together != (rate > level):
            wrong += abs(math.log(rate) - math.log(level)) if level else 1
    measured = misfit([tuple(map(Rank, group)) for group in guess], rates, SEPARATION)
    assert measured == pytest.approx(wrong / total, abs=1e-6)


# ---- the graph ---------------------------------------------------------------------------------


def grouping_of(planted: Sequence[Collection[int]], seed: int = 0, version: int = 1) -> Grouping:
    rng = random.Random(seed)
    groups = as_groups(planted)
    gateways = tuple(rng.choice(group) for group in groups)
    return Grouping(version, Rank(0), groups, gateways)


@settings(deadline=None, max_examples=examples(60))
@given(planted=plantings(least=1), seed=st.integers(0, 1000))
def test_groups_are_complete_and_joined_by_gateways(planted: list[list[int]], seed: int) -> None:
    grouping = grouping_of(planted, seed)
    wanted = {
        (one, other)
        for one in range(sum(map(len, planted)))
        for other in range(sum(map(len, planted)))
        if one != other
        and (
            any(one in group and other in group for group in planted)
            or {one, other} <= set(grouping.gateways)
        )
    }
    graph = graph_of_groups(grouping)
    assert {(one, other) for one, others in graph.items() for other in others} == wanted
    assert clusters.grouping_problem(grouping, list(graph)) == ""


@settings(deadline=None, max_examples=examples(60))
@given(planted=plantings(), gone=st.integers(0, 2**24 - 1), seed=st.integers(0, 1000))
def test_the_rest_stays_connected_after_any_departure(
    planted: list[list[int]], gone: int, seed: int
) -> None:
    rates = rates_of(planted, random.Random(seed))
    held = grouping_of(planted, seed)
    present = [rank for rank in graph_of_groups(held) if not gone >> rank & 1]
    if not present:
        return
    found = Regrouping(present[0]).check(present, rates, held, 0.0) or held
    graph = nx.Graph()
    graph.add_nodes_from(present)
    graph.add_edges_from(
        (one, other)
        for one, others in graph_of_groups(found).items()
        for other in others
        if one in present and other in present
    )
    assert nx.is_connected(graph)
    if all(gateway in present for gateway in held.gateways):
        assert found.groups == held.groups  # a departure alone does not regroup


def test_the_best_linked_worker_stays_gateway_until_another_is_much_better() -> None:
    rates = rates_of([[0, 1, 2], [3, 4]], random.Random(1), noise=0.0)
    for peer in (3, 4):
        rates[Rank(1), Rank(peer)] *= 1.4
    groups = as_groups([[0, 1, 2], [3, 4]])
    ranks = list(range(5))
    assert clusters.choose_gateways(groups, rates, ranks, ()) == (1, 3)
    assert clusters.choose_gateways(groups, rates, ranks, (2, 4)) == (2, 4)
    for peer in (3, 4):
        rates[Rank(1), Rank(peer)] *= 1.2
    assert clusters.choose_gateways(groups, rates, ranks, (2, 4)) == (1, 4)
    assert clusters.choose_gateways(groups, rates, [0, 2, 3], (1, 4)) == (0, 3)


@pytest.mark.parametrize(
    ("groups", "gateways", "decider"),
    [
        (((0, 1),), (0,), 0),
        (((0, 1), (1, 2)), (0, 2), 0),
        (((1, 0), (2,)), (0, 2), 0),
        (((2,), (0, 1)), (2, 0), 0),
        (((0, 1), (2,)), (2, 0), 0),
        (((0, 1), (2,)), (0,), 0),
        (((0, 1), (2,)), (0, 2), 7),
        ((), (), 0),
        (((0, 1, 2),), (0,), -1),
    ],
)
def test_an_invalid_grouping_of_the_jobs_workers_is_recognized(
    groups: Any, gateways: Any, decider: int
) -> None:
    assert clusters.grouping_problem(Grouping(3, Rank(decider), groups, gateways), range(3))


def test_a_version_that_no_run_reaches_is_invalid() -> None:
    right = Grouping(clusters.MAX_VERSION, Rank(0), ((0, 1, 2),), (0,))
    assert clusters.grouping_problem(right, range(3)) == ""
    for version in (-1, clusters.MAX_VERSION + 1):
        assert clusters.grouping_problem(replace(right, version=version), range(3))


# ---- hysteresis --------------------------------------------------------------------------------


def run_checks(
    regrouping: Regrouping, held: Grouping, rates: Rates, count: int, now_s: float
) -> tuple[Grouping, list[int], float]:
    """Make that number of checks; return the final grouping, the checks that changed it, and the
    time."""
    changes = []
    present = sorted({rank for pair in rates for rank in pair})
    for at in range(count):
        now_s += CHECK_INTERVAL_S
        if found := regrouping.check(present, rates, held, now_s):
            assert found.version == held.version + 1
            held = found
            changes.append(at)
    return held, changes, now_s


@settings(deadline=None, max_examples=examples(30))
@given(planted=plantings(), seed=st.integers(0, 1000))
def test_small_changes_of_rates_do_not_regroup(planted: list[list[int]], seed: int) -> None:
    rng, regrouping, held = random.Random(seed), Regrouping(Rank(0)), grouping_of(planted, seed)
    held, _, now_s = run_checks(regrouping, held, rates_of(planted, rng, noise=0.05), 5, 0.0)
    for _ in range(25):
        rates = rates_of(planted, rng, noise=0.2)
        held, changes, now_s = run_checks(regrouping, held, rates, 1, now_s)
        assert not changes


def test_a_short_change_does_not_regroup_and_a_lasting_one_does_once() -> None:
    before, after = [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3, 4, 5]]
    rng, regrouping, held = random.Random(1), Regrouping(Rank(0)), grouping_of(before)
    held, _, now_s = run_checks(regrouping, held, rates_of(before, rng, 0.1), 4, 0.0)
    for _ in range(6):
        held, changes, now_s = run_checks(
            regrouping, held, rates_of(after, rng, 0.1), PATIENCE - 1, now_s
        )
        assert not changes
        held, changes, now_s = run_checks(regrouping, held, rates_of(before, rng, 0.1), 1, now_s)
        assert not changes
    held, changes, now_s = run_checks(regrouping, held, rates_of(after, rng, 0.1), 10, now_s)
    assert changes == [PATIENCE - 1]
    assert held.groups == as_groups(after)


def test_rates_that_hardly_differ_do_not_change_groups() -> None:
    """Between `KEPT_SEPARATION` and `SEPARATION` the grouping stays."""
    rates = {
        (Rank(one), Rank(other)): 2.5e6 if (one < 3) == (other < 3) else 1e6
        for one, other in combinations(range(6), 2)
    }
    for planted in ([[0, 1, 2], [3, 4, 5]], [list(range(6))]):
        held, changes, _ = run_checks(Regrouping(Rank(0)), grouping_of(planted), rates, 10, 0.0)
        assert not changes
        assert held.groups == as_groups(planted)


def test_the_first_check_needs_no_patience_and_waits_for_all_rates() -> None:
    rates = rates_of([[0, 1, 2], [3, 4]], random.Random(1))
    sites = clusters.groups_by_site({Rank(rank): "one" for rank in range(5)})
    regrouping, missing = Regrouping(Rank(0)), dict(rates)
    del missing[Rank(1), Rank(3)]
    assert regrouping.check(range(5), missing, sites, 0.0) is None
    found = regrouping.check(range(5), rates, sites, 1.0)
    assert found is not None
    assert (found.version, found.groups) == (1, ((0, 1, 2), (3, 4)))
    # later changes of it do need patience
    other = rates_of([[0, 1], [2, 3, 4]], random.Random(1))
    _, changes, _ = run_checks(regrouping, found, other, 5, 1.0)
    assert changes == [PATIENCE - 1]


def test_an_absent_worker_stays_with_its_group() -> None:
    held = grouping_of([[0, 1, 2, 3], [4, 5]])
    rates = rates_of([[0, 1, 4, 5], [2]], random.Random(1))
    regrouping = Regrouping(Rank(0))
    for at in range(4):
        held = regrouping.check([0, 1, 2, 4, 5], rates, held, at * CHECK_INTERVAL_S) or held
    assert held.groups == ((0, 1, 3, 4, 5), (2,))


# ---- comparison with other groupings -------------------------------------------------------------


def k_means(rates: Rates, count: int, k: int, rng: np.random.Generator) -> Any:
    """Lloyd's algorithm from one random start, with the right number of groups, over each worker's
    row of the logarithms of rates. The entry for itself is the largest."""
    rows = np.full((count, count), math.log(max(rates.values())))
    for (one, other), rate in rates.items():
        rows[one, other] = rows[other, one] = math.log(rate)
    centres = rows[rng.choice(count, k, replace=False)]
    for _ in range(50):
        nearest = np.argmin(((rows[:, None] - centres[None]) ** 2).sum(axis=2), axis=1)
        centres = np.array(
            [rows[nearest == at].mean(axis=0) if (nearest == at).any() else centres[at]
             for at in range(k)]
        )  # fmt: skip
    groups = [np.flatnonzero(nearest == at).tolist() for at in range(k)]
    return as_groups([group for group in groups if group])


def inside_share(groups: Any, planted: Sequence[Collection[int]]) -> float:
    """The share of a step's messages, one each way on each link, inside the real groups.

    The share inside the *computed* groups would be all of them with one group of all.
    """
    gateways = tuple(group[0] for group in groups)
    graph = graph_of_groups(Grouping(1, Rank(0), groups, gateways))
    group_of = {rank: at for at, group in enumerate(planted) for rank in group}
    links = [(one, other) for one, others in graph.items() for other in others]
    return sum(group_of[one] == group_of[other] for one, other in links) / len(links)


def test_groups_last_longer_and_hold_more_traffic_than_k_means_and_one_split() -> None:
    """Twelve workers of three groups; one moves every 40 checks, and links fade now and then."""
    rng, numpy_rng = random.Random(3), np.random.default_rng(3)
    planted = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    once = as_groups(planted)
    ours, regrouping, now_s = grouping_of(planted), Regrouping(Rank(0)), 0.0
    theirs, changes = once, {"ours": 0, "k-means": 0}
    shares: dict[str, list[float]] = {"ours": [], "k-means": [], "once": []}
    looks = 400
    for look in range(looks):
        if look % 40 == 39:
            source = rng.choice([group for group in planted if len(group) > 2])
            target = rng.choice([group for group in planted if group is not source])
            target.append(source.pop(rng.randrange(len(source))))
        rates = rates_of(planted, rng, noise=0.4)
        for pair in rates:
            if rng.random() < 0.05:
                rates[pair] /= 20
        ours, changed, now_s = run_checks(regrouping, ours, rates, 1, now_s)
        changes["ours"] += len(changed)
        found = k_means(rates, 12, 3, numpy_rng)
        changes["k-means"] += found != theirs
        theirs = found
        for name, groups in (("ours", ours.groups), ("k-means", theirs), ("once", once)):
            shares[name].append(inside_share(groups, planted))
    lifetime = {name: looks / (1 + count) for name, count in changes.items()}
    share = {name: float(np.mean(values)) for name, values in shares.items()}
    summary = f"looks between regroupings {lifetime}, share inside {share}"
    assert lifetime["ours"] > 5 * lifetime["k-means"], summary
    assert share["ours"] > share["k-means"], summary
    assert share["ours"] > share["once"] + 0.05, summary


# ---- agreement ---------------------------------------------------------------------------------


def sidecars(count: int) -> list[GroupingState]:
    exchange = {"policy": "full", "topology": "clustered"}
    sites = {"a": count // 2, "b": count - count // 2}
    job = load_job(job_document(sites, exchange=exchange))
    return [GroupingState(job, Rank(rank)) for rank in range(count)]


def share_rates(
    all_sidecars: list[GroupingState], rates: Mapping[tuple[Rank, Rank], float]
) -> None:
    """Every sidecar knows its own links and has the others' reports."""
    for own in all_sidecars:
        rank = own._rank
        for (one, other), rate in rates.items():
            if rank in (one, other):
                for _ in range(5):
                    own.rates.probed(other if rank == one else one, rate)
    for sender in all_sidecars:
        for receiver in all_sidecars:
            if receiver is not sender:
                receiver.rates.add_peer_rates(sender._rank, sender.rates.own())


@settings(deadline=None, max_examples=examples(60))
@given(
    count=st.integers(3, 8),
    script=st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 2**8 - 1)), max_size=60
    ),
    seed=st.integers(0, 1000),
)
def test_all_end_with_the_same_grouping(
    count: int, script: list[tuple[int, int, int]], seed: int
) -> None:
    """In a step of the script, a sidecar checks with any belief about the members, and reports to
    one other. Some links change meanwhile. At the end all get all reports, in any order."""
    rng = random.Random(seed)
    workers = sidecars(count)
    first = [list(range(1, count, 2)), list(range(0, count, 2))]
    share_rates(workers, rates_of(first, rng))
    now_s = 0.0
    for sender, receiver, mask in script:
        now_s += CHECK_INTERVAL_S
        own = workers[sender % count]
        present = [rank for rank in range(count) if mask >> rank & 1 or rank == sender % count]
        own.regroup(present, now_s)
        assert clusters.grouping_problem(own.held, range(count)) == ""
        if rng.random() < 0.2:
            share_rates(workers, rates_of([range(count // 2), range(count // 2, count)], rng))
        before = workers[receiver % count].held
        workers[receiver % count].take(own.held)
        assert workers[receiver % count].held == max(before, own.held)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b] * 2
    rng.shuffle(pairs)
    for sender, receiver in pairs:
        workers[receiver].take(workers[sender].held)
    for receiver in range(count):  # the largest version reaches those without it
        for sender in range(count):
            workers[receiver].take(workers[sender].held)
    assert len({own.held for own in workers}) == 1
    # and the decider, with all members, applies the rates of links
    for _ in range(2 * PATIENCE):
        now_s += CHECK_INTERVAL_S
        workers[0].regroup(range(count), now_s)
        for own in workers:
            own.take(workers[0].held)
            assert own.neighbours == graph_of_groups(workers[0].held)[own._rank]
    rates = workers[0].rates.for_ranks(range(count))
    assert misfit(workers[0].held.groups, rates, SEPARATION) < MIN_GAIN * 2 / count
