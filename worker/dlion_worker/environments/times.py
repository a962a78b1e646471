"""Times of an environment file: in seconds of a run, in words, and whether they are in order.

Called by `planning`, for a job's run, and by `contradictions`, also for a file alone: then a run is
of any length, and only what no run has in order is a problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlion_api.errors import Problem
from dlion_api.spec.bounds import INT32_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dlion_worker.environments.model import At

_FIELD = "trainer.stop.maxSeconds"
ANY_LENGTH = range(1, INT32_MAX + 1)
"""Of a run, in seconds: what a job may ask for."""


@dataclass(frozen=True)
class Moment:
    """A time and where it stands in the file; without `at` it is the start of the run."""

    path: str
    at: At | None

    def seconds(self, duration_s: float) -> float:
        """After the start, in a run of that length."""
        if self.at is None:
            return 0.0
        if self.at.fraction is not None:
            return self.at.fraction * duration_s
        return self.at.seconds or 0.0

    def words(self, duration_s: float | None) -> str:
        """For people; the length is not always known."""
        if self.at is None:
            return "the start"
        if self.at.fraction is None:
            return f"{self.at.seconds:.10g} s"
        if duration_s is None:
            return f"fraction {self.at.fraction:g} of the run"
        taken = f"fraction {self.at.fraction:g} of {duration_s:.10g} s"
        return f"{self.seconds(duration_s):.10g} s, which is {taken}"


@dataclass(frozen=True)
class Order:
    """That one time is not before another, or is after it; `rule` says so for people."""

    earlier: Moment
    later: Moment
    rule: str
    is_strict: bool = True

    def holds(self, duration_s: float) -> bool:
        """In a run of that length."""
        earlier_s, later_s = self.earlier.seconds(duration_s), self.later.seconds(duration_s)
        return earlier_s < later_s if self.is_strict else earlier_s <= later_s

    def lengths(self) -> range:
        """The lengths of runs in which it holds, in seconds, of those that a job may ask for.

        Each time is a line over the run's length, flat or through the origin: two of them cross
        once at the most, so that both ends tell whether there is a length from which on, or up to
        which, it holds.
        """
        match self.holds(1), self.holds(INT32_MAX):
            case True, True:
                return ANY_LENGTH
            case True, False:
                return range(1, _first(lambda length_s: not self.holds(length_s)))
            case False, True:
                return range(_first(self.holds), INT32_MAX + 1)
            case _:
                return range(0)

    def problem(self, duration_s: float | None) -> Problem:
        """That it does not hold in a run of that length (None: in no run)."""
        earlier = limit = self.earlier.words(duration_s)
        if duration_s is not None and self.earlier.at is not None:
            limit = f"{self.earlier.seconds(duration_s):.10g} s"
        allowed = f"after {limit}" if self.is_strict else f"{limit} or later"
        if duration_s is not None and (lengths := lengths_in_words(self.lengths())):
            allowed += f"; or {lengths}"
        return Problem(
            path=self.later.path,
            message=f"{self.rule}, and {self.earlier.path} is {earlier}",
            value=self.later.words(duration_s),
            allowed=allowed,
        )


def _first(holds: Callable[[int], bool]) -> int:
    """The first length for which that holds, as it then does for all that are longer.

    >>> _first(lambda length_s: length_s >= 180)
    180
    """
    low, high = 1, INT32_MAX
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def lengths_in_words(lengths: range) -> str:
    """Which runs: `a run of 180 s or longer (trainer.stop.maxSeconds)`; empty: any, or none.

    >>> lengths_in_words(range(180, 200)), lengths_in_words(ANY_LENGTH)
    ('a run of 180 to 199 s (trainer.stop.maxSeconds)', '')
    """
    if not lengths or lengths == ANY_LENGTH:
        return ""
    if lengths[-1] == ANY_LENGTH[-1]:
        return f"a run of {lengths[0]} s or longer ({_FIELD})"
    if lengths[0] == ANY_LENGTH[0]:
        return f"a run of {lengths[-1]} s or shorter ({_FIELD})"
    return f"a run of {lengths[0]} to {lengths[-1]} s ({_FIELD})"


def lengths_of(orders: Iterable[Order]) -> range:
    """The lengths of runs in which all of these hold; empty where there is none."""
    found = [ANY_LENGTH, *(order.lengths() for order in orders)]
    return range(max(each.start for each in found), min(each.stop for each in found))


@dataclass(frozen=True)
class Times:
    """What a fraction of the run is taken of."""

    duration_s: float | None = None
    """The job's `stop.maxSeconds`."""

    def seconds(self, at: At | None) -> float | None:
        """Seconds after the start; None where no time is given, or none can be told."""
        if at is None:
            return None
        if at.fraction is None:
            return at.seconds
        return None if self.duration_s is None else at.fraction * self.duration_s

    def out_of_order(self, orders: Iterable[Order]) -> Iterator[Problem]:
        """Each time that is not in order, against the latest that it comes before."""
        failing: dict[str, Order] = {}
        possible = []
        for order in orders:
            if self._holds(order):
                possible.append(order)
            elif self._is_worse(order, failing.get(order.later.path)):
                failing[order.later.path] = order
        for order in failing.values():
            yield order.problem(self.duration_s)
        possible = [order for order in possible if order.later.path not in failing]
        if self.duration_s is None and not lengths_of(possible):
            yield _no_length(possible)

    def _holds(self, order: Order) -> bool:
        if self.duration_s is None:
            return bool(order.lengths())
        return order.holds(self.duration_s)

    def _is_worse(self, order: Order, other: Order | None) -> bool:
        length_s = self.duration_s or 1.0
        return other is None or other.earlier.seconds(length_s) < order.earlier.seconds(length_s)


def _no_length(orders: list[Order]) -> Problem:
    """That each of these holds in some run, and no run has them all."""
    longest = max(orders, key=lambda order: order.lengths().start)
    shortest = min(orders, key=lambda order: order.lengths().stop)
    return Problem(
        path=max(longest, shortest, key=orders.index).later.path,
        message=f"no run has all times in order: {longest.later.path} is after "
        f"{longest.earlier.path} in {lengths_in_words(longest.lengths())}, "
        f"{shortest.later.path} after {shortest.earlier.path} in "
        f"{lengths_in_words(shortest.lengths())}",
        advice="Give these times in one way: all in seconds, or all as fractions.",
    )
