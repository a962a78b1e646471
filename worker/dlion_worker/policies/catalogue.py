"""The exchange policies by name: DLion's, the published systems, and those of installed packages.

Called by `building`, and by the command line before anything starts. A package of yours adds one
by an entry point of the group `dlion.policies` that names a `Policy` (docs/writing-a-policy.md).
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from dlion_api.document import parse
from dlion_api.errors import ContractError, DLionError, Problem, SpecError
from dlion_api.spec.sites import workers_of
from dlion_worker.policies import checks
from dlion_worker.policies.installed import Installed
from dlion_worker.policies.parameters import (
    AdacompParameters,
    AkoParameters,
    AsyncParameters,
    DgcParameters,
    HierarchicalParameters,
    NoParameters,
    TopKParameters,
    TwostepParameters,
)
from dlion_worker.policies.weight_parameters import (
    AdpsgdParameters,
    D2Parameters,
    EventgradParameters,
    FedatParameters,
    GaiaParameters,
    HopParameters,
    LocalsgdParameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dlion_api.spec import Spec

GROUP: Final = "dlion.policies"


@dataclass(frozen=True)
class Policy:
    """An exchange policy that can be chosen by name.

    `build` is called with (context, parameters) and yields a `Machine`; or it is named as
    `module:function`, imported when it is needed. `parameters` is a dataclass declared with
    `dlion_api.document.setting`. `must_arrive`: it counts on every gradient message to arrive, so
    that none may give way to a newer one on a slow link. `topologies`: those that it works on;
    none named: all. `own_pace`: who waits for whom is its own rule, in which
    `spec.synchronization` has no part. `lock_step`: by that rule all make each update together,
    from equal weights, so that who comes late has to meet them at an iteration. `replays`: its
    machine takes `IterationPassed`, and replicas differ anyway, so that who comes late may catch up
    while the others go on. `lasting`: how the names begin of what in its state stays right where a
    worker goes on from a peer's weights, as how far a warm-up is; all else begins anew there, since
    it belongs to the weights that it had (gradients held back, or arrived). `check` is called with
    (spec, parameters, ranks of all workers that may ever take part) and yields a `Problem` for all
    that does not go together.
    """

    summary: str
    build: Callable[[Any, Any], Any] | str
    parameters: type[Any] = NoParameters
    must_arrive: bool = False
    topologies: tuple[str, ...] = ()
    own_pace: bool = False
    check: Callable[[Any, Any, Any], Iterable[Problem]] | None = None
    lock_step: bool = False
    replays: bool = False
    lasting: tuple[str, ...] = ()

    def builder(self) -> Callable[[Any, Any], Any]:
        """The function that makes a worker's machine."""
        if not isinstance(self.build, str):
            return self.build
        module, _, name = self.build.partition(":")
        function: Callable[[Any, Any], Any] = getattr(importlib.import_module(module), name)
        return function


_HERE = "dlion_worker.policies"
_GRADIENTS = f"{_HERE}.gradient_policies"

BUILT_IN: Final[Mapping[str, Policy]] = {
    "adacomp": Policy(
        "The largest entries, each damped by its own staleness.",
        f"{_HERE}.adacomp:adacomp",
        AdacompParameters,
        must_arrive=True,
        own_pace=True,
        check=checks.delayed,
    ),
    "ako": Policy(
        "One partition of the accumulated gradient at a time.",
        f"{_HERE}.ako:ako",
        AkoParameters,
        must_arrive=True,
    ),
    "async": Policy(
        "Gradients applied as they come, compensated for their delay on demand.",
        f"{_HERE}.asynchronous:asynchronous",
        AsyncParameters,
        must_arrive=True,
        own_pace=True,
        check=checks.delayed,
    ),
    "dgc": Policy(
        "The largest of the gathered velocity, a tiny share.",
        f"{_HERE}.dgc:dgc",
        DgcParameters,
        must_arrive=True,
        check=checks.one_momentum,
        lasting=("dgc_steps",),
    ),
    "adpsgd": Policy(
        "Means of pairs of weights, without any barrier.",
        f"{_HERE}.adpsgd:adpsgd",
        AdpsgdParameters,
        topologies=("allToAll", "bipartite", "ring"),
        own_pace=True,
    ),
    "d2": Policy(
        "Gossip of weights, corrected for skewed data.",
        f"{_HERE}.d2:d2",
        D2Parameters,
        topologies=("allToAll", "bipartite", "randomRegular", "ring"),
        own_pace=True,
    ),
    "eventgrad": Policy(
        "Variables of the weights once their norms have changed enough.",
        f"{_HERE}.eventgrad:eventgrad",
        EventgradParameters,
        own_pace=True,
        lasting=("eventgrad_trigger_",),
    ),
    "gaia": Policy(
        "Updates once they are significant.",
        f"{_HERE}.gaia:gaia",
        GaiaParameters,
        own_pace=True,
        check=checks.shares_of_steps,
        lasting=("gaia_steps",),
    ),
    "hop": Policy(
        "Averages of weights within a bounded gap.",
        f"{_HERE}.hop:hop",
        HopParameters,
        own_pace=True,
        check=checks.hop,
    ),
    "fedat": Policy(
        "Tiers of workers, each at its own pace, under one server.",
        f"{_HERE}.fedat:fedat",
        FedatParameters,
        topologies=("allToAll",),
        own_pace=True,
        check=checks.fedat,
        lasting=("version", "profiled", "tier_", "places_of_", "global_D"),
    ),
    "hierarchical": Policy(
        "Gradients inside sites, compressed or robust means between them.",
        f"{_HERE}.hierarchical:hierarchical",
        HierarchicalParameters,
        must_arrive=True,
        topologies=("allToAll",),
        own_pace=True,
        lock_step=True,
    ),
    "localsgd": Policy(
        "Local steps, then an average with outer momentum.",
        f"{_HERE}.localsgd:localsgd",
        LocalsgdParameters,
        own_pace=True,
        lasting=("velocity_D",),
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
        f"{_HERE}.topk:topk",
        TopKParameters,
        must_arrive=True,
    ),
    "twostep": Policy(
        "Velocity gathered for each link until it passes the link's threshold.",
        f"{_HERE}.twostep:twostep",
        TwostepParameters,
        must_arrive=True,
        own_pace=True,
        check=checks.twostep,
    ),
}


def names() -> list[str]:
    """All policies that can be chosen here."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def find(name: str, *, source: str = "", line: int | None = None) -> Policy:
    """The policy of that name; `source` and `line`: where it stands, for the error.

    Raises: SpecError naming the known ones; ProgramError where its package cannot be loaded.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    for point in entry_points(group=GROUP):
        if point.name == name:
            with Installed(name, point.value).code("loading"):
                policy = point.load()
            if isinstance(policy, Policy):
                return policy
            wrong = f"entry point {point.value} is no dlion_worker.policies.catalogue.Policy"
            raise _problem(name, wrong, source, line)
    raise _problem(name, "there is no exchange policy of that name here", source, line)


def origin_of(name: str) -> Installed | None:
    """Where an installed package's policy of that name comes from; None: it is DLion's own."""
    if name in BUILT_IN:
        return None
    values = (point.value for point in entry_points(group=GROUP) if point.name == name)
    return next((Installed(name, value) for value in values), None)


def refusal(name: str, rank: int, peer: int, reason: str, iteration: int) -> DLionError:
    """What a policy has done wrong where a worker refuses a message, and nobody is hostile."""
    said = f"worker {rank}, at iteration {iteration}, refuses a message of worker {peer}: {reason}"
    origin = origin_of(name)
    return ContractError(f"policy {name}: {said}") if origin is None else origin.error(said)


def parameters_of(
    spec: Spec,
    *,
    source: str = "",
    lines: Mapping[str, int] | None = None,
    ranks: Collection[int] | None = None,
) -> Any:
    """What the manifest's `exchange.parameters` come to for its policy, with defaults.

    `lines` knows where in `source` each path stands; `ranks`: every worker that may ever take
    part, where these are not the manifest's. Raises: SpecError with every problem, or where the
    policy does not work on the manifest's topology, or not with the rest of the manifest;
    ProgramError where the code of an installed one fails.
    """
    line = (lines or {}).get("spec.exchange.policy")
    policy = find(spec.exchange.policy, source=source, line=line)
    with border(spec.exchange.policy, "declaring its parameters"):
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
            allowed=", ".join(topologies),
            line=(lines or {}).get("spec.exchange.topology"),
        )
        raise SpecError([problem], source=source)
    if policy.check is not None:
        everybody = range(workers_of(spec.sites)) if ranks is None else ranks
        with border(spec.exchange.policy, "checking the manifest"):
            problems = list(policy.check(spec, parameters, everybody))
        found = [replace(one, line=(lines or {}).get(one.path, line)) for one in problems]
        if found:
            raise SpecError(found, source=source)
    return parameters


def border(name: str, doing: str) -> AbstractContextManager[None]:
    """Around code of a policy of that name: an installed one is named by what it raises."""
    origin = origin_of(name)
    return nullcontext() if origin is None else origin.code(doing)


def has_barrier(spec: Spec) -> bool:
    """Whether an iteration's update is made when the peers' contributions are in."""
    policy = find(spec.exchange.policy)
    barrier = spec.synchronization.mode in {"synchronous", "backup"}
    return policy.lock_step or (barrier and not policy.own_pace)


def all_update_together(spec: Spec) -> bool:
    """Whether that is so with everybody's: backup workers are passed over, and those who go on
    without them do not hold for them."""
    if find(spec.exchange.policy).lock_step:
        return True
    passes_over = spec.synchronization.mode == "backup" and spec.synchronization.backup_workers > 0
    return has_barrier(spec) and not passes_over


def may_begin_beside(spec: Spec) -> bool:
    """Whether who has everybody's weights of an iteration may make the next step while the others
    make it: an update is all that a policy does to weights which are equal everywhere."""
    return all_update_together(spec) and not find(spec.exchange.policy).lock_step


def may_catch_up(spec: Spec) -> bool:
    """Whether who comes late may make the others' updates from what they send, so that nobody waits
    while it takes over a state. What another sent them and died it does not get: where replicas
    are equal everywhere that may not be."""
    all_with_all = spec.exchange.topology == "allToAll"
    return may_begin_beside(spec) and all_with_all and find(spec.exchange.policy).replays


def messages_must_arrive(spec: Spec) -> bool:
    """Whether a gradient that is queued may not give way to a newer one: the policy keeps account
    of what it has sent, or the update waits for it."""
    exchange = spec.exchange
    if spec.synchronization.mode in {"synchronous", "backup"} or exchange.residual != "none":
        return True
    return exchange.propagation == "selective" or find(exchange.policy).must_arrive


def _problem(name: str, message: str, source: str, line: int | None) -> SpecError:
    problem = Problem(
        path="spec.exchange.policy",
        message=message,
        value=name,
        allowed=", ".join(names()),
        advice="A policy of your own is installed with its package, on every site.",
        line=line,
    )
    return SpecError([problem], source=source)
