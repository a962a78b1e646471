"""DLion's own policies and the plain ones: `none`, `full`, `dlion`, `dlion-published`.

Called by the catalogue. What each sends is `sending`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_worker.policies.building import Context, gradient_machine
from dlion_worker.policies.max_n_feedback import PerLinkResidualMaxN, SharedResidualMaxN
from dlion_worker.policies.selective import SelectiveMaxN
from dlion_worker.policies.sending import Alone, MaxN, WholeGradient

if TYPE_CHECKING:
    from dlion_worker.policies.interface import Machine
    from dlion_worker.policies.parameters import NoParameters
    from dlion_worker.policies.sending import Sending


def none(context: Context, _: NoParameters) -> Machine:
    """Nothing is exchanged: waits for nobody, takes over no weights."""
    return gradient_machine(context, Alone())


def full(context: Context, _: NoParameters) -> Machine:
    """Every gradient, whole, to every peer."""
    return gradient_machine(context, WholeGradient(context.coding))


def dlion(context: Context, _: NoParameters) -> Machine:
    """Max N under each link's budget; whole gradients where prioritisation is switched off.

    The published form keeps no residual: the manifest's rules see to that.
    """
    exchange = context.spec.exchange
    if exchange.propagation == "selective":
        return gradient_machine(context, _selective(context))
    if not exchange.prioritization:
        return gradient_machine(context, WholeGradient(context.coding))
    form = {"none": MaxN, "shared": SharedResidualMaxN, "perLink": PerLinkResidualMaxN}
    sending: Sending = form[exchange.residual](
        context.layout, context.coding, exchange.floor_percent
    )
    return gradient_machine(context, sending)


def _selective(context: Context) -> Sending:
    exchange = context.spec.exchange
    return SelectiveMaxN(
        context.layout,
        context.coding,
        exchange.floor_percent if exchange.prioritization else None,
        own=context.rank,
        most=exchange.propagation_peers,
        within=exchange.propagation_within,
        keeps_rest=exchange.residual == "perLink",
    )
