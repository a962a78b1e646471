"""How large the global batch is, and how it is shared out among unequal workers.

Called by the sidecar and the simulator. Pure: iteration, training-set size and capacities come in
as numbers; nothing is measured here. Each worker works the shares out for itself from the same
inputs; where their inputs differ for a moment, the weights of the update make up for it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_api.names import Rank
    from dlion_api.spec import GlobalBatchSize


class GlobalBatchController:
    """The global batch size as iterations go by: warm-up, growth, hold; it never shrinks.

    Source: DLion (recalled): add a constant at each adjustment until 1 % of the training set, then
    multiply until 10 %, then hold. Each knob is a field of the manifest's `globalBatchSize`.
    """

    def __init__(self, growth: GlobalBatchSize) -> None:
        self._growth = growth
        self._adjusted: int | None = 0
        """Adjustments made; None: another controller's, as many as are due at the next call."""
        self._size = growth.initial

    def resume(self, size: int) -> None:
        """Goes on from what an earlier controller had come to."""
        self._size = max(self._growth.initial, min(size, self._growth.max))
        self._adjusted = None

    def at(self, iteration: int, training_set_samples: int) -> int:
        """Samples of that iteration over all workers; makes the adjustments due since the last.

        A controller that starts late (after a restart) catches up, and arrives where the others
        are as long as the training set has not changed meanwhile, or it was told (`resume`).

        >>> from dlion_api.spec import GlobalBatchSize
        >>> control = GlobalBatchController(GlobalBatchSize(initial=192))
        >>> [control.at(iteration, 50_000) for iteration in (0, 49, 50, 100, 150, 200)]
        [192, 192, 384, 500, 750, 1125]
        """
        growth = self._growth
        due = iteration // growth.every_steps if growth.growth else 0
        if self._adjusted is None:
            if iteration <= 1:  # who resumed has not heard yet where the run is
                return self._size
            self._size = self._caught_up(iteration, training_set_samples)
            self._adjusted = due
        while self._adjusted < due:
            self._adjusted += 1
            grown = self._grown(training_set_samples)
            if grown == self._size:
                self._adjusted = due
            self._size = grown
        return self._size

    def _caught_up(self, iteration: int, training_set_samples: int) -> int:
        """The size resumed from; or one adjustment more, where the whole way leads to just that:
        it fell due while no controller was there. Where data have come meanwhile the way says
        nothing of that."""
        grown = self._grown(training_set_samples)
        whole_way = GlobalBatchController(self._growth).at(iteration, training_set_samples)
        return grown if whole_way == grown else self._size

    def _grown(self, training_set_samples: int) -> int:
        growth = self._growth
        warm = min(growth.warmup_fraction, growth.max_fraction) * training_set_samples
        if self._size < math.floor(warm):
            wanted, bound = self._size + (growth.increment or growth.initial), warm
        else:
            wanted = math.ceil(self._size * growth.factor)
            bound = growth.max_fraction * training_set_samples
        return max(self._size, min(wanted, math.floor(min(bound, growth.max))))


def shares(global_batch_size: int, capacity_samples_per_s: Mapping[Rank, float]) -> dict[Rank, int]:
    """Local batch sizes: LBS_k = GBS * RCP_k / sum of RCP_j, whole, summing to GBS, each >= 1.

    Remainders go to the largest fractions, lower ranks first. Where there are more workers than
    samples, each has one (the sum is then the number of workers). Source: DLion; rounding ours.

    >>> from dlion_api.names import Rank
    >>> shares(192, {Rank(0): 24.0, Rank(1): 12.0, Rank(2): 4.0})
    {0: 115, 1: 58, 2: 19}

    Raises:
        ValueError: no worker, or a capacity that is not a positive number.
    """
    ranks = sorted(capacity_samples_per_s)
    if not ranks or any(
        not (math.isfinite(capacity) and capacity > 0)
        for capacity in capacity_samples_per_s.values()
    ):
        msg = f"capacities {dict(capacity_samples_per_s)}; allowed: at least one, all positive"
        raise ValueError(msg)
    if global_batch_size <= len(ranks):
        return dict.fromkeys(ranks, 1)
    return dict(_shares(global_batch_size, tuple((r, capacity_samples_per_s[r]) for r in ranks)))


@lru_cache(maxsize=4)
def _shares(
    global_batch_size: int, capacities: tuple[tuple[Rank, float], ...]
) -> Mapping[Rank, int]:
    """Kept for the next who asks: in a simulation all workers' sidecars do, one after the other."""
    exact = _exact_shares(global_batch_size, dict(capacities))
    whole = {rank: math.floor(share) for rank, share in exact.items()}
    left_over = global_batch_size - sum(whole.values())
    by_fraction = sorted(whole, key=lambda rank: (whole[rank] - exact[rank], rank))
    for rank in by_fraction[:left_over]:
        whole[rank] += 1
    return whole


def _exact_shares(global_batch_size: int, capacity: Mapping[Rank, float]) -> dict[Rank, float]:
    """Shares before rounding, none below one: who would have less has one, the others the rest."""
    at_least_one: set[Rank] = set()
    while True:
        rest = global_batch_size - len(at_least_one)
        peak = max(value for rank, value in capacity.items() if rank not in at_least_one)
        total = math.fsum(
            value / peak for rank, value in capacity.items() if rank not in at_least_one
        )
        exact = {
            rank: 1.0 if rank in at_least_one else rest * (value / peak) / total
            for rank, value in capacity.items()
        }
        too_small = {rank for rank, share in exact.items() if share < 1.0}
        if not too_small:
            return exact
        at_least_one |= too_small


def blended(
    capacity_samples_per_s: Mapping[Rank, float],
    samples: Mapping[Rank, int],
    data_fraction: float,
) -> dict[Rank, float]:
    """Weights of the workers: (1 - f) RCP_k / sum of RCP_j + f n_k / sum of n_j. Source: ours.

    >>> from dlion_api.names import Rank
    >>> blended({Rank(0): 30.0, Rank(1): 10.0}, {Rank(0): 100, Rank(1): 300}, 0.5)
    {0: 0.5, 1: 0.5}
    """
    speed, data = math.fsum(capacity_samples_per_s.values()), sum(samples.values())
    return {
        rank: (1 - data_fraction) * capacity / speed + data_fraction * samples[rank] / data
        for rank, capacity in capacity_samples_per_s.items()
    }


class BatchShares:
    """Local batch sizes that follow capacities, but not their noise.

    Rule (ours): shares stay as they are until the global batch size changes, a worker comes or
    goes, or some worker's new share differs from its present one by more than `tolerance_fraction`
    of it and by more than one sample; then all shares are taken anew.
    """

    def __init__(
        self, *, weighted: bool = True, tolerance_fraction: float = 0.05, data_fraction: float = 0.0
    ) -> None:
        """`data_fraction` of the batch follows the workers' samples, the rest their capacities."""
        self._weighted = weighted
        self._data_fraction = data_fraction
        self._tolerance_fraction = tolerance_fraction
        self._current: dict[Rank, int] = {}
        self._global_batch_size = 0

    def update(
        self,
        global_batch_size: int,
        capacity_samples_per_s: Mapping[Rank, float],
        samples: Mapping[Rank, int] | None = None,
    ) -> dict[Rank, int]:
        """Every worker's local batch size now. With `weighted=False` capacities count as equal;
        without the `samples` of every worker only capacities count.

        Raises:
            ValueError: as `shares`.
        """
        capacity = (
            capacity_samples_per_s if self._weighted else dict.fromkeys(capacity_samples_per_s, 1.0)
        )
        if self._data_fraction and samples and samples.keys() == capacity.keys():
            capacity = blended(capacity, samples, self._data_fraction)
        target = shares(global_batch_size, capacity)
        if (
            global_batch_size != self._global_batch_size
            or target.keys() != self._current.keys()
            or any(self._differs(rank, share) for rank, share in target.items())
        ):
            self._current, self._global_batch_size = target, global_batch_size
        return dict(self._current)

    def _differs(self, rank: Rank, share: int) -> bool:
        current = self._current[rank]
        return abs(share - current) > max(1.0, self._tolerance_fraction * current)
