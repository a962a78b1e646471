"""Where a policy's parameters and the rest of the manifest do not go together.

Called by `catalogue.parameters_of`, so that a person is told before anything starts. Pure, without
NumPy. Each takes the spec, the parameters and the ranks of all workers that may ever take part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.errors import Problem
from dlion_worker.policies.topology import fewest_neighbours

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlion_api.spec import Spec
    from dlion_worker.policies.parameters import (
        AdacompParameters,
        AsyncParameters,
        DgcParameters,
        TwostepParameters,
    )
    from dlion_worker.policies.weight_parameters import (
        FedatParameters,
        GaiaParameters,
        HopParameters,
    )

_PARAMETERS = "spec.exchange.parameters"


def server(
    spec: Spec,  # noqa: ARG001 - as all checks
    parameters: AdacompParameters | AsyncParameters | FedatParameters,
    ranks: Collection[int],
) -> list[Problem]:
    """The job has a worker for the server's role, where there is one."""
    if parameters.server is None or parameters.server in ranks:
        return []
    return [
        Problem(
            path=f"{_PARAMETERS}.server",
            message="no worker of this job has that rank",
            value=str(parameters.server),
            allowed=f"{min(ranks)} to {max(ranks)}",
        )
    ]


def delayed(
    spec: Spec, parameters: AdacompParameters | AsyncParameters, ranks: Collection[int]
) -> list[Problem]:
    """The server is there, and a gradient that is to count by its share can."""
    problems = server(spec, parameters, ranks)
    if parameters.step == "share":
        problems += shares_of_steps(spec, parameters, ranks)
    return problems


def shares_of_steps(
    spec: Spec,
    parameters: AdacompParameters | AsyncParameters | GaiaParameters | TwostepParameters,  # noqa: ARG001
    ranks: Collection[int],
) -> list[Problem]:
    """Gradients that are applied one by one, each by its share of the batch, take an optimizer
    whose step is as large as its gradient. Adam's is not: n shares would be n whole steps."""
    optimizer = spec.trainer.optimizer
    if optimizer.name != "adam" or len(ranks) == 1:
        return []
    return [
        Problem(
            path="spec.trainer.optimizer.name",
            message=f"policy {spec.exchange.policy} applies each worker's share of a gradient by"
            " itself, and a step of adam is as large for a share as for the whole",
            value=optimizer.name,
            allowed="sgd",
        )
    ]


def fedat(spec: Spec, parameters: FedatParameters, ranks: Collection[int]) -> list[Problem]:
    """There is a server, and a tier for each worker, or none is declared."""
    problems = server(spec, parameters, ranks)
    if parameters.tiers and len(parameters.tiers) != len(ranks):
        problems.append(
            Problem(
                path=f"{_PARAMETERS}.tiers",
                message="one tier for each worker of the job, in rank order, or none",
                value=f"{len(parameters.tiers)} tiers",
                allowed=f"{len(ranks)} tiers",
            )
        )
    return problems


def hop(spec: Spec, parameters: HopParameters, ranks: Collection[int]) -> list[Problem]:
    """Whoever has several neighbours waits for one of them at least. Two workers, with the default
    of one, may go on without each other."""
    given, fewest = parameters.backup_workers, fewest_neighbours(spec.exchange, len(ranks))
    if given <= 1 or given < fewest:
        return []
    return [
        Problem(
            path=f"{_PARAMETERS}.backupWorkers",
            message=f"on topology {spec.exchange.topology} a worker has as few as {fewest} "
            f"neighbours of {len(ranks)} workers, and would wait for none of them",
            value=str(given),
            allowed=f"0 to {max(1, fewest - 1)}",
        )
    ]


def one_momentum(
    spec: Spec,
    parameters: DgcParameters | TwostepParameters,
    ranks: Collection[int],  # noqa: ARG001 - as all checks
) -> list[Problem]:
    """The policy or the optimizer has momentum, but not both."""
    optimizer, momentum = spec.trainer.optimizer, parameters.momentum
    if not momentum or (optimizer.name == "sgd" and not optimizer.momentum):
        return []
    theirs = optimizer.momentum if optimizer.name == "sgd" else optimizer.beta1
    return [
        Problem(
            path=f"{_PARAMETERS}.momentum",
            message=f"policy {spec.exchange.policy} applies momentum itself, and the optimizer"
            " would once more",
            value=f"{momentum}, with optimizer {optimizer.name}, momentum {theirs}",
            allowed="momentum above 0 in one place only",
            advice="Set spec.trainer.optimizer to sgd with momentum: 0.",
        )
    ]


def twostep(spec: Spec, parameters: TwostepParameters, ranks: Collection[int]) -> list[Problem]:
    """One momentum; and sites are combined only where each worker hears all of every site, by
    whose samples the models count."""
    problems = one_momentum(spec, parameters, ranks) + shares_of_steps(spec, parameters, ranks)
    if parameters.combine_every_steps and spec.exchange.topology != "allToAll":
        problems.append(
            Problem(
                path=f"{_PARAMETERS}.combineEverySteps",
                message="models of sites are combined by their samples, which a worker knows only"
                f" where it hears all others; on topology {spec.exchange.topology} it does not",
                value=str(parameters.combine_every_steps),
                allowed="0, or exchange.topology: allToAll",
            )
        )
    return problems
