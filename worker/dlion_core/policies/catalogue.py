"""Exchange policies by name: DLion's, published systems, and those of installed packages.

Called by `factory`, and by the command line before a run starts. A package adds a policy with an
entry point of the group `dlion.policies` that names a `Policy` (docs/writing-a-policy.md).
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, Final

from dlion_api.document import parse
from dlion_api.errors import ContractError, DLionError, Problem, SpecError
from dlion_api.spec import Optimizer, Spec
from dlion_api.spec.sites import workers_of
from dlion_api.suggestions import did_you_mean
from dlion_core.policies import manifest_checks, round_parameters
from dlion_core.policies import parameters as declared
from dlion_core.policies.plugins import PolicyPlugin

GROUP: Final = "dlion.policies"


@dataclass(frozen=True)
class Policy:
    """An exchange policy that can be selected by name."""

    summary: str
    build: Callable[[Any, Any], Any] | str
    """Callable (context, parameters) that returns a `PolicyMachine`; or `module:callable`."""
    parameters: type[Any] = declared.NoParameters
    """Dataclass declared with `dlion_api.document.setting`."""
    must_arrive: bool = False
    """Whether no gradient message may be superseded by a newer one on a slow link."""
    topologies: tuple[str, ...] = ()
    """Supported topologies; empty: all."""
    own_pace: bool = False
    """Whether the policy has its own waiting rule and ignores `spec.synchronization`."""
    check: Callable[[Any, Any, Any], Iterable[Problem]] | None = None
    """Callable (spec, parameters, ranks of all workers that may ever take part) that returns a
    `Problem` for each conflict with the manifest."""
    lock_step: bool = False
    """Whether all workers make each update together from equal weights by the policy's own rule.
    A late worker must then join at an iteration."""
    takes_momentum: bool = False
    """Whether the policy applies the momentum of optimizer sgd to the step that all workers make,
    if the parameter `outerMomentum` is not given. Local steps then have none."""
    replays: bool = False
    """Whether the machine handles `IterationReplayed` and tolerates differing replicas. A late
    worker can then catch up while the others continue."""
    lasting: tuple[str, ...] = ()
    """Prefixes of state keys that stay valid when a worker takes over a peer's weights, such as the
    progress of a warm-up. All other state is reset then: it belongs to the old weights."""

    def builder(self) -> Callable[[Any, Any], Any]:
        if not isinstance(self.build, str):
            return self.build
        module, _, name = self.build.partition(":")
        function: Callable[[Any, Any], Any] = getattr(importlib.import_module(module), name)
        return function


_HERE = "dlion_core.policies"
_GRADIENTS = f"{_HERE}.gradient.gradient_policies"

BUILT_IN: Final[Mapping[str, Policy]] = {
    "adacomp": Policy(
        "The largest entries, each damped by its own staleness.",
        f"{_HERE}.gradient.adacomp:adacomp",
        declared.AdacompParameters,
        must_arrive=True,
        own_pace=True,
        check=manifest_checks.delayed,
    ),
    "adaptive": Policy(
        "Local steps, then the largest changes in few bits, as links and machines allow.",
        f"{_HERE}.weights.adaptive:AdaptiveLocalSteps",
        round_parameters.AdaptiveParameters,
        topologies=("allToAll",),
        own_pace=True,
        takes_momentum=True,
    ),
    "ako": Policy(
        "One partition of the accumulated gradient at a time.",
        f"{_HERE}.gradient.ako:ako",
        declared.AkoParameters,
        must_arrive=True,
    ),
    "async": Policy(
        "Gradients applied as they come, compensated for their delay on demand.",
        f"{_HERE}.gradient.asynchronous:asynchronous",
        declared.AsyncParameters,
        must_arrive=True,
        own_pace=True,
        check=manifest_checks.delayed,
    ),
    "demo": Policy(
        "The fast components of the momentum; the rest stays with each worker.",
        f"{_HERE}.gradient.demo:demo",
        declared.DemoParameters,
        must_arrive=True,
        topologies=("allToAll",),
        check=manifest_checks.demo,
    ),
    "dgc": Policy(
        "The largest of the gathered velocity, a tiny share.",
        f"{_HERE}.gradient.dgc:dgc",
        declared.DgcParameters,
        must_arrive=True,
        check=manifest_checks.single_momentum,
        lasting=("dgc_steps",),
    ),
    "adpsgd": Policy(
        "Means of pairs of weights, without any barrier.",
        f"{_HERE}.weights.adpsgd:AdPsgd",
        declared.AdpsgdParameters,
        topologies=("allToAll", "bipartite", "ring"),
        own_pace=True,
    ),
    "d2": Policy(
        "Gossip of weights, corrected for skewed data.",
        f"{_HERE}.weights.d2:D2",
        declared.D2Parameters,
        topologies=("allToAll", "bipartite", "randomRegular", "ring"),
        own_pace=True,
    ),
    "eventgrad": Policy(
        "Variables of the weights once their norms have changed enough.",
        f"{_HERE}.weights.eventgrad:EventGrad",
        declared.EventgradParameters,
        own_pace=True,
        lasting=("eventgrad_trigger_",),
    ),
    "gaia": Policy(
        "Updates once they are significant.",
        f"{_HERE}.weights.gaia:Gaia",
        declared.GaiaParameters,
        own_pace=True,
        check=manifest_checks.no_adaptive_optimizer,
        lasting=("gaia_steps",),
    ),
    "hop": Policy(
        "Averages of weights within a bounded gap.",
        f"{_HERE}.weights.hop:Hop",
        declared.HopParameters,
        own_pace=True,
        check=manifest_checks.hop,
    ),
    "fedat": Policy(
        "Tiers of workers, each at its own pace, under one server.",
        f"{_HERE}.weights.fedat:fedat",
        declared.FedatParameters,
        topologies=("allToAll",),
        own_pace=True,
        check=manifest_checks.fedat,
        lasting=("version", "profiled", "tier_", "places_of_", "global_D"),
    ),
    "halos": Policy(
        "A server in each site and one above them, both asynchronous.",
        f"{_HERE}.served.halos:Halos",
        round_parameters.HalosParameters,
        topologies=("allToAll",),
        own_pace=True,
    ),
    "hierarchical": Policy(
        "Gradients inside sites, compressed or robust means between them.",
        f"{_HERE}.hierarchical.hierarchical:Hierarchical",
        declared.HierarchicalParameters,
        must_arrive=True,
        topologies=("allToAll",),
        own_pace=True,
        lock_step=True,
    ),
    "localsgd": Policy(
        "Local steps, then an average with outer momentum.",
        f"{_HERE}.weights.localsgd:LocalSteps",
        round_parameters.LocalsgdParameters,
        own_pace=True,
        lasting=("velocity_D",),
    ),
    "quorum-diloco": Policy(
        "Local steps, then an outer step with a quorum of the workers.",
        f"{_HERE}.served.quorum_diloco:QuorumDiloco",
        round_parameters.QuorumDilocoParameters,
        topologies=("allToAll",),
        own_pace=True,
    ),
    "sparseloco": Policy(
        "Local steps, then the largest changes of each chunk in two bits.",
        f"{_HERE}.weights.sparseloco:SparseLocalSteps",
        round_parameters.SparselocoParameters,
        topologies=("allToAll",),
        own_pace=True,
    ),
    "staged": Policy(
        "Features of a frozen encoder to one worker, which trains the decoder.",
        f"{_HERE}.staged.machines:staged",
        round_parameters.StagedParameters,
        must_arrive=True,
        topologies=("staged",),
        own_pace=True,
        lasting=("payloads_", "ends_"),
    ),
    "none": Policy("Each worker for itself: nothing travels.", f"{_GRADIENTS}:none"),
    "full": Policy("Whole gradients to every peer.", f"{_GRADIENTS}:full"),
    "dlion": Policy(
        "The largest entries, as many as each link carries (Max N).",
        f"{_GRADIENTS}:dlion",
        replays=True,
    ),
    "dlion-published": Policy(
        "The same in the published form, as recalled.", f"{_GRADIENTS}:dlion", replays=True
    ),
    "topk": Policy(
        "A share of the entries, the largest; what is not sent may wait.",
        f"{_HERE}.gradient.topk:topk",
        declared.TopKParameters,
        must_arrive=True,
    ),
    "twostep": Policy(
        "Velocity gathered for each link until it passes the link's threshold.",
        f"{_HERE}.gradient.twostep:TwoStep",
        declared.TwostepParameters,
        must_arrive=True,
        own_pace=True,
        check=manifest_checks.twostep,
    ),
}


def local_optimizer(spec: Spec) -> Optimizer:
    """The optimizer of a worker's own steps: sgd without momentum if the policy applies it."""
    optimizer, exchange = spec.trainer.optimizer, spec.exchange
    is_own = optimizer.name != "sgd" or exchange.parameters.get("outerMomentum") is not None
    if is_own or not find(exchange.policy).takes_momentum:
        return optimizer
    return replace(optimizer, momentum=0.0, nesterov=False)


def names() -> list[str]:
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def find(name: str, *, source: str = "", line: int | None = None) -> Policy:
    """Return the policy of that name. `source` and `line`: its position, for the error.

    Raises SpecError with the known names for another one, and ProgramError if its package cannot be
    loaded.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    for point in entry_points(group=GROUP):
        if point.name == name:
            with PolicyPlugin(name, point.value).code("loading"):
                policy = point.load()
            if isinstance(policy, Policy):
                return policy
            wrong = f"entry point {point.value} is not a dlion_core.policies.catalogue.Policy"
            raise _problem(name, wrong, source, line)
    hint = did_you_mean(name, names())
    raise _problem(name, "there is no exchange policy of that name here", source, line, hint)


def plugin_of(name: str) -> PolicyPlugin | None:
    """Return the installed package's policy of that name; None: a policy of DLion."""
    if name in BUILT_IN:
        return None
    values = (point.value for point in entry_points(group=GROUP) if point.name == name)
    return next((PolicyPlugin(name, value) for value in values), None)


def rejection_error(name: str, rank: int, peer: int, reason: str, iteration: int) -> DLionError:
    """Return the error for a policy if a worker rejects its message and no peer is hostile."""
    message = (
        f"worker {rank}, at iteration {iteration}, refuses a message of worker {peer}: {reason}"
    )
    origin = plugin_of(name)
    return ContractError(f"policy {name}: {message}") if origin is None else origin.error(message)


def parameters_of(
    spec: Spec,
    *,
    source: str = "",
    lines: Mapping[str, int] | None = None,
    ranks: Collection[int] | None = None,
) -> Any:
    """Return the parameters of the manifest's policy, with defaults.

    `lines`: line of each path in `source`. `ranks`: every worker that may ever take part, if not
    those of the manifest. Raises SpecError for invalid parameters, or a conflict with the topology
    or the rest of the manifest, and ProgramError if the code of an installed policy failed.
    """
    line = (lines or {}).get("spec.exchange.policy")
    policy = find(spec.exchange.policy, source=source, line=line)
    with plugin_errors(spec.exchange.policy, "declaring its parameters"):
        parameters = parse(
            policy.parameters,
            dict(spec.exchange.parameters),
            source=source,
            lines=lines,
            root="spec.exchange.parameters",
        )
    has_server = getattr(parameters, "server", None) is not None
    topologies = ("allToAll",) if has_server else policy.topologies
    if topologies and spec.exchange.topology not in topologies:
        problem = Problem(
            path="spec.exchange.topology",
            message=f"policy {spec.exchange.policy}{' with a server' * has_server} does not work"
            " on it",
            value=spec.exchange.topology,
            allowed=f"{', '.join(topologies)}, or a policy that works on it, such as dlion",
            line=(lines or {}).get("spec.exchange.topology"),
        )
        raise SpecError([problem], source=source)
    if policy.check is not None:
        all_ranks = range(workers_of(spec.sites)) if ranks is None else ranks
        with plugin_errors(spec.exchange.policy, "checking the manifest"):
            problems = policy.check(spec, parameters, all_ranks)
            located = [replace(one, line=(lines or {}).get(one.path, line)) for one in problems]
        if located:
            raise SpecError(located, source=source)
    return parameters


def plugin_errors(name: str, doing: str) -> AbstractContextManager[None]:
    """Return a context in which errors of an installed policy name it."""
    origin = plugin_of(name)
    return nullcontext() if origin is None else origin.code(doing)


def has_barrier(spec: Spec) -> bool:
    """Whether an update is made only when the peers' contributions have arrived."""
    policy = find(spec.exchange.policy)
    barrier = spec.synchronization.mode in {"synchronous", "backup"}
    return policy.lock_step or (barrier and not policy.own_pace)


def is_fully_synchronous(spec: Spec) -> bool:
    """Whether every update includes the contributions of all workers. Backup workers are skipped,
    and those that continue without them do not wait."""
    if find(spec.exchange.policy).lock_step:
        return True
    passes_over = spec.synchronization.mode == "backup" and spec.synchronization.backup_workers > 0
    return has_barrier(spec) and not passes_over


def may_step_concurrently(spec: Spec) -> bool:
    """Whether a worker that has the weights of an iteration may do the next step with the others.
    True if replicas are equal and an update changes nothing but the weights."""
    return is_fully_synchronous(spec) and not find(spec.exchange.policy).lock_step


def may_catch_up(spec: Spec) -> bool:
    """Whether a late worker may replay the others' updates, so that none waits for its state
    transfer.

    It misses what a worker sent before it failed. So this is not allowed where replicas must stay
    equal.
    """
    all_with_all = spec.exchange.topology == "allToAll"
    return may_step_concurrently(spec) and all_with_all and find(spec.exchange.policy).replays


def messages_must_arrive(spec: Spec) -> bool:
    """Whether a queued gradient must not be superseded by a newer one. True if the policy tracks
    what it has sent, or the update waits for it."""
    exchange = spec.exchange
    if spec.synchronization.mode in {"synchronous", "backup"} or exchange.residual != "none":
        return True
    return exchange.propagation == "selective" or find(exchange.policy).must_arrive


def _problem(name: str, message: str, source: str, line: int | None, hint: str = "") -> SpecError:
    advice = "A policy of your own is installed with its package, on every site."
    problem = Problem(
        path="spec.exchange.policy",
        message=message,
        value=name,
        allowed=", ".join(names()),
        advice=f"{hint} {advice}".lstrip(),
        line=line,
    )
    return SpecError([problem], source=source)
