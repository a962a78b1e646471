"""An amount per second, over a window as long as the rate stays the same.

Owns the one estimator under capacities, link rates and iteration times. Pure: durations are
arguments. Does not know what is counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class _Bucket:
    amount: float
    seconds: float
    span_s: float
    count: int = 1

    def add(self, other: _Bucket) -> None:
        self.amount += other.amount
        self.seconds += other.seconds
        self.span_s += other.span_s
        self.count += other.count

    def remove(self, other: _Bucket) -> None:
        self.amount -= other.amount
        self.seconds -= other.seconds
        self.span_s -= other.span_s
        self.count -= other.count


class ChangingRate:
    """Amount divided by time over a sliding window that forgets the past when the rate changes.

    The window grows to `most_s`. Whenever its newest part (at least `least_s` long) differs by
    more than `change_fraction` from the rest, the rest is dropped: a change then shows as soon as
    it can be told from chance, and a steady rate still has the long window's precision. The part
    in which a change showed began before it: it goes as soon as there is another. Never a median: a
    CFS quota hides behind one (design.md section 6).

    Source: ours, a two-window change detection.
    """

    def __init__(
        self,
        *,
        least_s: float,
        most_s: float,
        change_fraction: float,
        least_amount: float = float("inf"),
        least_change_s: float | None = None,
        least_span_s: float = float("inf"),
        least_count: int = 1,
        rises: int = 1,
    ) -> None:
        """`least_amount` of whatever is counted is enough of a window too, however short; not to
        see a change in, where `least_change_s` says how long that has to be. So are `least_count`
        observations over `least_span_s`, for what goes on for little of the time: until that had
        come to `least_s`, a wrong rate would stand. A rise shows when so many observations one
        after the other are above what was known: for a rate whose single observations may be far
        too high, but not again and again."""
        self._least_s = least_s
        self._least_change_s = least_change_s
        self._rises = rises
        self._most_s = most_s
        self._change_fraction = change_fraction
        self._least_amount = least_amount
        self._least_span_s, self._least_count = least_span_s, least_count
        self._buckets: deque[_Bucket] = deque()
        self._total = _total(())
        """Of all buckets. Kept, as it is asked for at every observation of every link."""
        self._known: float | None = None
        self._is_known = True
        self._straddling = 0
        """So many of the oldest may have begun before the last change."""

    def add(self, amount: float, seconds: float, span_s: float | None = None) -> None:
        """Takes one observation; those shorter than a tenth of `least_s` are merged into one.

        `span_s`: from the one before to this one's end; None: nothing lies between them."""
        if seconds <= 0.0:
            return
        self._is_known = False
        one = _Bucket(amount, seconds, seconds if span_s is None else span_s)
        newest = self._buckets[-1] if self._buckets else None
        if newest is not None and newest.seconds < self._least_s / 10:
            newest.add(one)
        else:
            self._buckets.append(one)
        self._total.add(one)
        self._forget()
        self._forget_straddling()

    def clear(self) -> None:
        """Forgets everything: what is measured has been replaced."""
        self._drop(len(self._buckets))
        self._is_known = False
        self._straddling = 0

    @property
    def window_s(self) -> float:
        """Time that the estimate stands on."""
        return self._total.seconds

    def rate(self) -> float | None:
        """Amount per second; None until there is a window worth the name."""
        if not self._is_known:  # asked far more often than it changes
            total = self._total
            self._known = total.amount / total.seconds if self._enough(total) else None
            self._is_known = True
        return self._known

    def _enough(self, part: _Bucket) -> bool:
        if part.seconds >= self._least_s or part.amount >= self._least_amount:
            return part.seconds > 0
        return part.span_s >= self._least_span_s and part.count >= self._least_count

    def _shows_change(self, recent: _Bucket) -> bool:
        if self._least_change_s is None:
            return self._enough(recent)
        return recent.seconds >= self._least_change_s

    def _forget(self) -> None:
        while len(self._buckets) > 1 and self.window_s - self._buckets[0].seconds >= self._most_s:
            self._total.remove(self._buckets.popleft())
            self._straddling = max(0, self._straddling - 1)
        recent_count, recent = self._recent()
        older_count = len(self._buckets) - recent_count
        older = replace(self._total)
        older.remove(recent)
        if not older_count or older.seconds <= 0:
            return
        older_rate = older.amount / older.seconds
        change = recent.amount / recent.seconds - older_rate
        if abs(change) <= self._change_fraction * older_rate:
            return
        if change < 0 or self._has_risen(older_rate):
            self._drop(older_count)
            self._straddling = len(self._buckets)

    def _forget_straddling(self) -> None:
        if not 0 < self._straddling < len(self._buckets):
            return
        if self._shows_change(_total(islice(self._buckets, self._straddling, None))):
            self._drop(self._straddling)
            self._straddling = 0

    def _drop(self, count: int) -> None:
        """The oldest so many; and what has been rounded on the way."""
        for _ in range(count):
            self._buckets.popleft()
        self._total = _total(self._buckets)

    def _has_risen(self, older_rate: float) -> bool:
        least = (1 + self._change_fraction) * older_rate
        newest = list(self._buckets)[-self._rises :]
        return len(newest) == self._rises and all(b.amount > least * b.seconds for b in newest)

    def _recent(self) -> tuple[int, _Bucket]:
        """How many of the newest buckets make a window, and their sum."""
        total = _total(())
        for count, bucket in enumerate(reversed(self._buckets), start=1):
            total.add(bucket)
            if self._shows_change(total):
                return count, total
        return len(self._buckets), total


def _total(buckets: Iterable[_Bucket]) -> _Bucket:
    total = _Bucket(0.0, 0.0, 0.0, 0)
    for bucket in buckets:
        total.add(bucket)
    return total
