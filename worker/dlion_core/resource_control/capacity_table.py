"""The published capacities of all workers.

Decides which changes are published at once. Pure; sends nothing.
"""

from collections.abc import Collection, Iterable
from operator import attrgetter

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Capacity, CapacitySource, GradientNoise

PUBLISH_FRACTION = 0.01
"""A smaller change waits for the next regular publication."""

_NEWS = attrgetter("samples_per_s", "training_set_samples", "own_samples", "noise", "exchange_s")
"""What other sidecars' decisions depend on."""

_DATA = attrgetter("training_set_samples", "own_samples")


class CapacityTable:
    """The capacity of every worker.

    All sidecars use *published* values, even of their own worker: the same inputs then give the
    same shares everywhere.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._known: dict[Rank, Capacity] = {}
        self._incarnation: dict[Rank, int] = {}
        self._samples_by_rank: dict[Rank, int] = {}
        """Last reported number of samples of each worker, even if its speed is unknown."""
        self._total_samples = 0

    def set_own_samples(self, own_samples: int) -> None:
        """Set this worker's number of samples; 0: unknown."""
        if own_samples:
            self._samples_by_rank[self._rank] = own_samples

    def publish(self, own: Capacity, *, regular: bool) -> bool:
        """Publish this worker's own estimate; return whether it changed enough to send at once.
        `regular`: a publication is due anyway, so include small changes."""
        known = self._known.get(self._rank)
        if known is not None:
            change = abs(own.samples_per_s - known.samples_per_s)
            is_large = change > PUBLISH_FRACTION * known.samples_per_s or _DATA(known) != _DATA(own)
            if not (is_large or (regular and _NEWS(known) != _NEWS(own))):
                return False
        self._known[self._rank] = own
        return True

    def own(self) -> Capacity:
        """This worker's published capacity; before there is one, only its number of samples."""
        samples = self._samples_by_rank.get(self._rank, 0)
        nothing = Capacity(self._rank, 0.0, 0.0, CapacitySource.UNKNOWN, 0, own_samples=samples)
        return self._known.get(self._rank, nothing)

    def update(self, capacity: Capacity, incarnation: int) -> bool:
        """Update a peer's capacity; return whether it changed and is not outdated."""
        if capacity.source is CapacitySource.UNKNOWN or capacity.samples_per_s <= 0:
            return self._update_samples(capacity, incarnation)
        known = self._known.get(capacity.rank)
        age = (incarnation, capacity.iteration)
        if known is not None and age < (self._incarnation.get(capacity.rank, 0), known.iteration):
            return False
        self._update_samples(capacity, incarnation)
        self._incarnation[capacity.rank] = incarnation
        self._known[capacity.rank] = capacity
        return known is None or _NEWS(known) != _NEWS(capacity)

    def _update_samples(self, capacity: Capacity, incarnation: int) -> bool:
        before = self._samples_by_rank.get(capacity.rank, 0)
        is_older = incarnation < self._incarnation.get(capacity.rank, 0)
        if is_older or capacity.own_samples in (0, before):
            return False
        self._samples_by_rank[capacity.rank] = capacity.own_samples
        return True

    def resume(self, samples_per_s: dict[Rank, float], total_samples: int) -> None:
        """Start from the values of an earlier sidecar, where nothing is known yet."""
        self._total_samples = total_samples
        for rank, value in samples_per_s.items():
            if value > 0:
                capacity = Capacity(rank, value, 0.0, CapacitySource.RATE, 0)
                self._known.setdefault(rank, capacity)

    def for_ranks(self, ranks: Iterable[Rank]) -> dict[Rank, float]:
        """Samples per second of those workers; the mean of the others for an unknown one."""
        wanted = sorted(set(ranks))
        known = self.known(wanted)
        mean = sum(known.values()) / len(known) if known else 1.0
        return {rank: known.get(rank, mean) for rank in wanted}

    def training_set_samples(self, ranks: Iterable[Rank]) -> int:
        """Size of the training set: the mean of what those workers published; 0 if none did."""
        known = self._published(sorted(set(ranks)))
        reported = [one.training_set_samples for one in known if one.training_set_samples]
        return round(sum(reported) / len(reported)) if reported else 0

    def own_samples(self, ranks: Collection[Rank]) -> dict[Rank, int]:
        """Number of samples of each of those workers; empty until all are known."""
        reported = {one.rank: one.own_samples for one in self._published(ranks)}
        return reported if len(reported) == len(ranks) and all(reported.values()) else {}

    def total_samples(self, active: Collection[Rank], gone: Collection[Rank]) -> int:
        """Number of samples of those workers together.

        Until every active worker has reported, the last value (0 at first). A worker that left
        without reporting counts as the mean of the others.
        """
        reported = [
            self._samples_by_rank[r] for r in {*active, *gone} if r in self._samples_by_rank
        ]
        if reported and self._samples_by_rank.keys() >= set(active):
            self._total_samples = round(sum(reported) / len(reported) * len({*active, *gone}))
        return self._total_samples

    def gradient_noises(self, ranks: Iterable[Rank]) -> list[GradientNoise]:
        """The known gradient noise of those workers, in rank order."""
        known = self._published(sorted(set(ranks)))
        return [one.noise for one in known if one.noise is not None]

    def exchange_s(self, ranks: Iterable[Rank]) -> float:
        """Time of an iteration beside computing, without waits: the minimum over those workers."""
        reported = [one.exchange_s for one in self._published(ranks)]
        return min((each_s for each_s in reported if each_s > 0), default=0.0)

    def known(self, ranks: Iterable[Rank]) -> dict[Rank, float]:
        """Samples per second of the known ones among those workers."""
        return {one.rank: one.samples_per_s for one in self._published(ranks)}

    def _published(self, ranks: Iterable[Rank]) -> list[Capacity]:
        return [self._known[rank] for rank in ranks if rank in self._known]
