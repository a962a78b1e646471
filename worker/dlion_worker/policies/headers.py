"""What machines of a policy's own check of any message or job, and small words they share.

Called by `delayed`, `delays`, `dgc`, `twostep`; `machine` and `peer_machine` have checks of their
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.errors import ContractError, Problem, SpecError
from dlion_api.names import Rank
from dlion_worker.policies.interface import Message, MessageKind, Refuse, Value

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dlion_api.spec import Spec


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


def server_of(parameter: int | None, ranks: Collection[Rank]) -> Rank | None:
    """The worker in the server's role, if there is one.

    Raises: SpecError where the job has no such worker.
    """
    if parameter is None:
        return None
    if parameter not in ranks:
        raise SpecError(
            [
                Problem(
                    path="spec.exchange.parameters.server",
                    message="no worker of this job has that rank",
                    value=str(parameter),
                    allowed=", ".join(map(str, sorted(ranks))),
                )
            ]
        )
    return Rank(parameter)


def require_one_momentum(spec: Spec, momentum: float) -> None:
    """Passes a job whose policy or optimizer has momentum, but not both.

    Raises: SpecError where both do.
    """
    optimizer = spec.trainer.optimizer
    if not momentum or (optimizer.name == "sgd" and not optimizer.momentum):
        return
    policy = spec.exchange.policy
    raise SpecError(
        [
            Problem(
                path="spec.exchange.parameters.momentum",
                message=f"policy {policy} applies momentum itself, and the optimizer would once"
                " more",
                value=f"{momentum}, with optimizer {optimizer.name}, momentum"
                f" {optimizer.momentum if optimizer.name == 'sgd' else optimizer.beta1}",
                allowed="momentum above 0 in one place only",
                advice="Set spec.trainer.optimizer to sgd with momentum: 0.",
            )
        ]
    )


def by_rank(state: Mapping[str, Value], prefix: str) -> dict[Rank, int]:
    """The whole numbers kept under that prefix and a rank."""
    return {
        Rank(int(name.removeprefix(prefix))): int(value)
        for name, value in state.items()
        if name.startswith(prefix)
    }
