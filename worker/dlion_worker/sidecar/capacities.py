"""The capacities of all workers: this one's as published, the others' as they said.

Owns what counts as a change worth telling. Called by the director. Pure; sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dlion_api.measurements import Capacity, CapacitySource, GradientNoise
from dlion_api.names import Rank
from dlion_worker.sidecar.capacity import CapacityEstimate

PUBLISH_FRACTION = 0.01
"""A smaller change waits for the next regular telling."""


class Capacities:
    """Who computes how fast. All sidecars work with *published* values, their own included: the
    same inputs then give the same shares everywhere."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._known: dict[Rank, Capacity] = {}
        self._incarnation: dict[Rank, int] = {}
        self._told_samples: dict[Rank, int] = {}
        """How much data each worker has, as told last; also of who has no known speed yet."""
        self._whole_set = 0

    def has_data(self, own_samples: int) -> None:
        """This worker trains on so many samples; 0: not told."""
        if own_samples:
            self._told_samples[self._rank] = own_samples

    def publish(
        self,
        estimate: CapacityEstimate,
        iteration: int,
        *,
        regular: bool,
        training_set_samples: int = 0,
        own_samples: int = 0,
        noise: GradientNoise | None = None,
        exchange_s: float = 0.0,
    ) -> bool:
        """Takes this worker's own estimate; whether the published value changed enough to be told
        at once. `regular`: it is time for a telling anyway, so small changes go out too."""
        known = self._known.get(self._rank)
        value = estimate.samples_per_s
        data = (training_set_samples, own_samples)
        if known is not None and (known.training_set_samples, known.own_samples) == data:
            change = abs(value - known.samples_per_s)
            is_news = change > (0.0 if regular else PUBLISH_FRACTION * known.samples_per_s)
            if regular:
                is_news |= (known.noise, known.exchange_s) != (noise, exchange_s)
            if not is_news:
                return False
        self._known[self._rank] = Capacity(
            self._rank,
            value,
            estimate.window_s,
            estimate.source,
            iteration,
            *data,
            noise,
            exchange_s,
        )
        return True

    def own(self) -> Capacity:
        """This worker's published capacity, for its peers; before there is one, its data alone."""
        samples = self._told_samples.get(self._rank, 0)
        nothing = Capacity(self._rank, 0.0, 0.0, CapacitySource.UNKNOWN, 0, own_samples=samples)
        return self._known.get(self._rank, nothing)

    def learn(self, capacity: Capacity, incarnation: int) -> bool:
        """Takes what a peer said of itself; whether that is news (not older than what is known)."""
        if capacity.source is CapacitySource.UNKNOWN or capacity.samples_per_s <= 0:
            return self._learn_data(capacity, incarnation)
        known = self._known.get(capacity.rank)
        age = (incarnation, capacity.iteration)
        if known is not None and age < (self._incarnation.get(capacity.rank, 0), known.iteration):
            return False
        self._learn_data(capacity, incarnation)
        self._incarnation[capacity.rank] = incarnation
        self._known[capacity.rank] = capacity
        return (
            known is None
            or known.samples_per_s != capacity.samples_per_s
            or known.training_set_samples != capacity.training_set_samples
            or known.own_samples != capacity.own_samples
            or known.noise != capacity.noise
            or known.exchange_s != capacity.exchange_s
        )

    def _learn_data(self, capacity: Capacity, incarnation: int) -> bool:
        before = self._told_samples.get(capacity.rank, 0)
        is_older = incarnation < self._incarnation.get(capacity.rank, 0)
        if is_older or capacity.own_samples in (0, before):
            return False
        self._told_samples[capacity.rank] = capacity.own_samples
        return True

    def resume(self, samples_per_s: dict[Rank, float], whole_set: int) -> None:
        """Begins from what an earlier sidecar knew, where nothing is known yet."""
        self._whole_set = whole_set
        for rank, value in samples_per_s.items():
            if value > 0:
                capacity = Capacity(rank, value, 0.0, CapacitySource.RATE, 0)
                self._known.setdefault(rank, capacity)

    def among(self, ranks: Iterable[Rank]) -> dict[Rank, float]:
        """Samples per second of those workers; who is not known yet counts as the others' mean."""
        wanted = sorted(set(ranks))
        known = self.known(wanted)
        mean = sum(known.values()) / len(known) if known else 1.0
        return {rank: known.get(rank, mean) for rank in wanted}

    def training_set_samples(self, ranks: Iterable[Rank]) -> int:
        """All workers' samples: the mean of what those workers have published; 0: nothing yet."""
        known = [self._known[rank] for rank in sorted(set(ranks)) if rank in self._known]
        told = [one.training_set_samples for one in known if one.training_set_samples]
        return round(sum(told) / len(told)) if told else 0

    def own_samples(self, ranks: Collection[Rank]) -> dict[Rank, int]:
        """How much data each of those workers has; empty until all have told."""
        told = {rank: self._known[rank].own_samples for rank in ranks if rank in self._known}
        return told if len(told) == len(ranks) and all(told.values()) else {}

    def whole_set(self, active: Collection[Rank], gone: Collection[Rank]) -> int:
        """Samples of those workers together; until all active ones have told, what it was last, 0
        at first. Who is gone and has told this sidecar nothing counts as the others' mean."""
        told = [self._told_samples[r] for r in {*active, *gone} if r in self._told_samples]
        if told and self._told_samples.keys() >= set(active):
            self._whole_set = round(sum(told) / len(told) * len({*active, *gone}))
        return self._whole_set

    def noises(self, ranks: Iterable[Rank]) -> list[GradientNoise]:
        """What those of them say of the gradient's noise who know anything, in rank order."""
        known = [self._known[rank] for rank in sorted(set(ranks)) if rank in self._known]
        return [one.noise for one in known if one.noise is not None]

    def exchange_s(self, ranks: Iterable[Rank]) -> float:
        """What an iteration takes beside computing for who waits for nobody: the least told."""
        told = [self._known[rank].exchange_s for rank in ranks if rank in self._known]
        return min((one for one in told if one > 0), default=0.0)

    def known(self, ranks: Iterable[Rank]) -> dict[Rank, float]:
        """Samples per second of those of them that are known."""
        return {rank: self._known[rank].samples_per_s for rank in ranks if rank in self._known}
