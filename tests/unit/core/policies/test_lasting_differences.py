"""Tests of lasting differences from workers of like data in one direction.

Excesses equal those of a naive computation, also for absent workers and workers that left. A small
constant value in each message is named. So is *little is enough* with both signs, also if two of
eight agree on them. Honest workers with different samples are not named. A worker that copies
another, or decides where others lie, cannot get an honest one named. Teams have three to eight
workers. Teams and entries are random. A small number of differences does not count.

Left out: whole jobs (tests/simulated/test_insiders.py); the sums over rounds (test_deviations.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_core.codecs import GradientPart
from dlion_core.policies.claims.cumulative_sums import CumulativeSums
from dlion_core.policies.claims.deviations import LASTING_EXCESS, LIMIT
from dlion_core.policies.claims.lasting_differences import (
    EARLIER_ROUNDS,
    MAX_ENTRIES,
    MAX_TEAM,
    MEMORY,
    MIN_TEAM,
    OWN_SAMPLES,
    LastingDifferences,
)
from dlion_core.policies.claims.sent_entries import SentEntries
from dlion_core.policies.claims.sign_balance import MIN_SIGNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Values = NDArray[np.float32]
    Attack = Callable[[int, dict[int, Values]], Values]

SIZE, ROUNDS, BAD = 3000, 60, Rank(1)


def whole(value_D: Values) -> SentEntries:
    return SentEntries.of(GradientPart(value_D))


def group(count: int) -> list[frozenset[Rank]]:
    return [frozenset(map(Rank, range(count)))]


class NaiveDifferences:
    """The same for one team and all entries, pair by pair and worker by worker."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.earlier: dict[tuple[int, int], list[Values]] = {}

    def excesses(self, value_of: dict[int, Values]) -> dict[int, float]:
        cosine_of = {}
        for one in value_of:
            for other in value_of:
                if one < other:
                    cosine = self.cosine(one, other, np.sign(value_of[one] - value_of[other]))
                    cosine_of[one, other] = cosine_of[other, one] = cosine
        middles = {}
        for one in value_of:
            cosines = sorted(cosine_of[one, other] for other in value_of if other != one)
            middles[one] = cosines[(len(cosines) - 1) // 2]
        most = {a: max(OWN_SAMPLES, *(m for b, m in middles.items() if b != a)) for a in middles}
        return {one: middles[one] - most[one] for one in middles}

    def cosine(self, one: int, other: int, sign: Values) -> float:
        earlier = self.earlier.setdefault((one, other), [])
        mean = np.zeros(sign.size)
        for at, before in enumerate(reversed(earlier)):
            mean += MEMORY**at * before
        earlier.append(sign)
        mean = mean[sign != 0]
        if len(earlier) <= EARLIER_ROUNDS or mean.size < MIN_SIGNS or not mean.any():
            return 0.0
        some = sign[sign != 0]
        return float(some @ mean / np.linalg.norm(some) / np.linalg.norm(mean))


@pytest.mark.parametrize("density", [1.0, 0.2])
def test_excesses_are_those_of_a_naive_computation(density: float) -> None:
    rng = np.random.default_rng(2)
    found, naive = LastingDifferences(group(4), SIZE, rng), NaiveDifferences(4)
    steady_PD = rng.standard_normal((4, SIZE))
    for at in range(12):
        present = [rank for rank in range(4) if rank != at % 5]
        values = {
            rank: (
                (steady_PD[rank] + rng.standard_normal(SIZE)) * (rng.random(SIZE) < density)
            ).astype(np.float32)
            for rank in present
        }
        if at == 6:
            found.forget(BAD)
            naive.earlier = {pair: one for pair, one in naive.earlier.items() if BAD not in pair}
        taken = {Rank(rank): found.taken(whole(one)) for rank, one in values.items()}
        assert found.excesses(taken) == pytest.approx(naive.excesses(values), abs=1e-5)


def drip(at: int, value_of: dict[int, Values]) -> Values:
    """The right values, plus a constant direction with a fifth of their norm."""
    steady_D = np.random.default_rng(1).standard_normal(SIZE)
    return value_of[BAD] + (0.1 * steady_D).astype(np.float32)


def little_both_signs(at: int, value_of: dict[int, Values]) -> Values:
    """The mean of the others, plus or minus 1.5 standard deviations; the signs stay the same."""
    others_PD = np.stack([one for rank, one in value_of.items() if rank != BAD])
    sign_D = np.sign(np.random.default_rng(1).standard_normal(SIZE))
    found_D: Values = (others_PD.mean(0) + 1.5 * sign_D * others_PD.std(0)).astype(np.float32)
    return found_D


def copy(at: int, value_of: dict[int, Values]) -> Values:
    """The values of another worker, so that the third is alone."""
    noise_D = 1e-3 * np.random.default_rng(at).standard_normal(SIZE)
    return value_of[0] + noise_D.astype(np.float32)


def divide(at: int, value_of: dict[int, Values]) -> Values:
    """Values far above or below all, except where two honest workers differ in a
    fixed direction.
    """
    far_D = 4 * np.random.default_rng(at).choice([-1.0, 1.0], SIZE)
    wanted_D = np.sign(np.random.default_rng(1).standard_normal(SIZE))
    is_wanted_D = np.sign(value_of[2] - value_of[0]) == wanted_D
    return np.where(is_wanted_D, value_of[0], far_D).astype(np.float32)


def named(workers: int, attack: Attack | None, *, bad: tuple[int, ...] = (BAD,), seed: int = 0,
          own: float = 0.3) -> set[int]:  # fmt: skip
    """Return the workers named for lasting differences in `ROUNDS` rounds, by sums as in the
    detector.

    Honest values are a direction that changes, noise, and a part from each worker's samples. Sizes
    of entries span two decades.
    """
    rng = np.random.default_rng(seed)
    size_D = 10 ** rng.uniform(-2, 0, SIZE)
    found, sums = LastingDifferences(group(workers), SIZE, rng), CumulativeSums(LASTING_EXCESS)
    own_PD, common_D = own * rng.standard_normal((workers, SIZE)), np.zeros(SIZE)
    names = set()
    for at in range(ROUNDS):
        common_D = 0.8 * common_D + 0.6 * rng.standard_normal(SIZE)
        noise_PD = rng.standard_normal((workers, SIZE))
        honest = dict(enumerate(((common_D + own_PD + noise_PD) * size_D).astype(np.float32)))
        sent = dict(honest)
        if attack is not None:
            sent |= {rank: attack(at, honest) for rank in bad}
        taken = {Rank(rank): found.taken(whole(one)) for rank, one in sent.items()}
        for rank, excess in found.excesses(taken).items():
            sums.add(rank, excess)
            if sums.of(rank) >= LIMIT:
                names.add(int(rank))
    return names


@pytest.mark.parametrize("attack", [drip, little_both_signs])
@pytest.mark.parametrize("workers", [3, 4, 6])
def test_a_lasting_difference_is_named(attack: Attack, workers: int) -> None:
    assert named(workers, attack) == {BAD}


def test_two_of_eight_workers_that_agree_do_not_hide_each_other() -> None:
    assert named(8, little_both_signs, bad=(1, 5)) == {1, 5}


@pytest.mark.parametrize("workers", [3, 4, 8])
@pytest.mark.parametrize("own", [0.0, 0.5])
def test_honest_workers_are_not_named(workers: int, own: float) -> None:
    assert named(workers, None, own=own) == set()


@pytest.mark.parametrize("attack", [copy, divide])
@pytest.mark.parametrize("workers", [3, 4])
def test_an_attacker_cannot_get_an_honest_worker_named(attack: Attack, workers: int) -> None:
    assert named(workers, attack) <= {BAD}


@pytest.mark.parametrize(
    ("count", "sizes"), [(2, []), (3, [3]), (8, [8]), (9, [4, 5]), (20, [6, 7, 7])]
)
def test_teams_have_three_to_eight_workers(count: int, sizes: list[int]) -> None:
    """A worker in a team of two, or without like data, has no excess."""
    rng = np.random.default_rng(0)
    found = LastingDifferences(group(count), SIZE, rng)
    assert sorted(len(one.ranks) for one in found.teams) == sizes
    assert all(MIN_TEAM <= size <= MAX_TEAM for size in sizes)
    value_of = {Rank(at): rng.standard_normal(SIZE).astype(np.float32) for at in range(count)}
    assert set(found.excesses(value_of)) == (set(value_of) if sizes else set())
    assert LastingDifferences([], SIZE, rng).excesses(value_of) == {}


def test_entries_and_teams_are_random() -> None:
    some_D = np.arange(10 * MAX_ENTRIES, dtype=np.float32)
    one, other = (
        LastingDifferences(group(20), some_D.size, np.random.default_rng(seed)) for seed in (1, 2)
    )
    assert one.taken(whole(some_D)).size == MAX_ENTRIES == np.unique(one.taken(whole(some_D))).size
    assert not np.array_equal(one.taken(whole(some_D)), other.taken(whole(some_D)))
    assert [team.ranks for team in one.teams] != [team.ranks for team in other.teams]


def test_a_small_number_of_differences_does_not_count() -> None:
    """In a small model, many of the few entries agree by chance."""
    rng = np.random.default_rng(0)
    steady = rng.standard_normal(MIN_SIGNS - 1).astype(np.float32)
    found = LastingDifferences(group(4), steady.size, rng)
    for _ in range(ROUNDS):
        values = {Rank(at): rng.standard_normal(steady.size).astype(np.float32) for at in range(4)}
        values[BAD] = np.where(steady > 0, np.float32(3e38), np.float32(-3e38))
        assert set(found.excesses(values).values()) == {-OWN_SAMPLES}
