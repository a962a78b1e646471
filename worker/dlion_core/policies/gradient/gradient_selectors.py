"""Select the part of a local gradient to send on each link.

Called by `gradient_exchange` once per local step. Three policies: nothing (`NoExchange`),
everything (`WholeGradient`), and DLion's Max N under each link's byte budget (`MaxN`). They return
payloads; the machine sends them.

Budgets count payload bytes with the codec's header, without the exchange's header.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dlion_api.names import Rank
from dlion_core.codecs import (
    AnyCoding,
    GradientPart,
    ValueCodec,
    coded_bytes,
    coding_of,
    decode_gradient,
    encode_selected,
    encode_whole,
    max_kept_entries,
)
from dlion_core.policies.gradient.magnitudes import Magnitudes
from dlion_core.policies.interface import Flat, Layout, Value
from dlion_core.policies.state_values import ints_by_rank

Payload = bytes | memoryview

SAVED_BYTES = "saved_bytes_"
"""Prefix of checkpoint keys, followed by a rank: the accumulated budget of that link."""


@dataclass(frozen=True)
class OutgoingPayloads:
    """Payloads of one local step (none for a missing peer), and the part that counts locally."""

    payloads: Mapping[Rank, Payload]
    own: GradientPart


class GradientSelector(Protocol):
    """Interface of an exchange policy to the gradient machine. By default it keeps nothing."""

    combines: bool = True
    """Whether peers' gradients are applied here."""

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Return payloads for those peers. A peer without a budget is unbounded. Raises ValueError
        if an entry is not finite."""

    def forget(self, peer: Rank) -> None:  # noqa: ARG002 - optional
        """A peer has left: drop what is kept for its link."""
        return  # mypy regards an empty body of a protocol as abstract

    def state(self) -> dict[str, Value]:
        """Return what a restart needs."""
        return {}

    def restore(self, state: Mapping[str, Value]) -> None:  # noqa: ARG002 - optional
        """Restore what `state` returned; the mapping also holds the machine's state."""
        return


class NoExchange(GradientSelector):
    """Policy `none`: send nothing, apply nothing; each worker trains on its own data."""

    combines = False

    def prepare(
        self,
        gradient_D: Flat,
        peers: Sequence[Rank],  # noqa: ARG002 - the Protocol's
        budget_bytes: Mapping[Rank, int],  # noqa: ARG002
    ) -> OutgoingPayloads:
        """Return no payload."""
        return OutgoingPayloads({}, GradientPart(gradient_D))


class WholeGradient(GradientSelector):
    """Policy `full`: every entry to every peer, regardless of budgets.

    This worker applies the gradient as its peers decode it, so a lossy codec does not make replicas
    diverge.
    """

    def __init__(self, codec: AnyCoding) -> None:
        self._codec = coding_of(codec)

    def prepare(
        self,
        gradient_D: Flat,
        peers: Sequence[Rank],
        budget_bytes: Mapping[Rank, int],  # noqa: ARG002 - the Protocol's
    ) -> OutgoingPayloads:
        """Return the same payload for all peers."""
        if not peers:
            return OutgoingPayloads({}, GradientPart(gradient_D))
        payload = encode_whole(gradient_D, self._codec)
        lossless = self._codec.values is ValueCodec.FLOAT32
        own = GradientPart(gradient_D) if lossless else decode_gradient(payload, gradient_D.size)
        return OutgoingPayloads(dict.fromkeys(peers, payload), own)


@dataclass
class MaxN(GradientSelector):
    """Policy `dlion`: on each link the largest N whose entries fit the link's budget.

    N is at least `floor_percent`. If that does not fit, nothing is sent and the budget accumulates
    until it fits, up to the bytes of a whole gradient. Entries that are not sent are lost to that
    link. This worker applies its whole local gradient.

    Source: DLion, Max N with data quality and transmission speed assurance (as recalled); the
    accumulation of budgets is ours.
    """

    layout: Layout
    codec: AnyCoding
    floor_percent: float = 0.85

    def __post_init__(self) -> None:
        self._magnitudes = Magnitudes(self.layout)
        self._saved_bytes: dict[Rank, int] = {}
        self._whole_bytes = coded_bytes(self.layout.size, self.layout.size, self.codec)

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Return a payload per link. Links that fit the same number of entries share one."""
        fits = {peer: self._fits(peer, budget_bytes.get(peer)) for peer in peers}
        by_count = self._payloads(gradient_D, set(fits.values()))
        payloads: dict[Rank, Payload] = {}
        for peer, count in fits.items():
            payload = by_count.get(count)
            if payload is not None:
                payloads[peer] = payload
            self._save(peer, budget_bytes.get(peer), waits=payload is None)
        return OutgoingPayloads(payloads, GradientPart(gradient_D))

    def _fits(self, peer: Rank, budget_bytes: int | None) -> int:
        if budget_bytes is None:
            return self.layout.size
        room = budget_bytes + self._saved_bytes.get(peer, 0)
        return max_kept_entries(room, self.layout.size, self.codec)

    def _save(self, peer: Rank, budget_bytes: int | None, *, waits: bool) -> None:
        if waits and budget_bytes is not None:
            saved = self._saved_bytes.get(peer, 0) + budget_bytes
            self._saved_bytes[peer] = min(saved, self._whole_bytes)
        else:
            self._saved_bytes.pop(peer, None)

    def _payloads(self, gradient_D: Flat, counts: set[int]) -> dict[int, Payload]:
        """Payload by number of entries that fit; none where the floor does not fit."""
        size = self.layout.size
        payloads: dict[int, Payload] = {}
        if size in counts:
            payloads[size] = encode_whole(gradient_D, self.codec)
        fewer = sorted(counts - {size, 0}, reverse=True)
        if not fewer:
            return payloads
        self._magnitudes.measure(gradient_D, most=fewer[0])
        lowest = 1 - self.floor_percent / 100
        floor = self._magnitudes.count_at_most(lowest)
        if fewer[-1] < floor:
            floor = self._magnitudes.count(lowest)
        for count in fewer:
            if count < floor:
                break
            selected = self._magnitudes.largest(count)
            if selected.kept:
                payloads[count] = encode_selected(selected, self.codec)
        return payloads

    def forget(self, peer: Rank) -> None:
        self._saved_bytes.pop(peer, None)

    def state(self) -> dict[str, Value]:
        return {f"{SAVED_BYTES}{peer}": saved for peer, saved in self._saved_bytes.items()}

    def restore(self, state: Mapping[str, Value]) -> None:
        self._saved_bytes = ints_by_rank(state, SAVED_BYTES)
