"""Single entries of a gradient: the largest of them, their payload, and what is left of the rest.

Called by the policies that send some entries and keep the others for later (`adacomp`, `ako`,
`dgc`, `gaia`, `hierarchical`, `max_n_feedback`, `site_means`, `topk`, `twostep`).
A `Residual` is error feedback: what was not sent, or was rounded off by the codec, stays and is
added to the next gradient, so that sent + residual = sum of gradients.

Source of error feedback: Seide et al., 1-bit SGD, Interspeech 2014; Stich et al., Sparsified SGD
with memory, NeurIPS 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from dlion_worker.codecs import (
    GradientPart,
    Selected,
    decode_gradient,
    encode_range,
    encode_selected,
)

if TYPE_CHECKING:
    from dlion_worker.codecs import AnyCoding
    from dlion_worker.policies.interface import Flat
    from dlion_worker.policies.sending import Payload

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True)
class Coded:
    """Entries as they travel, and as a receiver will read them; no payload: there were none."""

    payload: Payload | None
    part: GradientPart


def magnitude_bits(value_D: Flat) -> NDArray[np.uint32]:
    """|x| as integers of the same order; unlike floats they know no subnormal as zero."""
    return value_D.view(np.uint32) & _MAGNITUDE


def largest(value_D: Flat, count: int) -> NDArray[np.intp]:
    """Positions, rising, of the `count` largest magnitudes; of equal ones the first; never zeros.

    >>> largest(np.array([1, -3, 0, 2, 3, 2], np.float32), 3)
    array([1, 3, 4])
    """
    bits_D = magnitude_bits(value_D)
    if count <= 0:
        return np.empty(0, np.intp)
    if count >= bits_D.size:
        return np.flatnonzero(bits_D)
    lowest = nth_largest(bits_D, count)
    if not lowest:
        return np.flatnonzero(bits_D)
    is_kept_D = bits_D > lowest
    room = count - int(np.count_nonzero(is_kept_D))
    is_kept_D[np.flatnonzero(bits_D == lowest)[:room]] = True
    return np.flatnonzero(is_kept_D)


def nth_largest(bits_D: NDArray[np.uint32], count: int) -> np.uint32:
    """The `count`-th of them from above (from 1 to their number).

    >>> nth_largest(np.array([0, 7, 0, 5, 0, 9], np.uint32), 2)
    np.uint32(7)
    """
    zeros = bits_D.size - int(np.count_nonzero(bits_D))
    if bits_D.size - zeros < count:
        return np.uint32(0)
    if 2 * zeros > bits_D.size:  # a selection takes long over many equal entries
        bits_D = bits_D[bits_D != 0]
    place = bits_D.size - count
    return np.uint32(np.partition(bits_D, place)[place])


def only(value_D: Flat, where: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Flat:
    """Those entries, and zeros elsewhere."""
    some_D = np.zeros_like(value_D)
    some_D[where] = value_D[where]
    return some_D


def code(some_D: Flat, codec: AnyCoding) -> Coded:
    """The entries that are not zero, coded. They are to be finite.

    The vector is not to change before the payload has been written, which is at once.
    """
    bits_D = magnitude_bits(some_D)
    kept = int(np.count_nonzero(bits_D))
    if not kept:
        return Coded(None, GradientPart(np.zeros(some_D.size, np.float32)))
    end_L, lowest_L = np.array([some_D.size], np.int64), np.array([1], np.uint32)
    peak = float(bits_D.max().view(np.float32))
    payload = encode_selected(Selected(some_D, end_L, lowest_L, kept, peak), codec)
    return Coded(payload, decode_gradient(payload, some_D.size))


class Residual:
    """What has been taken in and not yet sent."""

    def __init__(self, size: int) -> None:
        self.value_D: Flat = np.zeros(size, np.float32)

    def send(self, where: NDArray[np.intp] | NDArray[np.bool_] | slice, codec: AnyCoding) -> Coded:
        """Codes those entries; what a receiver will read leaves the residual."""
        coded = code(only(self.value_D, where), codec)
        coded.part.add_to(self.value_D, np.float32(-1))
        return coded

    def send_run(self, run: slice, codec: AnyCoding) -> Coded:
        """The same for one run of entries, zeros included; nothing where all are zeros."""
        if not self.value_D[run].any():
            return Coded(None, GradientPart(np.zeros_like(self.value_D)))
        payload = encode_range(self.value_D, run.start, run.stop, codec)
        coded = Coded(payload, decode_gradient(payload, self.value_D.size))
        coded.part.add_to(self.value_D, np.float32(-1))
        return coded

    def take(self) -> Flat:
        """All of it; nothing stays."""
        taken_D, self.value_D = self.value_D, np.zeros_like(self.value_D)
        return taken_D
