"""Conflicts between a policy's parameters and the rest of the manifest.

Called by `catalogue.parameters_of` before a run starts. Pure, without NumPy. Each check takes the
spec, the parameters and the ranks of all workers that may ever take part.
"""

from collections.abc import Collection

from dlion_api.errors import Problem
from dlion_api.spec import Spec
from dlion_core.policies.parameters import (
    AdacompParameters,
    AsyncParameters,
    DemoParameters,
    DgcParameters,
    FedatParameters,
    GaiaParameters,
    HopParameters,
    TwostepParameters,
)
from dlion_core.topology.topology import min_neighbours


def _problem(
    parameter: str, message: str, value: object, allowed: str, advice: str = ""
) -> Problem:
    path = f"spec.exchange.parameters.{parameter}"
    return Problem(path=path, message=message, value=str(value), allowed=allowed, advice=advice)


def _server(
    parameters: AdacompParameters | AsyncParameters | FedatParameters, ranks: Collection[int]
) -> list[Problem]:
    if parameters.server is None or parameters.server in ranks:
        return []
    message, allowed = "no worker of this job has that rank", f"{min(ranks)} to {max(ranks)}"
    return [_problem("server", message, parameters.server, allowed)]


def delayed(
    spec: Spec, parameters: AdacompParameters | AsyncParameters, ranks: Collection[int]
) -> list[Problem]:
    """Check the server, and that the optimizer suits gradients weighted by their share."""
    problems = _server(parameters, ranks)
    if parameters.step == "share":
        problems += no_adaptive_optimizer(spec, parameters, ranks)
    return problems


def no_adaptive_optimizer(
    spec: Spec,
    parameters: AdacompParameters | AsyncParameters | GaiaParameters | TwostepParameters,  # noqa: ARG001
    ranks: Collection[int],
) -> list[Problem]:
    """Check the optimizer of a policy that applies each worker's share of a gradient separately.

    Its step must be proportional to the gradient. Adam's is not: n shares would make n full steps.
    """
    optimizer = spec.trainer.optimizer
    if optimizer.name == "sgd" or len(ranks) == 1:
        return []
    return [
        Problem(
            path="spec.trainer.optimizer.name",
            message=f"policy {spec.exchange.policy} applies each worker's share of a gradient by"
            " itself, and a step of another optimizer than sgd need not be proportional to it",
            value=optimizer.name,
            allowed="sgd",
        )
    ]


def fedat(spec: Spec, parameters: FedatParameters, ranks: Collection[int]) -> list[Problem]:  # noqa: ARG001
    """Check that the server exists, and that tiers are given for each worker or for none."""
    problems = _server(parameters, ranks)
    if parameters.tiers and len(parameters.tiers) != len(ranks):
        message = "one tier for each worker of the job, in rank order, or none"
        value, allowed = f"{len(parameters.tiers)} tiers", f"{len(ranks)} tiers"
        problems.append(_problem("tiers", message, value, allowed))
    return problems


def hop(spec: Spec, parameters: HopParameters, ranks: Collection[int]) -> list[Problem]:
    """Check that a worker with several neighbours waits for at least one of them. Two workers, with
    the default of one, may run independently."""
    given, fewest = parameters.backup_workers, min_neighbours(spec.exchange, len(ranks))
    if given <= 1 or given < fewest:
        return []
    message = (
        f"on topology {spec.exchange.topology} a worker has as few as {fewest} "
        f"neighbours of {len(ranks)} workers, and would wait for none of them"
    )
    return [_problem("backupWorkers", message, given, f"0 to {max(1, fewest - 1)}")]


def single_momentum(
    spec: Spec,
    parameters: DemoParameters | DgcParameters | TwostepParameters,
    ranks: Collection[int],  # noqa: ARG001 - as all checks
) -> list[Problem]:
    """Check that not both the policy and the optimizer apply momentum."""
    optimizer, momentum = spec.trainer.optimizer, parameters.momentum
    if not momentum or (optimizer.name == "sgd" and not optimizer.momentum):
        return []
    momenta = {"sgd": optimizer.momentum, "adam": optimizer.beta1}
    theirs = momenta.get(optimizer.name, "unknown")
    return [
        _problem(
            "momentum",
            f"policy {spec.exchange.policy} applies momentum itself, and the optimizer would once"
            " more",
            f"{momentum}, with optimizer {optimizer.name}, momentum {theirs}",
            "momentum above 0 in one place only",
            "Set spec.trainer.optimizer to sgd with momentum: 0.",
        )
    ]


def demo(spec: Spec, parameters: DemoParameters, ranks: Collection[int]) -> list[Problem]:
    """Check the momentum, and that all workers make each update together."""
    problems = single_momentum(spec, parameters, ranks)
    if spec.synchronization.mode != "synchronous":
        problems.append(
            Problem(
                path="spec.synchronization.mode",
                message="policy demo averages the components of all workers in each iteration",
                value=spec.synchronization.mode,
                allowed="synchronous",
            )
        )
    return problems


def twostep(spec: Spec, parameters: TwostepParameters, ranks: Collection[int]) -> list[Problem]:
    """Check the momentum, and that sites are combined only where a worker knows all samples."""
    problems = single_momentum(spec, parameters, ranks) + no_adaptive_optimizer(
        spec, parameters, ranks
    )
    if parameters.combine_every_steps and spec.exchange.topology != "allToAll":
        message = (
            "models of sites are combined by their samples, which a worker knows only where it"
            f" hears all others; on topology {spec.exchange.topology} it does not"
        )
        value, allowed = parameters.combine_every_steps, "0, or exchange.topology: allToAll"
        problems.append(_problem("combineEverySteps", message, value, allowed))
    return problems
