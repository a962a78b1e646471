"""For how long this operator has seen things hold, by its own monotonic clock.

Kept by `reconcile` for each job: clocks of machines differ, and Kubernetes does not say when a size
was changed. Known to one process alone: after a restart it counts anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Sightings(Generic[T]):
    """Things that hold, and when each was first seen to."""

    def __init__(self) -> None:
        self._since_s: dict[T, float] = {}

    def of(self, things: Collection[T], now_s: float) -> Mapping[T, float]:
        """Seconds that each of these has held without a break; others are forgotten.

        >>> seen = Sightings[str]()
        >>> seen.of(["a"], 5.0), seen.of(["a", "b"], 8.0), seen.of(["b"], 9.0)
        ({'a': 0.0}, {'a': 3.0, 'b': 0.0}, {'b': 1.0})
        """
        self._since_s = {thing: self._since_s.get(thing, now_s) for thing in things}
        return {thing: now_s - since_s for thing, since_s in self._since_s.items()}
