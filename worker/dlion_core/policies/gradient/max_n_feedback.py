"""Error feedback for Max N: keep what a link did not carry (`exchange.residual`).

Used by `gradient_policies` for policy `dlion`. Selection and budgets are those of
`gradient_selectors.MaxN`, applied to residual + gradient. A delayed entry is weighted by the local
batch of the iteration that sends it.

- `shared`: one residual. All links carry the same entries, as many as the narrowest takes. This
  worker applies what it sends, so replicas stay identical under full synchronous exchange. A worker
  without peers applies its whole residual.
- `perLink`: a residual (D floats) and a selection per link, as much as that link carries. This
  worker applies its whole gradient at once, as without feedback. A peer lacks exactly what its
  link's residual contains. If it leaves, that residual is dropped.

Source: ours; DLion as published keeps nothing. Error feedback: see `entries`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, GradientPart, decode_gradient, require_finite
from dlion_core.policies.gradient.entries import Residual
from dlion_core.policies.gradient.gradient_selectors import (
    SAVED_BYTES,
    GradientSelector,
    MaxN,
    OutgoingPayloads,
)
from dlion_core.policies.state_values import by_rank, vector_from_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_core.policies.gradient.gradient_selectors import Payload
    from dlion_core.policies.interface import Flat, Layout, Value

_SHARED: Final = "max_n_residual_D"
_RESIDUAL_OF: Final = "max_n_residual_D_of_"
_ALL: Final = Rank(0)
"""Represents all links where they carry the same."""


class _ResidualLink:
    """Max N over a residual, for one link or for all that carry the same."""

    def __init__(
        self, rank: Rank, name: str, layout: Layout, codec: AnyCoding, floor_percent: float
    ) -> None:
        self._rank = rank
        self._name = name
        self._max_n = MaxN(layout, codec, floor_percent)
        self.residual = Residual.zeros(layout.size)

    def prepare(self, gradient_D: Flat, budget_bytes: int | None) -> tuple[Payload | None, Flat]:
        """Return a payload, if the link takes one now, and what a receiver decodes."""
        self.residual.value_D += gradient_D
        budgets = {} if budget_bytes is None else {self._rank: budget_bytes}
        outgoing = self._max_n.prepare(self.residual.value_D, [self._rank], budgets)
        payload = outgoing.payloads.get(self._rank)
        if payload is None:
            return None, np.zeros_like(gradient_D)
        part = decode_gradient(payload, gradient_D.size)
        part.add_to(self.residual.value_D, np.float32(-1))
        return payload, part.weighted(np.float32(1))

    def state(self) -> dict[str, Value]:
        residual_D = self.residual.value_D.copy()
        return {self._name: residual_D, **self._max_n.state()}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore what `state` returned; ignore a checkpoint without it."""
        if self._name not in state:
            return
        self.residual.value_D = vector_from_state(state[self._name])
        saved = f"{SAVED_BYTES}{self._rank}"
        self._max_n.restore({saved: state[saved]} if saved in state else {})


class SharedResidualMaxN(GradientSelector):
    """One residual and one selection for all links."""

    combines = True

    def __init__(self, layout: Layout, codec: AnyCoding, floor_percent: float) -> None:
        self._link = _ResidualLink(_ALL, _SHARED, layout, codec, floor_percent)

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Return the same payload for all peers, as large as the narrowest link takes."""
        require_finite(gradient_D, "gradient")
        if not peers:
            self._link.residual.value_D += gradient_D
            return OutgoingPayloads({}, GradientPart(self._link.residual.take()))
        narrowest = min((budget_bytes[p] for p in peers if p in budget_bytes), default=None)
        payload, sent_D = self._link.prepare(gradient_D, narrowest)
        payloads = {} if payload is None else dict.fromkeys(peers, payload)
        return OutgoingPayloads(payloads, GradientPart(sent_D))

    def state(self) -> dict[str, Value]:
        return self._link.state()

    def restore(self, state: Mapping[str, Value]) -> None:
        self._link.restore(state)


class PerLinkResidualMaxN(GradientSelector):
    """A residual and a selection per link."""

    combines = True

    def __init__(self, layout: Layout, codec: AnyCoding, floor_percent: float) -> None:
        self._layout, self._codec, self._floor_percent = layout, codec, floor_percent
        self._links: dict[Rank, _ResidualLink] = {}

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Return a payload for each link that takes one now."""
        require_finite(gradient_D, "gradient")
        payloads: dict[Rank, Payload] = {}
        for peer in peers:
            payload, _ = self._link(peer).prepare(gradient_D, budget_bytes.get(peer))
            if payload is not None:
                payloads[peer] = payload
        return OutgoingPayloads(payloads, GradientPart(gradient_D))

    def _link(self, peer: Rank) -> _ResidualLink:
        if peer not in self._links:
            name = f"{_RESIDUAL_OF}{peer}"
            self._links[peer] = _ResidualLink(
                peer, name, self._layout, self._codec, self._floor_percent
            )
        return self._links[peer]

    def forget(self, peer: Rank) -> None:
        self._links.pop(peer, None)

    def state(self) -> dict[str, Value]:
        return {
            name: value for link in self._links.values() for name, value in link.state().items()
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        self._links = {}
        for peer in by_rank(state, _RESIDUAL_OF):
            self._link(peer).restore(state)
