"""Sparse entries of a gradient: selection of the largest, encoding, and error feedback.

Called by the policies that send some entries and keep the others. A `Residual` implements error
feedback: entries that were not sent, and codec rounding errors, are added to the next gradient. So
sent + residual = sum of gradients. `ResidualSelector` is the base of those that keep one residual
for all links, or one for each.

Source of error feedback: Seide et al., 1-bit SGD, Interspeech 2014; Stich et al., Sparsified SGD
with memory, NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_core.codecs import (
    AnyCoding,
    GradientPart,
    SelectedEntries,
    decode_gradient,
    encode_range,
    encode_selected,
    require_finite,
)
from dlion_core.policies.gradient.gradient_selectors import (
    GradientSelector,
    OutgoingPayloads,
    Payload,
)
from dlion_core.policies.interface import Flat, Layout, Value
from dlion_core.policies.state_values import vector_or_none, vectors_by_rank

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True)
class EncodedEntries:
    """Entries as payload and as the receiver decodes them. `payload` is None if there are no
    entries."""

    payload: Payload | None
    part: GradientPart


def outgoing(coded: Mapping[Rank, EncodedEntries], own: GradientPart) -> OutgoingPayloads:
    """Return the payloads of the links that have entries to carry."""
    payloads = {peer: one.payload for peer, one in coded.items() if one.payload is not None}
    return OutgoingPayloads(payloads, own)


def magnitude_bits(value_D: Flat) -> NDArray[np.uint32]:
    """Return |x| as integers in the same order. Subnormals stay distinct from zero."""
    return value_D.view(np.uint32) & _MAGNITUDE


def largest_indices(value_D: Flat, count: int) -> NDArray[np.intp]:
    """Return ascending indices of the `count` largest magnitudes, without zeros; ties: lower index.

    >>> largest_indices(np.array([1, -3, 0, 2, 3, 2], np.float32), 3)
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
    """Return the `count`-th largest value (1 is the largest).

    >>> nth_largest(np.array([0, 7, 0, 5, 0, 9], np.uint32), 2)
    np.uint32(7)
    """
    zeros = bits_D.size - int(np.count_nonzero(bits_D))
    if bits_D.size - zeros < count:
        return np.uint32(0)
    if 2 * zeros > bits_D.size:  # np.partition is slow with many equal entries
        bits_D = bits_D[bits_D != 0]
    place = bits_D.size - count
    return np.uint32(np.partition(bits_D, place)[place])


def chunks_of(layout: Layout, length: int) -> tuple[tuple[slice, int], ...]:
    """Cut each variable into chunks of that length and a shorter rest.

    Return the runs of chunks of one length, with that length.

    >>> from dlion_core.policies.interface import Layout
    >>> chunks_of(Layout(("a", "b"), (9, 3)), 4)
    ((slice(0, 8, None), 4), (slice(8, 9, None), 1), (slice(9, 12, None), 3))
    """
    runs = []
    for where in layout.slices():
        middle = where.stop - (where.stop - where.start) % length
        runs += [(slice(where.start, middle), length), (slice(middle, where.stop), 0)]
    return tuple(
        (run, chunk or run.stop - run.start) for run, chunk in runs if run.stop > run.start
    )


def largest_of_chunks(
    value_D: Flat, chunks: Iterable[tuple[slice, int]], count_of: Callable[[int], int]
) -> NDArray[np.bool_]:
    """Mark the largest magnitudes of each chunk, without zeros; ties: lower index.

    `count_of` returns how many to mark of a chunk of that length, at least one.

    >>> value_D = np.array([1, -3, 0, 2, 2, 0], np.float32)
    >>> largest_of_chunks(value_D, [(slice(0, 6), 3)], lambda length: 1).nonzero()[0]
    array([1, 3])
    """
    bits_D, is_kept_D = magnitude_bits(value_D), np.zeros(value_D.size, np.bool_)
    for where, length in chunks:
        rows = bits_D[where].reshape(-1, length)
        count = min(count_of(length), length)
        lowest = np.partition(rows, length - count, axis=1)[:, length - count, np.newaxis]
        is_above, is_tie = rows > lowest, rows == lowest
        room = count - is_above.sum(axis=1, keepdims=True)
        is_kept = is_above | (is_tie & (np.cumsum(is_tie, axis=1) <= room))
        is_kept_D[where] = (is_kept & (rows > 0)).ravel()
    return is_kept_D


def zero_except(value_D: Flat, where: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Flat:
    """Return a copy with all entries zero except those at `where`."""
    some_D = np.zeros_like(value_D)
    some_D[where] = value_D[where]
    return some_D


def encode_nonzero(some_D: Flat, codec: AnyCoding) -> EncodedEntries:
    """Encode the nonzero entries. Raises NotFiniteError if one is not finite."""
    bits_D = magnitude_bits(some_D)
    kept = int(np.count_nonzero(bits_D))
    if not kept:
        return EncodedEntries(None, GradientPart(np.zeros(some_D.size, np.float32)))
    end_L, lowest_L = np.array([some_D.size], np.int64), np.array([1], np.uint32)
    peak = float(bits_D.max().view(np.float32))
    if not math.isfinite(peak):
        require_finite(some_D, "entries to send")
    payload = encode_selected(SelectedEntries(some_D, end_L, lowest_L, kept, peak), codec)
    return EncodedEntries(payload, decode_gradient(payload, some_D.size))


@dataclass
class Residual:
    """Accumulated entries that have not been sent."""

    value_D: Flat

    @classmethod
    def zeros(cls, size: int) -> Residual:
        return cls(np.zeros(size, np.float32))

    def send(
        self, where: NDArray[np.intp] | NDArray[np.bool_] | slice, codec: AnyCoding
    ) -> EncodedEntries:
        """Encode those entries and subtract what the receiver decodes from the residual."""
        coded = encode_nonzero(zero_except(self.value_D, where), codec)
        coded.part.add_to(self.value_D, np.float32(-1))
        return coded

    def send_range(self, run: slice, codec: AnyCoding) -> EncodedEntries:
        """Encode a contiguous range, zeros included. No payload if all its entries are zero."""
        if not self.value_D[run].any():
            return EncodedEntries(None, GradientPart(np.zeros_like(self.value_D)))
        payload = encode_range(self.value_D, run.start, run.stop, codec)
        coded = EncodedEntries(payload, decode_gradient(payload, self.value_D.size))
        coded.part.add_to(self.value_D, np.float32(-1))
        return coded

    def take(self) -> Flat:
        """Return the whole residual and reset it to zero."""
        taken_D, self.value_D = self.value_D, np.zeros_like(self.value_D)
        return taken_D


class ResidualSelector(GradientSelector):
    """One residual for all links, which then carry the same, or one for each link (D floats).

    A worker with one residual applies what it sends, so replicas stay identical under full
    synchronous exchange; without peers it applies the whole residual. Otherwise links carry
    different entries, no choice is equal for all, and it applies its whole gradient at once. If a
    peer leaves, its link's residual is dropped. A delayed entry is weighted by the local batch of
    the iteration that sends it.
    """

    def __init__(self, size: int, key: str, *, per_link: bool) -> None:
        """`key`: name of the checkpoint's residual; followed by `_of_` and a rank: of a link's."""
        self._size, self._key, self._per_link = size, key, per_link
        self._shared = Residual.zeros(size)
        self._by_link: dict[Rank, Residual] = {}

    def send(self, residual: Residual, link: Rank, budget_bytes: int | None) -> EncodedEntries:
        """Take from the residual what the link carries now, if anything. A residual for all links
        is sent for link 0, with the smallest budget."""
        raise NotImplementedError

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Return a payload for each link that has entries to carry."""
        require_finite(gradient_D, "gradient")
        if self._per_link:
            coded = {}
            for peer in peers:
                residual = self._by_link.setdefault(peer, Residual.zeros(self._size))
                residual.value_D += gradient_D
                coded[peer] = self.send(residual, peer, budget_bytes.get(peer))
            return outgoing(coded, GradientPart(gradient_D))
        self._shared.value_D += gradient_D
        if not peers:
            return OutgoingPayloads({}, GradientPart(self._shared.take()))
        narrowest = min((budget_bytes[p] for p in peers if p in budget_bytes), default=None)
        sent = self.send(self._shared, Rank(0), narrowest)
        return outgoing(dict.fromkeys(peers, sent), sent.part)

    def forget(self, peer: Rank) -> None:
        self._by_link.pop(peer, None)

    def state(self) -> dict[str, Value]:
        if not self._per_link:
            return {self._key: self._shared.value_D.copy()}
        return {f"{self._key}_of_{peer}": one.value_D.copy() for peer, one in self._by_link.items()}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore what `state` returned; ignore other policies' checkpoints."""
        if (shared_D := vector_or_none(state, self._key)) is not None:
            self._shared = Residual(shared_D)
        kept = vectors_by_rank(state, f"{self._key}_of_")
        self._by_link = {peer: Residual(value_D) for peer, value_D in kept.items()}
