"""Policies `none`, `full`, `dlion` and `dlion-published`, for the catalogue.

`gradient_selectors` defines what each sends; `ResidualMaxN` also keeps what was not sent.
"""

from collections.abc import Mapping

import numpy as np

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, GradientPart, decode_gradient
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.factory import gradient_machine
from dlion_core.policies.gradient.entries import EncodedEntries, Residual, ResidualSelector
from dlion_core.policies.gradient.gradient_selectors import MaxN, NoExchange, WholeGradient
from dlion_core.policies.gradient.selective_propagation import SelectiveMaxN
from dlion_core.policies.interface import Layout, PolicyMachine, Value
from dlion_core.policies.parameters import NoParameters


def none(context: PolicyContext, _: NoParameters) -> PolicyMachine:
    """Exchange nothing: no waiting, no weights taken over."""
    return gradient_machine(context, NoExchange())


def full(context: PolicyContext, _: NoParameters) -> PolicyMachine:
    """Send every gradient whole to every peer."""
    return gradient_machine(context, WholeGradient(context.coding))


def dlion(context: PolicyContext, _: NoParameters) -> PolicyMachine:
    """Max N under each link's budget; whole gradients if prioritisation is off. The published form
    keeps no residual; the manifest's rules enforce this."""
    exchange = context.spec.exchange
    if exchange.propagation == "selective":
        selective = SelectiveMaxN(
            context.layout,
            context.coding,
            exchange.floor_percent if exchange.prioritization else None,
            own=context.rank,
            max_peers=exchange.propagation_peers,
            max_wait_steps=exchange.propagation_within,
            keeps_rest=exchange.residual == "perLink",
        )
        return gradient_machine(context, selective)
    if not exchange.prioritization:
        return gradient_machine(context, WholeGradient(context.coding))
    arguments = (context.layout, context.coding, exchange.floor_percent)
    if exchange.residual == "none":
        return gradient_machine(context, MaxN(*arguments))
    per_link = exchange.residual == "perLink"
    return gradient_machine(context, ResidualMaxN(*arguments, per_link=per_link))


class ResidualMaxN(ResidualSelector):
    """Error feedback for Max N: keep what a link did not carry (`exchange.residual`).

    Selection and budgets are those of `MaxN`, applied to residual + gradient: one residual for all
    links (`shared`), or one for each (`perLink`).

    Source: this project; DLion as published keeps nothing. Error feedback: see `entries`.
    """

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
