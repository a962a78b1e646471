"""Checks of received messages, shared by machines that do their own dispatch.

Used by `delayed_gradients`, `staleness`, `eventgrad`, `fedat`, `hierarchical`, `twostep`;
`gradient_exchange` and `peer_machine` have their own checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.policies.interface import Message, MessageKind, RejectMessage, Value

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def reject_unknown_sender(sender: Rank, own: Rank, ranks: Collection[Rank]) -> RejectMessage | None:
    """Return a rejection if the sender is no peer, else None."""
    if sender in ranks and sender != own:
        return None
    allowed = sorted(rank for rank in ranks if rank != own)
    return RejectMessage(sender, f"message from worker {sender}; allowed: {allowed}")


def check_step_message(message: Message, max_samples: int) -> None:
    """Check the fields and length of a step message.

    Raises:
        ContractError: they are invalid.
    """
    least = 1 if message.kind is MessageKind.GRADIENT else 0
    if not least <= message.local_batch_size <= max_samples:
        msg = (
            f"{message.kind.name} with a local batch of {message.local_batch_size} samples; "
            f"allowed: {least} to {max_samples}"
        )
        raise ContractError(msg)
    if message.iteration < 1:
        raise ContractError(f"{message.kind.name} of iteration {message.iteration}; allowed: 1 on")
    if message.kind is MessageKind.PROGRESS and message.payload:
        raise ContractError("PROGRESS with a payload; allowed: none")


def ints_by_rank(state: Mapping[str, Value], prefix: str) -> dict[Rank, int]:
    """Return the integers of the state keys with that prefix and a rank."""
    return {
        Rank(int(name.removeprefix(prefix))): int(value)
        for name, value in state.items()
        if name.startswith(prefix)
    }
