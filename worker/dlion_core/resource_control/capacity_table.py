"""The published capacities of all workers.

Decides which changes are published at once. Pure; sends nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Capacity, CapacitySource, GradientNoise

PUBLISH_FRACTION = 0.01
"""A smaller change waits for the next regular publication."""

_NEWS = attrgetter("samples_per_s", "training_set_samples", "own_samples", "noise", "exchange_s")
"""What other sidecars' decisions depend on."""

_DATA = attrgetter("training_set_samples", "own_samples")


@dataclass(frozen=True, eq=False)
class PublishedCapacities:
    """What the active workers have published. Sidecars keep it until it changes: each of their
    reports asks, and to collect it from hundreds of workers takes longer than all else."""

    ranks_version: tuple[object, ...]
    """What the ranks depend on: the caller's."""
    version: int
    """Version of the table."""
    active: list[Rank]
    members: Collection[Rank]
    samples_per_s: Mapping[Rank, float]
    """Speeds of the workers whose speed is known."""
    capacities: Mapping[Rank, float]
    """Capacities of all workers, in order: the mean of the others for an unknown one."""
    own_samples: Mapping[Rank, int]
    """Samples of each worker; empty until all are known."""
    training_set_samples: int
    """The mean of what they published; 0 if none did."""
    total_samples: int


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
        self.version = 0
        """Increases with each change of what other sidecars' decisions depend on."""

    def set_own_samples(self, own_samples: int) -> None:
        """Set this worker's number of samples; 0: unknown."""
        if own_samples:
            self._samples_by_rank[self._rank] = own_samples
            self.version += 1

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
        self.version += 1
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
        is_news = known is None or _NEWS(known) != _NEWS(capacity)
        self.version += is_news
        return is_news

    def _update_samples(self, capacity: Capacity, incarnation: int) -> bool:
        before = self._samples_by_rank.get(capacity.rank, 0)
        is_older = incarnation < self._incarnation.get(capacity.rank, 0)
        if is_older or capacity.own_samples in (0, before):
            return False
        self._samples_by_rank[capacity.rank] = capacity.own_samples
        self.version += 1
        return True

    def resume(self, samples_per_s: dict[Rank, float], total_samples: int) -> None:
        """Start from the values of an earlier sidecar, where nothing is known yet."""
        self._total_samples = total_samples
        self.version += 1
        for rank, value in samples_per_s.items():
            if value > 0:
                capacity = Capacity(rank, value, 0.0, CapacitySource.RATE, 0)
                self._known.setdefault(rank, capacity)

    def total_samples(self, active: Collection[Rank], gone: Collection[Rank]) -> int:
        """Number of samples of those workers together.

        Until every active worker has reported, the last value (0 at first). A worker that left
        without reporting counts as the mean of the others.
        """
        everyone = {*active, *gone}
        reported = [self._samples_by_rank[r] for r in everyone if r in self._samples_by_rank]
        if reported and self._samples_by_rank.keys() >= set(active):
            self._total_samples = round(sum(reported) / len(reported) * len(everyone))
        return self._total_samples

    def gradient_noises(self, ranks: Iterable[Rank]) -> list[GradientNoise]:
        """The known gradient noise of those workers, in rank order."""
        known = self._published(sorted(set(ranks)))
        return [one.noise for one in known if one.noise is not None]

    def exchange_s(self, ranks: Iterable[Rank]) -> float:
        """Time of an iteration beside computing, without waits: the minimum over those workers."""
        reported = [one.exchange_s for one in self._published(ranks)]
        return min((each_s for each_s in reported if each_s > 0), default=0.0)

    def published(
        self, active: list[Rank], members: Collection[Rank], ranks_version: tuple[object, ...]
    ) -> PublishedCapacities:
        """Collect what these active workers, of all `members`, have published."""
        known = self._published(active)
        samples_per_s = {one.rank: one.samples_per_s for one in known}
        in_order = dict(sorted(samples_per_s.items()))
        own_samples = {one.rank: one.own_samples for one in known if one.own_samples}
        reported = [one.training_set_samples for one in known if one.training_set_samples]
        return PublishedCapacities(
            ranks_version=ranks_version,
            version=self.version,
            active=active,
            members=members,
            samples_per_s=samples_per_s,
            capacities=in_order if len(known) == len(active) else _filled_up(in_order, active),
            own_samples=own_samples if len(own_samples) == len(active) else {},
            training_set_samples=round(sum(reported) / len(reported)) if reported else 0,
            total_samples=self.total_samples(active, members),
        )

    def known(self, ranks: Iterable[Rank]) -> dict[Rank, float]:
        """Samples per second of the known ones among those workers."""
        return {one.rank: one.samples_per_s for one in self._published(ranks)}

    def _published(self, ranks: Iterable[Rank]) -> list[Capacity]:
        return [self._known[rank] for rank in ranks if rank in self._known]


def _filled_up(known: Mapping[Rank, float], ranks: Collection[Rank]) -> dict[Rank, float]:
    """Samples per second of all those workers: the mean of the others for an unknown one."""
    mean = sum(known.values()) / len(known) if known else 1.0
    return {rank: known.get(rank, mean) for rank in sorted(ranks)}
