"""Policies `none`, `full`, `dlion` and `dlion-published`, for the catalogue.

`gradient_selectors` defines what each sends.
"""

from dlion_core.policies.context import PolicyContext
from dlion_core.policies.factory import gradient_machine
from dlion_core.policies.gradient.gradient_selectors import MaxN, NoExchange, WholeGradient
from dlion_core.policies.gradient.max_n_feedback import ResidualMaxN
from dlion_core.policies.gradient.selective_propagation import SelectiveMaxN
from dlion_core.policies.interface import PolicyMachine
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
