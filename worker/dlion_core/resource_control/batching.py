"""Global batch size, and its distribution among unequal workers.

Called by the sidecar and the simulator. Pure: iteration, training-set size and capacities are
arguments. Each worker computes the shares itself from the same inputs. If inputs differ for a
moment, the weights of the update compensate.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

from dlion_api.names import Rank
from dlion_api.spec import GlobalBatchSize


class GlobalBatchController:
    """Global batch size over iterations: warm-up, growth, hold; it never shrinks.

    Source: DLion (recalled): add a constant at each adjustment until 1 % of the training set, then
    multiply until 10 %, then hold. Each parameter is a field of the manifest's `globalBatchSize`.
    """

    def __init__(self, growth: GlobalBatchSize) -> None:
        self._growth = growth
        self._adjusted: int | None = 0
        """Adjustments made. None: resumed; set at the next call to those due then."""
        self._size = growth.initial

    def resume(self, size: int) -> None:
        """Continue with the size of an earlier sidecar, or of a checkpoint."""
        self._size = self._growth.within(size)
        self._adjusted = None

    def at(self, iteration: int, training_set_samples: int) -> int:
        """Return the samples of that iteration over all workers; makes the adjustments due.

        A controller that starts late (after a restart) catches up. It reaches the same size as the
        others if the training set has not changed meanwhile or `resume` was called.

        >>> from dlion_api.spec import GlobalBatchSize
        >>> control = GlobalBatchController(GlobalBatchSize(initial=192, growth=True))
        >>> [control.at(iteration, 50_000) for iteration in (0, 49, 50, 100, 150, 200)]
        [192, 192, 384, 500, 750, 1125]
        """
        growth = self._growth
        due = iteration // growth.every_steps if growth.growth else 0
        if self._adjusted is None:
            if iteration <= 1:  # after resuming, the iteration of the run is unknown
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
        """The resumed size, or one adjustment more if that fell due meanwhile.

        The latter holds if all adjustments from the start lead to exactly that size. If data were
        added meanwhile, that comparison is not conclusive.
        """
        grown = self._grown(training_set_samples)
        whole_way = GlobalBatchController(self._growth).at(iteration, training_set_samples)
        return grown if whole_way == grown else self._size

    def _grown(self, training_set_samples: int) -> int:
        return self._growth.grown(self._size, training_set_samples)


def shares(global_batch_size: int, capacity_samples_per_s: Mapping[Rank, float]) -> dict[Rank, int]:
    """Return local batch sizes: LBS_k = GBS * RCP_k / sum of RCP_j, integers >= 1 that sum to GBS.

    Remainders go to the largest fractions, lower ranks first. If there are more workers than
    samples, each has one (the sum is then the number of workers). Raises ValueError for no worker,
    or a capacity that is not a positive number. Source: DLion; rounding ours.

    >>> from dlion_api.names import Rank
    >>> shares(192, {Rank(0): 24.0, Rank(1): 12.0, Rank(2): 4.0})
    {0: 115, 1: 58, 2: 19}
    """
    return dict(_shares(global_batch_size, capacity_samples_per_s)[0])


_Shares = tuple[Mapping[Rank, int], tuple[int, ...]]
"""Shares by rank, and the same numbers alone."""


def _shares(global_batch_size: int, capacity_samples_per_s: Mapping[Rank, float]) -> _Shares:
    return _cached_shares(global_batch_size, tuple(sorted(capacity_samples_per_s.items())))


@lru_cache(maxsize=4)
def _cached_shares(global_batch_size: int, capacities: tuple[tuple[Rank, float], ...]) -> _Shares:
    """Cached, because all sidecars of a simulation ask in turn."""
    whole = _whole_shares(global_batch_size, capacities)
    return whole, tuple(whole.values())


def _whole_shares(
    global_batch_size: int, capacities: tuple[tuple[Rank, float], ...]
) -> Mapping[Rank, int]:
    capacity = dict(capacities)
    if not capacity or any(not (math.isfinite(one) and one > 0) for one in capacity.values()):
        msg = f"capacities {capacity}; allowed: at least one, all positive"
        raise ValueError(msg)
    if global_batch_size <= len(capacity):
        return dict.fromkeys(capacity, 1)
    exact = _exact_shares(global_batch_size, capacity)
    whole = {rank: math.floor(share) for rank, share in exact.items()}
    left_over = global_batch_size - sum(whole.values())
    by_fraction = sorted(whole, key=lambda rank: (whole[rank] - exact[rank], rank))
    for rank in by_fraction[:left_over]:
        whole[rank] += 1
    return whole


def _exact_shares(global_batch_size: int, capacity: Mapping[Rank, float]) -> dict[Rank, float]:
    """Shares before rounding, each at least 1; the remaining workers divide the rest."""
    at_least_one: set[Rank] = set()
    while True:
        rest = global_batch_size - len(at_least_one)
        peak = max(value for rank, value in capacity.items() if rank not in at_least_one)
        share = {r: value / peak for r, value in capacity.items() if r not in at_least_one}
        total = math.fsum(share.values())
        exact = {r: rest * share[r] / total if r in share else 1.0 for r in capacity}
        too_small = {rank for rank, share in exact.items() if share < 1.0}
        if not too_small:
            return exact
        at_least_one |= too_small


def blended_weights(
    capacity_samples_per_s: Mapping[Rank, float], samples: Mapping[Rank, int], data_fraction: float
) -> dict[Rank, float]:
    """Return the workers' weights: (1 - f) RCP_k / sum of RCP_j + f n_k / sum of n_j. Source: this
    project.

    >>> from dlion_api.names import Rank
    >>> blended_weights({Rank(0): 30.0, Rank(1): 10.0}, {Rank(0): 100, Rank(1): 300}, 0.5)
    {0: 0.5, 1: 0.5}
    """
    speed, data = math.fsum(capacity_samples_per_s.values()), sum(samples.values())
    return {
        rank: (1 - data_fraction) * capacity / speed + data_fraction * samples[rank] / data
        for rank, capacity in capacity_samples_per_s.items()
    }


class BatchShares:
    """Local batch sizes that follow capacities but not their noise.

    Rule (ours): all shares are recomputed if the global batch size changes or a worker joins or
    leaves. The same happens if some worker's new share differs by more than `tolerance_fraction`
    and by more than one sample. Otherwise shares stay as they are.
    """

    def __init__(
        self, *, weighted: bool = True, tolerance_fraction: float = 0.05, data_fraction: float = 0.0
    ) -> None:
        """`data_fraction` of the batch follows the workers' samples, the rest their capacities."""
        self._weighted = weighted
        self._data_fraction = data_fraction
        self._tolerance_fraction = tolerance_fraction
        self._current: _Shares = {}, ()
        self._global_batch_size = 0

    def update(
        self,
        global_batch_size: int,
        capacity_samples_per_s: Mapping[Rank, float],
        samples: Mapping[Rank, int] | None = None,
    ) -> dict[Rank, int]:
        """Return every worker's current local batch size. Raises ValueError as `shares`.

        With `weighted=False` capacities count as equal. Without the `samples` of every worker only
        capacities count.
        """
        capacity = (
            capacity_samples_per_s if self._weighted else dict.fromkeys(capacity_samples_per_s, 1.0)
        )
        if self._data_fraction and samples and samples.keys() == capacity.keys():
            capacity = blended_weights(capacity, samples, self._data_fraction)
        target = _shares(global_batch_size, capacity)
        if (
            global_batch_size != self._global_batch_size
            or target[0].keys() != self._current[0].keys()
            or _differ(target[1], self._current[1], self._tolerance_fraction)
        ):
            self._current, self._global_batch_size = target, global_batch_size
        return dict(self._current[0])


@lru_cache(maxsize=4)
def _differ(target: tuple[int, ...], current: tuple[int, ...], tolerance_fraction: float) -> bool:
    """Whether some worker's share does. Cached, because all sidecars of a simulation ask in turn,
    whenever a capacity of any worker changes."""
    return any(
        abs(share - now) > max(1.0, tolerance_fraction * now)
        for share, now in zip(target, current, strict=True)
    )
