"""Selection by relative magnitude, for every threshold at once (Max N).

Called by `gradient_selectors`. Max N keeps, in each variable, the entries with |g| >= (1 - N/100)
max|g|. So the ratio of |g| to the variable's maximum decides, rounded to float32. One pass builds a
histogram over the top 16 bits of the ratio, which bounds each selection. Exact thresholds are then
searched among the few entries of one bucket. Ratios are not stored: they increase with |g|, so a
threshold becomes a minimum |g| per variable.

Source: DLion (Max N as recalled); the histogram is ours. Legend: L variables, C candidates.
"""

import numpy as np
from numpy.typing import NDArray

from dlion_core.codecs import SelectedEntries, kernels, require_finite
from dlion_core.policies.interface import Flat, Layout

_TOP = 0x3F80
"""The top 16 bits of 1.0, the largest ratio."""

_LANES = 4
"""Histograms that `kernels.measure` fills in turn."""


class Magnitudes:
    """|g| relative to the maximum of its variable, and the number of entries per threshold."""

    def __init__(self, layout: Layout) -> None:
        self._slices = layout.slices()
        self._end_L = np.array([where.stop for where in self._slices], np.int64)
        self._peak_bits_L = np.zeros(len(self._slices), np.uint32)
        self._gradient_D = np.zeros(layout.size, np.float32)
        self._at_least = np.zeros(_TOP + 1, np.int64)

    def measure(self, gradient_D: Flat) -> None:
        """Compute the maxima and the histogram of ratios; replaces earlier results. Do not change
        the gradient while this object is used. Raises ValueError if an entry is not finite."""
        if gradient_D.size != self._gradient_D.size:
            msg = f"gradient of {gradient_D.size} entries; the layout has {self._gradient_D.size}"
            raise ValueError(msg)
        histogram = np.zeros((_LANES, _TOP + 1), np.int32)
        bits_D = gradient_D.view(np.uint32)
        wrong = kernels.measure(bits_D, self._end_L, self._peak_bits_L, histogram)
        if wrong >= 0:
            require_finite(gradient_D[self._slices[wrong]], "gradient")
        self._gradient_D = gradient_D
        self._at_least = np.cumsum(histogram.sum(0, dtype=np.int64)[::-1])[::-1]

    def count(self, threshold: float) -> int:
        """Return how many entries have at least that ratio."""
        cut_L = self._cuts(np.float32(threshold))
        return int(kernels.count(self._gradient_D.view(np.uint32), self._end_L, cut_L))

    def count_at_most(self, threshold: float) -> int:
        """Return an upper bound in constant time: the whole bucket of the threshold counts."""
        return self.count_from_bucket(int(np.float32(threshold).view(np.uint32)) >> 16)

    def count_from_bucket(self, bucket: int) -> int:
        """Return how many ratios have top 16 bits of at least `bucket`."""
        return int(self._at_least[bucket]) if bucket <= _TOP else 0

    def largest(self, count: int) -> SelectedEntries:
        """Return at most `count` (below D) largest entries. Entries of equal ratio are kept or
        dropped together, so the result may be empty."""
        threshold, kept = self._threshold(count)
        peak = float(self._peak_bits_L.max().view(np.float32))  # kept, if anything is
        return SelectedEntries(self._gradient_D, self._end_L, self._cuts(threshold), kept, peak)

    def _threshold(self, count: int) -> tuple[np.float32, int]:
        """Return the lowest ratio that at most `count` entries reach, and their number. It is above
        1 if not even the largest entries fit, and never 0."""
        bucket = int(np.searchsorted(-self._at_least, -count))  # the last with all its entries
        surely = self.count_from_bucket(bucket)
        room = count - surely
        whole = _lowest_of(bucket)
        if room == 0:
            return whole, surely
        falling = np.sort(self._ratios_of(bucket - 1))[::-1]
        if falling.size > room:
            falling = falling[falling > falling[room]]
        return (np.float32(falling[-1]) if falling.size else whole), surely + falling.size

    def _ratios_of(self, bucket: int) -> NDArray[np.float32]:
        """All nonzero ratios of that bucket."""
        most = self.count_from_bucket(bucket) - self.count_from_bucket(bucket + 1)
        ratio_C = np.empty(most, np.float32)
        ratio_count = kernels.ratios_between(
            self._gradient_D.view(np.uint32),
            self._end_L,
            self._peak_bits_L,
            self._cuts(max(_lowest_of(bucket), np.float32(2**-149))),
            self._cuts(_lowest_of(bucket + 1)),
            ratio_C,
        )
        return ratio_C[:ratio_count]

    def _cuts(self, threshold: np.float32) -> NDArray[np.uint32]:
        cut_L = np.empty(self._peak_bits_L.size, np.uint32)
        kernels.cuts(threshold, self._peak_bits_L, cut_L)
        return cut_L


def _lowest_of(bucket: int) -> np.float32:
    """The lowest ratio with those top 16 bits."""
    return np.float32(np.uint32(bucket << 16).view(np.float32))
