"""Whether a worker differs from those of like data in one direction, round after round.

Called by `deviations`. A batch's noise points elsewhere in each round, and so does most of what
sets one honest worker apart. What an attacker adds must last to change the model, however small it
is in one round. Of each pair of workers the signs of the differences, entry by entry, are compared
with the mean of the same pair's earlier signs. Signs, since a small constant value shows best in
the many entries where others have least; pairs, since a third worker cannot change how two differ.

A worker is judged by the middle of its cosines, of two the smaller, beside those of the others:
each honest worker has samples of its own, which set it apart for longer as less is left to learn.

Source: this project. Sums of distances over rounds are those of SafeguardSGD (Allen-Zhu,
Ebrahimian, Li & Alistarh, *Byzantine-resilient non-convex stochastic gradient descent*, ICLR 2021);
the order of workers in each entry instead of values is that of MANDERA (Zhu et al., 2023, as
recalled).

Legend: D entries, K those that are compared, M workers of a team, E pairs of a team.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_core.policies.claims.independent import units_of
from dlion_core.policies.claims.sent_entries import SentEntries
from dlion_core.policies.claims.sign_balance import MIN_SIGNS

MAX_ENTRIES = 4096
"""Entries that are compared, chosen by chance for the whole run."""

MAX_TEAM, MIN_TEAM = 8, 3
"""Workers that are compared with each other. Pairs grow with the square of it."""

MEMORY = 0.9
"""Part of the mean of earlier signs that is kept in a round."""

EARLIER_ROUNDS = 2
"""Earlier rounds of a pair before its cosine counts."""

OWN_SAMPLES = 0.2
"""A cosine that honest workers come to, each with its own samples."""


class LastingDifferences:
    """The differences between workers of like data so far."""

    def __init__(
        self,
        groups: Iterable[frozenset[Rank]],
        size: int,
        rng: np.random.Generator,
        sites: Mapping[Rank, str] | None = None,
    ) -> None:
        """`rng`: must not be known to others: they could spare the entries or choose a team.

        `sites`: of each worker; without them each counts for itself.
        """
        count = min(size, MAX_ENTRIES)
        self._taken_K = np.sort(rng.choice(size, count, replace=False))
        self.teams = [
            _Team(ranks, count, units_of(ranks, sites or {}))
            for group in groups
            for ranks in _teams(group, rng)
        ]

    def forget(self, rank: Rank) -> None:
        """Drop the differences of a worker that left."""
        for team in self.teams:
            team.forget(rank)

    def taken(self, sent: SentEntries) -> NDArray[np.float32]:
        """Return a copy of the entries that are compared, shape [K]."""
        return sent.at(self._taken_K)

    def excesses(self, value_of: Mapping[Rank, NDArray[np.float32]]) -> dict[Rank, float]:
        """Return how far each worker's middle cosine is above those of the others of its team.

        `value_of`: what `taken` returned of this round's contributions.
        """
        found: dict[Rank, float] = {}
        for team in self.teams:
            found |= team.excesses(value_of)
        return found


def _teams(group: frozenset[Rank], rng: np.random.Generator) -> list[list[Rank]]:
    ranks = sorted(group)
    if len(ranks) < MIN_TEAM:
        return []
    count = -(-len(ranks) // MAX_TEAM)
    mixed = [ranks[at] for at in rng.permutation(len(ranks))]
    return [sorted(mixed[first::count]) for first in range(count)]


class _Team:
    """Workers of which each pair is compared."""

    def __init__(self, ranks: Sequence[Rank], count: int, units: Mapping[Rank, Hashable]) -> None:
        self.ranks = list(ranks)
        self._unit_of = [units[rank] for rank in ranks]
        pairs = list(itertools.combinations(range(len(ranks)), 2))
        self._first_E, self._second_E = np.array(pairs, np.intp).T
        self._mean_EK = np.zeros((len(pairs), count), np.float32)
        self._rounds_E = np.zeros(len(pairs), np.intp)

    def forget(self, rank: Rank) -> None:
        if rank in self.ranks:
            at = self.ranks.index(rank)
            is_of_E = (self._first_E == at) | (self._second_E == at)
            self._mean_EK[is_of_E] = 0
            self._rounds_E[is_of_E] = 0

    def excesses(self, value_of: Mapping[Rank, NDArray[np.float32]]) -> dict[Rank, float]:
        present = [at for at, rank in enumerate(self.ranks) if rank in value_of]
        if len(present) < MIN_TEAM:
            return {}
        cosine_MM = np.zeros((len(self.ranks), len(self.ranks)))
        for pair, (one, other) in enumerate(zip(self._first_E, self._second_E, strict=True)):
            if one in present and other in present:
                values = value_of[self.ranks[one]], value_of[self.ranks[other]]
                cosine_MM[one, other] = cosine_MM[other, one] = self._add(pair, *values)
        middles = {}
        for at in present:
            others = sorted(cosine_MM[at, other] for other in present if other != at)
            middles[at] = float(others[(len(others) - 1) // 2])
        return {self.ranks[at]: middles[at] - self._usual(middles, at) for at in present}

    def _add(self, pair: int, one_K: NDArray[np.float32], other_K: NDArray[np.float32]) -> float:
        """Take a pair's signs of this round; return their cosine to the mean of earlier ones."""
        sign_K = np.subtract(one_K > other_K, one_K < other_K, dtype=np.float32)  # no overflow
        mean_K, cosine = self._mean_EK[pair], 0.0
        signs = np.count_nonzero(sign_K)
        if self._rounds_E[pair] >= EARLIER_ROUNDS and signs >= MIN_SIGNS:
            earlier_K = mean_K * np.abs(sign_K)  # where a slow link has sent, and they differ
            length = math.sqrt(signs * float(earlier_K @ earlier_K))
            cosine = float(sign_K @ earlier_K) / length if length else 0.0
        mean_K *= np.float32(MEMORY)
        mean_K += np.float32(1 - MEMORY) * sign_K
        self._rounds_E[pair] += 1
        return cosine

    def _usual(self, middles: Mapping[int, float], at: int) -> float:
        """Return the largest of the others, without those that may be bad too: a quarter in all, or
        its site."""
        own = self._unit_of[at]
        others = sorted(one for other, one in middles.items() if self._unit_of[other] != own)
        count = max(1, len(middles) // 4)
        return max([OWN_SAMPLES, *others[-count:][:1]])
