"""Estimates an amount per second over a window in which the rate is constant.

Capacities, link rates and iteration times use it. Pure: durations are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice


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
    """Amount divided by time over a sliding window that is reset when the rate changes.

    The window grows to `max_s`. When its newest part (at least `min_s` long) differs by more than
    `change_fraction` from the rest, the rest is dropped. A change is visible as soon as it exceeds
    noise, and a steady rate has the precision of the long window. The part that revealed a change
    may start before it, so it is dropped once another is complete. A median would hide a CFS quota:
    between two pauses all runs at full speed.

    Source: this project, a two-window change detection.
    """

    def __init__(
        self,
        *,
        min_s: float,
        max_s: float,
        change_fraction: float,
        min_amount: float = float("inf"),
        min_change_s: float | None = None,
        min_span_s: float = float("inf"),
        min_count: int = 1,
        min_rise_count: int = 1,
    ) -> None:
        """`min_amount` is an alternative to `min_s`, except for detecting changes if `min_change_s`
        is set.

        `min_count` observations over `min_span_s` are another, for rare activity: a wrong rate
        would otherwise remain until `min_s` is reached. A rise counts after `min_rise_count`
        consecutive observations above the known rate, because single ones may be far too high.
        """
        self._min_s = min_s
        self._min_change_s = min_change_s
        self._min_rise_count = min_rise_count
        self._max_s = max_s
        self._change_fraction = change_fraction
        self._min_amount = min_amount
        self._min_span_s, self._min_count = min_span_s, min_count
        self._buckets: deque[_Bucket] = deque()
        self._total = _total(())
        """Sum of all buckets, cached because every observation of every link needs it."""
        self._known: float | None = None
        self._is_known = True
        self._straddling = 0
        """Number of oldest buckets that may have started before the last change."""

    def add(self, amount: float, seconds: float, span_s: float | None = None) -> None:
        """Add one observation; those shorter than a tenth of `min_s` are merged. `span_s`: time
        from the end of the previous one to the end of this one; None: no gap."""
        if seconds <= 0.0:
            return
        self._is_known = False
        one = _Bucket(amount, seconds, seconds if span_s is None else span_s)
        newest = self._buckets[-1] if self._buckets else None
        if newest is not None and newest.seconds < self._min_s / 10:
            newest.add(one)
        else:
            self._buckets.append(one)
        self._total.add(one)
        self._forget()
        self._forget_straddling()

    def clear(self) -> None:
        """Forget everything: what is measured has been replaced."""
        self._drop(len(self._buckets))
        self._is_known = False
        self._straddling = 0

    @property
    def window_s(self) -> float:
        return self._total.seconds

    def rate(self) -> float | None:
        """Amount per second; None until the window is large enough."""
        if not self._is_known:  # requested far more often than it changes
            total = self._total
            self._known = total.amount / total.seconds if self._is_enough(total) else None
            self._is_known = True
        return self._known

    def _is_enough(self, part: _Bucket) -> bool:
        if part.seconds >= self._min_s or part.amount >= self._min_amount:
            return part.seconds > 0
        return part.span_s >= self._min_span_s and part.count >= self._min_count

    def _shows_change(self, recent: _Bucket) -> bool:
        if self._min_change_s is None:
            return self._is_enough(recent)
        return recent.seconds >= self._min_change_s

    def _forget(self) -> None:
        while len(self._buckets) > 1 and self.window_s - self._buckets[0].seconds >= self._max_s:
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
        """Drop the oldest `count` buckets, and accumulated rounding errors."""
        for _ in range(count):
            self._buckets.popleft()
        self._total = _total(self._buckets)

    def _has_risen(self, older_rate: float) -> bool:
        least = (1 + self._change_fraction) * older_rate
        newest = list(self._buckets)[-self._min_rise_count :]
        return len(newest) == self._min_rise_count and all(
            b.amount > least * b.seconds for b in newest
        )

    def _recent(self) -> tuple[int, _Bucket]:
        """How many of the newest buckets form a window, and their sum."""
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
