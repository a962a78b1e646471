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
    from dlion_worker.policies.interface import Flat, Layout

_TOP = 0x3F80
"""The top 16 bits of 1.0, the largest ratio there is."""

_CHUNK = 1 << 16
"""Entries counted at a time: fresh pages for all at once cost more than the counting."""


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
        require_finite(gradient_D, "gradient")
        np.abs(gradient_D, out=self._ratio_D)
        for where in self._slices:
            ratio = self._ratio_D[where]
            peak = ratio.max(initial=0.0)
            if peak > 0:
                np.divide(ratio, peak, out=ratio)
        self._at_least = np.cumsum(self._histogram()[::-1])[::-1]

    def _histogram(self) -> NDArray[np.intp]:
        """How many ratios fall into each bucket, counted in pieces that stay in the cache."""
        bits_D = self._ratio_D.view(np.uint32)
        histogram = np.zeros(_TOP + 1, np.intp)
        for start in range(0, bits_D.size, _CHUNK):
            bits = bits_D[start : start + _CHUNK]
            bucket = np.right_shift(bits, 16, out=self._bucket[: bits.size], casting="unsafe")
            histogram += np.bincount(bucket, minlength=_TOP + 1)
        return histogram

    def count(self, threshold: float) -> int:
        """How many entries have at least that ratio."""
        return int(np.count_nonzero(self._ratio_D >= np.float32(threshold)))

    def count_from_bucket(self, bucket: int) -> int:
        """How many ratios have top 16 bits of at least `bucket`."""
        return int(self._at_least[bucket]) if bucket <= _TOP else 0

    def threshold(self, count: int) -> np.float32:
        """The lowest ratio that at most `count` (below D) entries have or exceed.

        Entries of equal ratio are kept or left together; above 1 where not even the largest fit.
        """
        bucket = int(np.searchsorted(-self._at_least, -count))  # the last with all its entries
        room = count - self.count_from_bucket(bucket)
        whole, below = _lowest_of(bucket), _lowest_of(bucket - 1)
        if room == 0:
            return whole
        is_split = (self._ratio_D >= below) & (self._ratio_D < whole)
        falling = np.sort(self._ratio_D[np.flatnonzero(is_split)])[::-1]
        lowest, next_lower = falling[room - 1], falling[room]
        if lowest > next_lower:
            return np.float32(lowest)
        above = falling[falling > next_lower]
        return np.float32(above[-1]) if above.size else whole

    def select(self, threshold: np.float32, within_K: Index | None = None) -> Index:
        """Positions of the entries with at least that ratio.

        `within_K`: what a lower threshold has selected, which saves looking through all of them.
        """
        if within_K is None or within_K.size > self._ratio_D.size // 4:
            return np.flatnonzero(self._ratio_D >= threshold)
        return within_K[np.flatnonzero(self._ratio_D[within_K] >= threshold)]


def _lowest_of(bucket: int) -> np.float32:
    """The lowest ratio with those top 16 bits."""
    return np.float32(np.uint32(bucket << 16).view(np.float32))
