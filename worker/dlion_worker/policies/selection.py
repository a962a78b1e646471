"""Which entries of a gradient a threshold keeps, for every threshold at once (Max N).

Called by `sending`. Max N keeps, in each variable, the entries with |g| >= (1 - N/100) max|g|, so
what counts is each entry's magnitude relative to its variable's largest, rounded to float32. A
histogram over the top 16 bits of that ratio, made in one pass, bounds each selection; exact
thresholds are then found among the few entries that can matter, and shared between the links.

Source: DLion (Max N as recalled); the histogram is ours.
Legend: D entries of the flat vector, K kept, L variables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlion_worker.codecs import require_finite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlion_worker.policies.interface import Flat, Layout

_TOP = 0x3F80
"""The top 16 bits of 1.0, the largest ratio there is."""

_CHUNK = 1 << 16
"""Entries looked at in one go: what is done to them one after the other finds them in the cache."""


Index = NDArray[np.intp]


class Magnitudes:
    """|g| relative to the largest of its variable, and how many entries each threshold keeps."""

    def __init__(self, layout: Layout) -> None:
        self._slices = layout.slices()
        self._ratio_D = np.empty(layout.size, np.float32)
        self._bucket = np.empty(min(_CHUNK, layout.size), np.intp)
        self._at_least = np.zeros(_TOP + 1, np.int64)

    def measure(self, gradient_D: Flat) -> None:
        """Takes the ratios and their histogram; what was measured before is gone.

        Raises:
            ValueError: an entry is not finite.
        """
        histogram = np.zeros(_TOP + 1, np.intp)
        for where in self._slices:
            peak = self._magnitudes(gradient_D, where)
            for part in _parts(where):
                ratio = self._ratio_D[part]
                if peak > 0:
                    np.divide(ratio, peak, out=ratio)
                bucket = self._bucket[: ratio.size]
                np.right_shift(ratio.view(np.uint32), 16, out=bucket, casting="unsafe")
                histogram += np.bincount(bucket, minlength=_TOP + 1)
        self._at_least = np.cumsum(histogram[::-1])[::-1]

    def _magnitudes(self, gradient_D: Flat, where: slice) -> np.float32:
        """Takes |g| of one variable; the largest."""
        peak = np.float32(0)
        for part in _parts(where):
            # An entry that is not a number is larger than all others here, and so is seen.
            peak = np.maximum(peak, np.abs(gradient_D[part], out=self._ratio_D[part]).max())
        if not np.isfinite(peak):
            require_finite(gradient_D[where], "gradient")
        return peak

    def count(self, threshold: float) -> int:
        """How many entries have at least that ratio."""
        return int(np.count_nonzero(self._ratio_D >= np.float32(threshold)))

    def count_at_most(self, threshold: float) -> int:
        """The same or a little more, at no cost: those in the threshold's bucket all count."""
        return self.count_from_bucket(int(np.float32(threshold).view(np.uint32)) >> 16)

    def count_from_bucket(self, bucket: int) -> int:
        """How many ratios have top 16 bits of at least `bucket`."""
        return int(self._at_least[bucket]) if bucket <= _TOP else 0

    def largest(self, count: int, within_K: Index | None = None) -> Index:
        """Positions of at most `count` (below D) entries, the largest; those of equal ratio are
        kept or left together, so that there may be none.

        `within_K`: what a higher count has selected, which saves looking through all of them.
        """
        if within_K is None or within_K.size > self._ratio_D.size // 4:
            return np.flatnonzero(self._ratio_D >= self._threshold(self._ratio_D, count))
        ratio_K = self._ratio_D[within_K]
        return within_K[np.flatnonzero(ratio_K >= self._threshold(ratio_K, count))]

    def _threshold(self, ratio_C: Flat, count: int) -> np.float32:
        """The lowest ratio that at most `count` entries have or exceed; above 1 where not even the
        largest fit. `ratio_C`: those of all entries that any such threshold may keep."""
        bucket = int(np.searchsorted(-self._at_least, -count))  # the last with all its entries
        room = count - self.count_from_bucket(bucket)
        whole, below = _lowest_of(bucket), _lowest_of(bucket - 1)
        if room == 0:
            return whole
        is_split = (ratio_C >= below) & (ratio_C < whole)
        falling = np.sort(ratio_C[np.flatnonzero(is_split)])[::-1]
        if falling.size > room:
            falling = falling[falling > falling[room]]
        return np.float32(falling[-1]) if falling.size else whole


def _parts(where: slice) -> Iterator[slice]:
    """The slice in pieces that stay in the cache."""
    for start in range(where.start, where.stop, _CHUNK):
        yield slice(start, min(start + _CHUNK, where.stop))


def _lowest_of(bucket: int) -> np.float32:
    """The lowest ratio with those top 16 bits."""
    return np.float32(np.uint32(bucket << 16).view(np.float32))
