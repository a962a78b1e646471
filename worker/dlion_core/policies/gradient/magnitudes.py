"""Selection by relative magnitude, for every threshold at once (Max N).

Called by `gradient_selectors`. Max N keeps, in each variable, the entries with |g| >= (1 - N/100)
max|g|. So the ratio of |g| to the variable's maximum decides, rounded to float32. One pass builds a
histogram over the top 16 bits of the ratio, which bounds each selection. Exact thresholds are then
searched among the few entries of one bucket. Ratios are not stored: they increase with |g|, so a
threshold becomes a minimum |g| per variable.

Where only a small part of the entries may be kept, most need not be counted. A sample of one in 64
gives a lower bound of the smallest threshold. One pass then writes the entries above it, the
*candidates*, with their ratios. All selections are nested, so each is picked from the candidates.
If the sample misled, the histogram of all entries is built. The results are the same.

Source: DLion (Max N as recalled); the histogram is ours. Legend: L variables, C candidates.
"""

import numpy as np
from numpy.typing import NDArray

from dlion_core.codecs import SelectedEntries, kernels, require_finite, selection_kernels
from dlion_core.codecs.selected import PickedEntries
from dlion_core.policies.interface import Flat, Layout

_TOP = 0x3F80
"""The top 16 bits of 1.0, the largest ratio."""

_MAX_CANDIDATES_FRACTION = 0.25
"""Maximum fraction of D entries that are candidates. With more, the histogram of all is no
slower."""

_MARGIN, _SPACE = 1.25, 2.5
"""Candidates aimed at, and those that there is space for, relative to the entries to keep. The
sample errs by a few percent, and a bucket of ratios may hold many."""

_SPARE = 4096
"""Candidates aimed at in addition: of few entries a sample knows little."""

_MAX_FIRST_BUCKET = 0x3F00
"""Candidates begin below half of the largest magnitude: greater thresholds are asked for."""

_LANES = 4
"""Histograms that `kernels.measure` fills in turn."""


class Candidates:
    """The entries among which all selections are, in order. The arrays are reused."""

    def __init__(self) -> None:
        self.count = 0
        self.place_C = np.empty(0, np.uint32)
        self.value_C = np.empty(0, np.float32)
        self.ratio_C = np.empty(0, np.float32)

    def reserve(self, count: int) -> None:
        """Provide space for so many."""
        if self.place_C.size >= count:
            return
        self.place_C = np.empty(count, np.uint32)
        self.value_C = np.empty(count, np.float32)
        self.ratio_C = np.empty(count, np.float32)


class Magnitudes:
    """|g| relative to the maximum of its variable, and the number of entries per threshold."""

    def __init__(self, layout: Layout) -> None:
        self._slices = layout.slices()
        self._end_L = np.array([where.stop for where in self._slices], np.int64)
        self._peak_bits_L = np.zeros(len(self._slices), np.uint32)
        self._gradient_D = np.zeros(layout.size, np.float32)
        self._at_least = np.zeros(_TOP + 1, np.int64)
        self._candidates = Candidates()

    def measure(self, gradient_D: Flat, most: int | None = None) -> None:
        """Compute the maxima and the histogram of ratios; replaces earlier results. Do not change
        the gradient while this object is used. Raises ValueError if an entry is not finite.

        `most`: the largest count of later calls of `largest`; None: any. With it, only ratios from
        1/2 on are counted for certain.
        """
        if gradient_D.size != self._gradient_D.size:
            msg = f"gradient of {gradient_D.size} entries; the layout has {self._gradient_D.size}"
            raise ValueError(msg)
        bits_D = gradient_D.view(np.uint32)
        self._candidates.count = 0
        if most is not None and 0 < most < _MAX_CANDIDATES_FRACTION * gradient_D.size:
            self._gradient_D = gradient_D
            if self._find_candidates(most):
                return
        histogram = np.zeros((_LANES, _TOP + 1), np.int32)
        wrong = kernels.measure(bits_D, self._end_L, self._peak_bits_L, histogram)
        if wrong >= 0:
            require_finite(gradient_D[self._slices[wrong]], "gradient")
        self._gradient_D = gradient_D
        self._at_least = np.cumsum(histogram.sum(0, dtype=np.int64)[::-1])[::-1]

    def _find_candidates(self, most: int) -> bool:
        """Write the candidates for the `most` largest entries; return whether these are among
        them."""
        bits_D = self._gradient_D.view(np.uint32)
        histogram = np.zeros(_TOP + 1, np.int32)
        wrong = selection_kernels.sample(bits_D, self._end_L, self._peak_bits_L, histogram)
        if wrong >= 0:
            require_finite(self._gradient_D[self._slices[wrong]], "gradient")
        at_least = np.cumsum(histogram[::-1], dtype=np.int64)[::-1]
        aim = (_MARGIN * most + _SPARE) / selection_kernels.SAMPLED
        first = int(np.searchsorted(-at_least, -aim, side="right")) - 1  # the last with so many
        if not 0 < first <= _MAX_FIRST_BUCKET:
            return False
        found = self._candidates
        found.reserve(min(self._gradient_D.size, int(_SPACE * most) + 4 * _SPARE))
        histogram[:] = 0
        found.count = selection_kernels.candidates(
            self._gradient_D, bits_D, self._end_L, self._peak_bits_L,
            self._cuts(_lowest_of(first)), found.place_C, found.value_C, found.ratio_C, histogram,
        )  # fmt: skip
        if found.count <= most:  # not all that are wanted, or more than there is space for
            found.count = 0
            return False
        self._at_least = np.cumsum(histogram[::-1], dtype=np.int64)[::-1]
        return True

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
        found = self._candidates
        if found.count:
            place_K, value_K = np.empty(kept + 1, np.uint32), np.empty(kept + 1, np.float32)
            selection_kernels.pick(
                found.place_C[: found.count], found.value_C, found.ratio_C, threshold, place_K,
                value_K,
            )  # fmt: skip
            return PickedEntries(
                self._gradient_D, self._end_L, self._peak_bits_L, kept, peak, place_K[:kept],
                value_K[:kept],
            )  # fmt: skip
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
        found = self._candidates
        if found.count:
            selection_kernels.of_bucket(found.ratio_C[: found.count], bucket, ratio_C)
            return ratio_C
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
