"""How long this operator has observed things to hold, by its own monotonic clock.

`reconcile` keeps a tracker per job: machines' clocks differ, and Kubernetes does not record when a
size was changed. After a restart the counting begins again.
"""

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class DurationTracker(Generic[T]):
    """Things that hold, and when each one was first observed."""

    def __init__(self) -> None:
        self._since_s: dict[T, float] = {}

    def of(self, things: Collection[T], now_s: float) -> Mapping[T, float]:
        """Return the seconds that each of these has held without a break. Forget all others.

        >>> tracker = DurationTracker[str]()
        >>> tracker.of(["a"], 5.0), tracker.of(["a", "b"], 8.0), tracker.of(["b"], 9.0)
        ({'a': 0.0}, {'a': 3.0, 'b': 0.0}, {'b': 1.0})
        """
        self._since_s = {thing: self._since_s.get(thing, now_s) for thing in things}
        return {thing: now_s - since_s for thing, since_s in self._since_s.items()}
