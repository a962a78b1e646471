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

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, GradientPart, decode_gradient, require_finite
from dlion_core.policies.gradient.entries import EncodedEntries, Residual, outgoing
from dlion_core.policies.gradient.gradient_selectors import GradientSelector, MaxN, OutgoingPayloads
from dlion_core.policies.interface import Flat, Layout, Value
from dlion_core.policies.state_values import vector_from_state, vectors_by_rank

_SHARED: Final = "max_n_residual_D"
_RESIDUAL_OF: Final = "max_n_residual_D_of_"
_ALL: Final = Rank(0)
"""Represents all links where they carry the same."""


class _ResidualMaxN(GradientSelector):
    """Max N over a residual, for one link or for all that carry the same."""

    def __init__(self, layout: Layout, codec: AnyCoding, floor_percent: float) -> None:
        self._size = layout.size
        self._max_n = MaxN(layout, codec, floor_percent)

    def _send(
        self, residual: Residual, gradient_D: Flat, link: Rank, budget_bytes: int | None
    ) -> EncodedEntries:
        """Return what the link takes now of the residual with the gradient, if anything."""
        residual.value_D += gradient_D
        budgets = {} if budget_bytes is None else {link: budget_bytes}
        payload = self._max_n.prepare(residual.value_D, [link], budgets).payloads.get(link)
        if payload is None:
            return EncodedEntries(None, GradientPart(np.zeros_like(gradient_D)))
        coded = EncodedEntries(payload, decode_gradient(payload, self._size))
        coded.part.add_to(residual.value_D, np.float32(-1))
        return coded


class SharedResidualMaxN(_ResidualMaxN):
    """One residual and one selection for all links."""

    def __init__(self, layout: Layout, codec: AnyCoding, floor_percent: float) -> None:
        super().__init__(layout, codec, floor_percent)
        self._residual = Residual.zeros(layout.size)

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Return the same payload for all peers, as large as the narrowest link takes."""
        require_finite(gradient_D, "gradient")
        if not peers:
            self._residual.value_D += gradient_D
            return OutgoingPayloads({}, GradientPart(self._residual.take()))
        narrowest = min((budget_bytes[p] for p in peers if p in budget_bytes), default=None)
        coded = self._send(self._residual, gradient_D, _ALL, narrowest)
        own = GradientPart(coded.part.weighted(np.float32(1)))
        return outgoing(dict.fromkeys(peers, coded), own)

    def state(self) -> dict[str, Value]:
        return {_SHARED: self._residual.value_D.copy(), **self._max_n.state()}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore what `state` returned; ignore a checkpoint without it."""
        if _SHARED in state:
            self._residual = Residual(vector_from_state(state[_SHARED]))
            self._max_n.restore(state)


class PerLinkResidualMaxN(_ResidualMaxN):
    """A residual and a selection per link."""

    def __init__(self, layout: Layout, codec: AnyCoding, floor_percent: float) -> None:
        super().__init__(layout, codec, floor_percent)
        self._residuals: dict[Rank, Residual] = {}

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Return a payload for each link that takes one now."""
        require_finite(gradient_D, "gradient")
        coded = {}
        for peer in peers:
            residual = self._residuals.setdefault(peer, Residual.zeros(self._size))
            coded[peer] = self._send(residual, gradient_D, peer, budget_bytes.get(peer))
        return outgoing(coded, GradientPart(gradient_D))

    def forget(self, peer: Rank) -> None:
        self._residuals.pop(peer, None)
        self._max_n.forget(peer)

    def state(self) -> dict[str, Value]:
        residuals = {f"{_RESIDUAL_OF}{peer}": one for peer, one in self._residuals.items()}
        kept = {name: residual.value_D.copy() for name, residual in residuals.items()}
        return {**kept, **self._max_n.state()}

    def restore(self, state: Mapping[str, Value]) -> None:
        kept = vectors_by_rank(state, _RESIDUAL_OF)
        self._residuals = {peer: Residual(value_D) for peer, value_D in kept.items()}
        self._max_n.restore(state)
