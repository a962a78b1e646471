"""What of a local gradient goes on which link.

Called by `machine` once per local step. Three policies: nothing (`Alone`), everything
(`WholeGradient`), and DLion's Max N under each link's byte budget (`MaxN`). They give payloads;
who gets them when, and what receivers do with them, is the machine's.

Budgets count payload bytes, headers of the codec included, those of the exchange not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dlion_api.names import Rank
from dlion_worker.codecs import (
    AnyCoding,
    GradientPart,
    ValueCodec,
    coded_bytes,
    coding_of,
    decode_gradient,
    encode_selected,
    encode_whole,
    kept_that_fit,
)
from dlion_worker.policies.interface import Flat, Layout, Value
from dlion_worker.policies.selection import Magnitudes

Payload = bytes | memoryview


@dataclass(frozen=True)
class Outgoing:
    """One local step's payloads (a peer not named gets none), and what counts here of it."""

    payloads: Mapping[Rank, Payload]
    own: GradientPart


class Sending(Protocol):
    """An exchange policy, as the machine sees it."""

    combines: bool
    """Whether gradients of others count here."""

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> Outgoing:
        """Payloads for those peers. A peer without a budget is unbounded."""
        ...

    def forget(self, peer: Rank) -> None:
        """A peer has left: what was kept for its link is void."""
        ...

    def state(self) -> dict[str, Value]:
        """What a restart must bring back."""
        ...

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave, among other things of the machine's."""
        ...


class _Stateless:
    def forget(self, peer: Rank) -> None:
        """Nothing is kept for a link."""

    def state(self) -> dict[str, Value]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Nothing."""


class Alone(_Stateless):
    """Policy `none`: nothing is sent, nothing counts; each worker trains on its own data."""

    combines = False

    def prepare(
        self,
        gradient_D: Flat,
        peers: Sequence[Rank],  # noqa: ARG002 - the Protocol's
        budget_bytes: Mapping[Rank, int],  # noqa: ARG002
    ) -> Outgoing:
        """No payload at all."""
        return Outgoing({}, GradientPart(gradient_D))


class WholeGradient(_Stateless):
    """Policy `full`: every entry to every peer, whatever the budgets.

    What counts here is what the peers decode, so that a lossy codec does not part the replicas.
    """

    combines = True

    def __init__(self, codec: AnyCoding) -> None:
        self._codec = coding_of(codec)

    def prepare(
        self,
        gradient_D: Flat,
        peers: Sequence[Rank],
        budget_bytes: Mapping[Rank, int],  # noqa: ARG002 - the Protocol's
    ) -> Outgoing:
        """The same payload for all."""
        if not peers:
            return Outgoing({}, GradientPart(gradient_D))
        payload = encode_whole(gradient_D, self._codec)
        lossless = self._codec.values is ValueCodec.FLOAT32
        own = GradientPart(gradient_D) if lossless else decode_gradient(payload, gradient_D.size)
        return Outgoing(dict.fromkeys(peers, payload), own)


@dataclass
class MaxN:
    """Policy `dlion`: on each link the largest N whose entries fit the link's budget.

    N is never below `floor_percent`: where even that does not fit, nothing is sent and the budget
    is saved up until it does (never more than a whole gradient's bytes). Memoryless: what is not
    sent is lost to that link. The whole local gradient counts here.

    Source: DLion, Max N with data quality and transmission speed assurance (as recalled); waiting
    by saving up is ours.
    """

    layout: Layout
    codec: AnyCoding
    floor_percent: float = 0.85
    combines: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._magnitudes = Magnitudes(self.layout)
        self._saved_bytes: dict[Rank, int] = {}
        self._whole_bytes = coded_bytes(self.layout.size, self.layout.size, self.codec)

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> Outgoing:
        """A payload for each link, shared by links on which the same number of entries fits."""
        fits = {peer: self._fits(peer, budget_bytes.get(peer)) for peer in peers}
        by_count = self._payloads(gradient_D, set(fits.values()))
        payloads: dict[Rank, Payload] = {}
        for peer, count in fits.items():
            payload = by_count.get(count)
            if payload is not None:
                payloads[peer] = payload
            self._save(peer, budget_bytes.get(peer), waits=payload is None)
        return Outgoing(payloads, GradientPart(gradient_D))

    def _fits(self, peer: Rank, budget_bytes: int | None) -> int:
        if budget_bytes is None:
            return self.layout.size
        room = budget_bytes + self._saved_bytes.get(peer, 0)
        return kept_that_fit(room, self.layout.size, self.codec)

    def _save(self, peer: Rank, budget_bytes: int | None, *, waits: bool) -> None:
        if waits and budget_bytes is not None:
            saved = self._saved_bytes.get(peer, 0) + budget_bytes
            self._saved_bytes[peer] = min(saved, self._whole_bytes)
        else:
            self._saved_bytes.pop(peer, None)

    def _payloads(self, gradient_D: Flat, counts: set[int]) -> dict[int, Payload]:
        """Payload by the number of entries that fit; none where the floor does not fit."""
        size = self.layout.size
        payloads: dict[int, Payload] = {}
        if size in counts:
            payloads[size] = encode_whole(gradient_D, self.codec)
        fewer = sorted(counts - {size, 0}, reverse=True)
        if not fewer:
            return payloads
        self._magnitudes.measure(gradient_D)
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
        """What was saved up for its link is void."""
        self._saved_bytes.pop(peer, None)

    def state(self) -> dict[str, Value]:
        """Bytes saved up, by peer."""
        return {f"saved_bytes_{peer}": saved for peer, saved in self._saved_bytes.items()}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        prefix = "saved_bytes_"
        self._saved_bytes = {
            Rank(int(name.removeprefix(prefix))): int(saved)
            for name, saved in state.items()
            if name.startswith(prefix)
        }
