"""Times of an environment file: in seconds, as text, and checks of their order.

`planning` checks a job's run. `validation` also checks a file alone: then any run length is
possible, and only an order that no length satisfies is a problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlion_api.bounds import INT32_MAX
from dlion_api.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dlion_environments.model import EnvironmentTime

_FIELD = "trainer.stop.maxSeconds"
ANY_LENGTH = range(1, INT32_MAX + 1)
"""Lengths of a run that a job may request, in seconds."""


def seconds_of(at: EnvironmentTime | None, duration_s: float | None) -> float | None:
    """Seconds after the start; None without a time, or for a fraction of an unknown length."""
    if at is None:
        return None
    if at.fraction is None:
        return at.seconds
    return None if duration_s is None else at.fraction * duration_s


@dataclass(frozen=True)
class TimePoint:
    """A time and its path in the file; without `at` the start of the run."""

    path: str
    at: EnvironmentTime | None

    def seconds(self, duration_s: float) -> float:
        """Seconds after the start, in a run of that length."""
        return seconds_of(self.at, duration_s) or 0.0

    def describe(self, duration_s: float | None) -> str:
        """The time as text; the length may be unknown."""
        if self.at is None:
            return "the start"
        if self.at.fraction is None:
            return f"{self.at.seconds:.10g} s"
        if duration_s is None:
            return f"fraction {self.at.fraction:g} of the run"
        fraction = f"fraction {self.at.fraction:g} of {duration_s:.10g} s"
        return f"{self.seconds(duration_s):.10g} s, which is {fraction}"


@dataclass(frozen=True)
class TimeOrder:
    """A rule that one time is not before, or is after, another; `rule` is its text."""

    earlier: TimePoint
    later: TimePoint
    rule: str
    is_strict: bool = True

    def holds(self, duration_s: float) -> bool:
        """Whether it holds in a run of that length."""
        earlier_s, later_s = self.earlier.seconds(duration_s), self.later.seconds(duration_s)
        return earlier_s < later_s if self.is_strict else earlier_s <= later_s

    def lengths(self) -> range:
        """The permitted run lengths for which it holds, in seconds.

        Each time is a linear function of the run's length, constant or through the origin. Two such
        lines cross at most once, so the extremes show whether there is a minimum or maximum length.
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
        """The problem that it does not hold in a run of that length (None: in any run)."""
        earlier = limit = self.earlier.describe(duration_s)
        if duration_s is not None and self.earlier.at is not None:
            limit = f"{self.earlier.seconds(duration_s):.10g} s"
        allowed = f"after {limit}" if self.is_strict else f"{limit} or later"
        if duration_s is not None and (lengths := describe_lengths(self.lengths())):
            allowed += f"; or {lengths}"
        return Problem(
            path=self.later.path,
            message=f"{self.rule}, and {self.earlier.path} is {earlier}",
            value=self.later.describe(duration_s),
            allowed=allowed,
        )


def _first(holds: Callable[[int], bool]) -> int:
    """The first length for which `holds`, which must be monotonic, is true.

    >>> _first(lambda length_s: length_s >= 180)
    180
    """
    low, high = 1, INT32_MAX
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def describe_lengths(lengths: range) -> str:
    """Run lengths as text: `a run of 180 s or longer (trainer.stop.maxSeconds)`; empty: any, or
    none.

    >>> describe_lengths(range(180, 200)), describe_lengths(ANY_LENGTH)
    ('a run of 180 to 199 s (trainer.stop.maxSeconds)', '')
    """
    if not lengths or lengths == ANY_LENGTH:
        return ""
    if lengths[-1] == ANY_LENGTH[-1]:
        return f"a run of {lengths[0]} s or longer ({_FIELD})"
    if lengths[0] == ANY_LENGTH[0]:
        return f"a run of {lengths[-1]} s or shorter ({_FIELD})"
    return f"a run of {lengths[0]} to {lengths[-1]} s ({_FIELD})"


def common_lengths(orders: Iterable[TimeOrder]) -> range:
    """The run lengths for which all orders hold; empty if there are none."""
    lengths = [ANY_LENGTH, *(order.lengths() for order in orders)]
    return range(max(each.start for each in lengths), min(each.stop for each in lengths))


def out_of_order(orders: Iterable[TimeOrder], duration_s: float | None) -> Iterator[Problem]:
    """Each time that is out of order, against the latest time that it precedes."""
    failing: dict[str, TimeOrder] = {}
    possible = []
    length_s = duration_s or 1.0
    for order in orders:
        worst = failing.get(order.later.path)
        if order.lengths() if duration_s is None else order.holds(duration_s):
            possible.append(order)
        elif worst is None or worst.earlier.seconds(length_s) < order.earlier.seconds(length_s):
            failing[order.later.path] = order
    for order in failing.values():
        yield order.problem(duration_s)
    possible = [order for order in possible if order.later.path not in failing]
    if duration_s is None and not common_lengths(possible):
        yield _no_common_length(possible)


def _no_common_length(orders: list[TimeOrder]) -> Problem:
    """The problem that each order holds in some run, but no run satisfies all."""
    longest = max(orders, key=lambda order: order.lengths().start)
    shortest = min(orders, key=lambda order: order.lengths().stop)
    return Problem(
        path=max(longest, shortest, key=orders.index).later.path,
        message=f"no run has all times in order: {longest.later.path} is after "
        f"{longest.earlier.path} in {describe_lengths(longest.lengths())}, "
        f"{shortest.later.path} after {shortest.earlier.path} in "
        f"{describe_lengths(shortest.lengths())}",
        advice="Give these times in one way: all in seconds, or all as fractions.",
    )
