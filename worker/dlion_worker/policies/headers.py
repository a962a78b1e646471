"""What machines of a policy's own check of any message, and small words they share.

Called by `delayed`, `delays`, `eventgrad`, `fedat`, `hierarchical`, `twostep`; `machine` and
`peer_machine` have checks of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.policies.interface import Message, MessageKind, Refuse, Value

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def stranger(sender: Rank, own: Rank, ranks: Collection[Rank]) -> Refuse | None:
    """The refusal of who is no peer; None: it is one."""
    if sender in ranks and sender != own:
        return None
    allowed = sorted(rank for rank in ranks if rank != own)
    return Refuse(sender, f"message from worker {sender}; allowed: {allowed}")


def check_step(message: Message, most_samples: int) -> None:
    """Passes a step's message whose fields and length make sense.

    Raises:
        ContractError: they do not.
    """
    least = 1 if message.kind is MessageKind.GRADIENT else 0
    if not least <= message.local_batch_size <= most_samples:
        msg = (
            f"{message.kind.name} with a local batch of {message.local_batch_size} samples; "
            f"allowed: {least} to {most_samples}"
        )
        raise ContractError(msg)
    if message.iteration < 1:
        raise ContractError(f"{message.kind.name} of iteration {message.iteration}; allowed: 1 on")
    if message.kind is MessageKind.PROGRESS and message.payload:
        raise ContractError("PROGRESS with a payload; allowed: none")


def by_rank(state: Mapping[str, Value], prefix: str) -> dict[Rank, int]:
    """The whole numbers kept under that prefix and a rank."""
    return {
        Rank(int(name.removeprefix(prefix))): int(value)
        for name, value in state.items()
        if name.startswith(prefix)
    }
