"""An amount per second, over a window as long as the rate stays the same.

Owns the one estimator under capacities, link rates and iteration times. Pure: durations are
arguments. Does not know what is counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass
class _Bucket:
    amount: float
    seconds: float


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
        rises: int = 1,
    ) -> None:
        """`least_amount` of whatever is counted is enough of a window too, however short; not to
        see a change in, where `least_change_s` says how long that has to be. A rise shows when so
        many observations one after the other are above what was known: for a rate whose single
        observations may be far too high, but not again and again."""
        self._least_s = least_s
        self._least_change_s = least_change_s
        self._rises = rises
        self._most_s = most_s
        self._change_fraction = change_fraction
        self._least_amount = least_amount
        self._buckets: deque[_Bucket] = deque()
        self._known: float | None = None
        self._is_known = True
        self._straddling = 0
        """So many of the oldest may have begun before the last change."""

    def add(self, amount: float, seconds: float) -> None:
        """Takes one observation; those shorter than a tenth of `least_s` are merged into one."""
        if seconds <= 0.0:
            return
        self._is_known = False
        newest = self._buckets[-1] if self._buckets else None
        if newest is not None and newest.seconds < self._least_s / 10:
            newest.amount += amount
            newest.seconds += seconds
        else:
            self._buckets.append(_Bucket(amount, seconds))
        self._forget()
        self._forget_straddling()

    def clear(self) -> None:
        """Forgets everything: what is measured has been replaced."""
        self._buckets.clear()
        self._is_known = False
        self._straddling = 0

    @property
    def window_s(self) -> float:
        """Time that the estimate stands on."""
        return sum(bucket.seconds for bucket in self._buckets)

    def rate(self) -> float | None:
        """Amount per second; None until there is a window worth the name."""
        if not self._is_known:  # asked far more often than it changes
            amount = sum(bucket.amount for bucket in self._buckets)
            seconds = self.window_s
            self._known = amount / seconds if self._enough(amount, seconds) else None
            self._is_known = True
        return self._known

    def _enough(self, amount: float, seconds: float) -> bool:
        return seconds >= self._least_s or (seconds > 0 and amount >= self._least_amount)

    def _shows_change(self, recent: _Bucket) -> bool:
        if self._least_change_s is None:
            return self._enough(recent.amount, recent.seconds)
        return recent.seconds >= self._least_change_s

    def _forget(self) -> None:
        window_s = self.window_s
        while len(self._buckets) > 1 and window_s - self._buckets[0].seconds >= self._most_s:
            window_s -= self._buckets.popleft().seconds
            self._straddling = max(0, self._straddling - 1)
        recent_count, recent = self._recent()
        older = list(self._buckets)[:-recent_count]
        if not older:
            return
        older_rate = sum(b.amount for b in older) / sum(b.seconds for b in older)
        change = recent.amount / recent.seconds - older_rate
        if abs(change) <= self._change_fraction * older_rate:
            return
        if change < 0 or self._has_risen(older_rate):
            for _ in older:
                self._buckets.popleft()
            self._straddling = len(self._buckets)

    def _forget_straddling(self) -> None:
        since = list(self._buckets)[self._straddling :]
        if not self._straddling or not since:
            return
        total = _Bucket(sum(b.amount for b in since), sum(b.seconds for b in since))
        if self._shows_change(total):
            for _ in range(self._straddling):
                self._buckets.popleft()
            self._straddling = 0

    def _has_risen(self, older_rate: float) -> bool:
        least = (1 + self._change_fraction) * older_rate
        newest = list(self._buckets)[-self._rises :]
        return len(newest) == self._rises and all(b.amount > least * b.seconds for b in newest)

    def _recent(self) -> tuple[int, _Bucket]:
        """How many of the newest buckets make a window, and their sum."""
        total = _Bucket(0.0, 0.0)
        for count, bucket in enumerate(reversed(self._buckets), start=1):
            total.amount += bucket.amount
            total.seconds += bucket.seconds
            if self._shows_change(total):
                return count, total
        return len(self._buckets), total
