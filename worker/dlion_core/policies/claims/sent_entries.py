"""The entries of one contribution, decoded once, for the figures that `deviations` compares.

Where a worker has sent few entries, work is for these and not for the whole vector. Each result has
the bits that the whole vector gives, with zeros for what was not sent.

Legend: D entries of the flat vector, K sent, B blocks, T wanted entries, R rows of entries, S
values of a projection.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlion_core.codecs import GradientPart
from dlion_core.codecs.norms import add_projection, add_sparse_projection, look_up

Values = NDArray[np.float32]

MIN_RATIO = 4
"""Ratio of all entries to the sent ones. Below it the whole vector takes less time and memory."""


@dataclass(frozen=True)
class SentEntries:
    """Values and their ascending positions; `index_K` None: all of D."""

    value_K: Values
    index_K: NDArray[np.intp] | None
    size: int

    @classmethod
    def of(cls, part: GradientPart) -> "SentEntries":
        if part.where is None:
            return cls(part.value_K, None, part.size)
        if MIN_RATIO * part.coded_K.size > part.size:
            return cls(part.weighted(np.float32(1)), None, part.size)
        return cls(part.value_K, part.index_K, part.size)

    def project(self, sign_R: Values, sketch_S: Values) -> float:
        """Add the projection to `sketch_S`; return the sum of squares."""
        if self.index_K is None:
            return float(add_projection(self.value_K, sign_R, sketch_S))
        return float(add_sparse_projection(self.index_K, self.value_K, sign_R, sketch_S))

    def at(self, wanted_T: NDArray[np.intp]) -> Values:
        """Return the values at ascending positions, shape [T]."""
        if self.index_K is None:
            return self.value_K[wanted_T]
        value_T = np.zeros(wanted_T.size, np.float32)
        look_up(self.index_K, self.value_K, wanted_T, value_T)
        return value_T

    def in_blocks(self, first: int, every: int, length: int) -> Values:
        """Return the sent values of each `every`-th whole block of that length, from `first` on."""
        whole = self.size // length
        if self.index_K is None:
            return self.value_K[: whole * length].reshape(whole, length)[first::every]
        begin_B = np.arange(first, whole, every) * length
        low_B, high_B = np.searchsorted(self.index_K, (begin_B, begin_B + length))
        blocks = zip(low_B, high_B, strict=True)
        return np.concatenate([self.value_K[low:high] for low, high in blocks])
