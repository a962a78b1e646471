"""Error feedback for Max N: keep what a link did not carry (`exchange.residual`).

Used by `gradient_policies` for policy `dlion`. Selection and budgets are those of
`gradient_selectors.MaxN`, applied to residual + gradient: one residual for all links (`shared`), or
one for each (`perLink`).

Source: this project; DLion as published keeps nothing. Error feedback: see `entries`.
"""

from collections.abc import Mapping

import numpy as np

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, GradientPart, decode_gradient
from dlion_core.policies.gradient.entries import EncodedEntries, Residual, ResidualSelector
from dlion_core.policies.gradient.gradient_selectors import MaxN
from dlion_core.policies.interface import Layout, Value


class ResidualMaxN(ResidualSelector):
    """Max N over residuals."""

    def __init__(
        self, layout: Layout, codec: AnyCoding, floor_percent: float, *, per_link: bool
    ) -> None:
        super().__init__(layout.size, "max_n_residual_D", per_link=per_link)
        self._max_n = MaxN(layout, codec, floor_percent)

    def send(self, residual: Residual, link: Rank, budget_bytes: int | None) -> EncodedEntries:
        budgets = {} if budget_bytes is None else {link: budget_bytes}
        payload = self._max_n.prepare(residual.value_D, [link], budgets).payloads.get(link)
        if payload is None:
            return EncodedEntries(None, GradientPart(np.zeros(self._size, np.float32)))
        coded = EncodedEntries(payload, decode_gradient(payload, self._size))
        coded.part.add_to(residual.value_D, np.float32(-1))
        return coded

    def forget(self, peer: Rank) -> None:
        super().forget(peer)
        if self._per_link:
            self._max_n.forget(peer)

    def state(self) -> dict[str, Value]:
        return {**super().state(), **self._max_n.state()}

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        if self._per_link or self._key in state:
            self._max_n.restore(state)
