"""Groups of predicted links (`exchange.grouping: learned`), by the model that DLion ships.

Planted groups are found at moderate noise, independent of worker names. Constant noise does not
change groups back and forth. A worker that moves permanently changes groups once. Fast links are
probed more often than others, and none is left out. Without a readable model file, a job with
learned groups does not start; any other job does.

Left out: the network (tests/unit/core/topology/test_link_forecast.py), jobs
(tests/simulated/test_moving_workers.py).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.spec import load_job
from dlion_core.topology import forecast_model, grouping
from dlion_core.topology.clusters import SEPARATION, find_groups
from dlion_core.topology.forecast_model import shipped_model
from dlion_core.topology.grouping import GroupingState, PairBandwidths
from dlion_core.topology.link_forecast import LinkForecast
from dlion_core.topology.regrouping import CHECK_INTERVAL_S
from example_counts import examples
from local_run import job_document

if TYPE_CHECKING:
    from collections.abc import Sequence

FAST, SLOW = 2.5e6, 1.25e5
Reports = dict[tuple[Rank, Rank], float]


def reports(home: Sequence[int], rng: random.Random, noise: float) -> Reports:
    """Rates by sender and receiver: fast inside a group, with separate noise each way."""
    return {
        (Rank(a), Rank(b)): (FAST if home[a] == home[b] else SLOW) * math.exp(rng.gauss(0, noise))
        for a in range(len(home))
        for b in range(len(home))
        if a != b
    }


def agreement(groups: Sequence[Sequence[int]], home: Sequence[int]) -> float:
    from sklearn.metrics import adjusted_rand_score  # a second of CPU in each process of the tests

    label = {rank: at for at, group in enumerate(groups) for rank in group}
    return float(adjusted_rand_score(home, [label[Rank(rank)] for rank in range(len(home))]))


# ---- groups --------------------------------------------------------------------------------------


def test_planted_groups_are_found_at_moderate_noise() -> None:
    found = []
    for seed in range(12):
        rng = random.Random(seed)
        home = [*([0, 1, 2, 3] * 3), *(rng.randrange(4) for _ in range(20))]
        predicted = LinkForecast(shipped_model()).rates(
            range(len(home)), reports(home, rng, 0.4), 0.0
        )
        found.append(agreement(find_groups(predicted, SEPARATION), home))
    assert np.mean(found) >= 0.95, found


@settings(deadline=None, max_examples=examples(40))
@given(seed=st.integers(0, 1000), order=st.permutations(range(12)))
def test_worker_names_do_not_matter(seed: int, order: list[int]) -> None:
    rng = random.Random(seed)
    home = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    plain, other = LinkForecast(shipped_model()), LinkForecast(shipped_model())
    for check in range(4):
        rates = reports(home, rng, 0.5)
        renamed = {(Rank(order[a]), Rank(order[b])): rate for (a, b), rate in rates.items()}
        one = plain.rates(range(12), rates, check * CHECK_INTERVAL_S)
        two = other.rates(range(12), renamed, check * CHECK_INTERVAL_S)
        for a, b in combinations(range(12), 2):
            pair = Rank(min(order[a], order[b])), Rank(max(order[a], order[b]))
            assert two[pair] == pytest.approx(one[Rank(a), Rank(b)], rel=1e-6)


# ---- hysteresis --------------------------------------------------------------------------------


def state_of(sites: dict[str, int], **exchange: Any) -> GroupingState:
    settings_ = {"policy": "full", "topology": "clustered", "grouping": "learned", **exchange}
    return GroupingState(load_job(job_document(sites, exchange=settings_)), Rank(0))


def check(state: GroupingState, reported: Reports, now_s: float) -> bool:
    """Give the decider all these reports, and check."""
    for (sender, receiver), rate in reported.items():
        if sender == 0:
            state.rates.probed(receiver, rate)
    for sender in {sender for sender, _ in reported} - {0}:
        own = {receiver: rate for (rank, receiver), rate in reported.items() if rank == sender}
        state.rates.add_peer_rates(sender, own)
    return state.regroup(range(1 + max(rank for rank, _ in reported)), now_s)


@pytest.mark.parametrize("seed", range(4))
def test_constant_noise_changes_no_group(seed: int) -> None:
    rng, state = random.Random(seed), state_of({"a": 5, "b": 5})
    home = [0] * 5 + [1] * 5
    for at in range(60):
        rates = reports(home, rng, 0.4)
        if rng.random() < 0.3:  # a link fades for this check
            rates[Rank(0), Rank(1)] = rates[Rank(1), Rank(0)] = SLOW
        check(state, rates, at * CHECK_INTERVAL_S)
    assert state.held.groups == ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))


def test_a_worker_that_moves_permanently_changes_groups_once() -> None:
    rng, state = random.Random(1), state_of({"a": 5, "b": 5})
    before, after = [0] * 5 + [1] * 5, [0] * 4 + [1] * 6
    groupings = [state.held.groups]
    for at in range(40):
        check(state, reports(before if at < 10 else after, rng, 0.3), at * CHECK_INTERVAL_S)
        if state.held.groups != groupings[-1]:
            groupings.append(state.held.groups)
            changed_at = at
    assert groupings == [((0, 1, 2, 3, 4), (5, 6, 7, 8, 9)), ((0, 1, 2, 3), (4, 5, 6, 7, 8, 9))]
    assert changed_at < 16


# ---- probes ------------------------------------------------------------------------------------


def test_fast_links_are_probed_more_often_and_none_is_left_out() -> None:
    own, asked = PairBandwidths(Rank(0), is_learned=True), Counter[Rank]()
    peers = [Rank(peer) for peer in range(1, 13)]
    for second in range(600):
        while (peer := own.next_to_probe(peers, float(second))) is not None:
            asked[peer] += 1
            own.probed(peer, FAST if peer <= 3 else SLOW)
    assert sum(asked.values()) <= 601 + len(peers)
    fast, slow = [asked[p] for p in peers if p <= 3], [asked[p] for p in peers if p > 3]
    assert min(fast) > 3 * max(slow)
    assert min(slow) > 20


def test_the_last_probe_counts() -> None:
    own = PairBandwidths(Rank(0), is_learned=True)
    for rate in (5e6, 4e6, 1e5):
        own.probed(Rank(1), rate)
    assert own.own() == {1: 1e5}


# ---- the model's file --------------------------------------------------------------------------


def test_without_a_model_jobs_with_learned_groups_do_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecast_model, "FILE", "absent.json")
    monkeypatch.setattr(grouping, "shipped_model", shipped_model.__wrapped__)
    with pytest.raises(ContractError, match=r"absent\.json.*grouping: links"):
        state_of({"a": 2, "b": 2})
    assert state_of({"a": 2, "b": 2}, grouping="links").held.version == 0
