"""`spec.failureRules`: what follows the end of a worker, by how it ended and by its group.

The first rule that matches counts; without one, `ENDS` has what follows. The supervisor applies the
rules to ends of its trainer, Kubernetes (`podFailurePolicy`) to ends of pods, and the operator and
the local runner to workers that failed for good.

Source: the rules are Kubernetes' podFailurePolicy and JobSet's failurePolicy, with names of ends in
place of exit codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from dlion_api.bounds import GROUP_NAME_LENGTH, LABEL_FORM
from dlion_api.document import Limits, Rule, setting
from dlion_api.endings import SIGKILL_EXIT_CODE
from dlion_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from dlion_api.spec.job import Spec

WorkerEnd = Literal[
    "Crashed",
    "Killed",
    "Unavailable",
    "ProgramFailed",
    "DataFailed",
    "StorageFailed",
    "Diverged",
    "InvalidSpec",
    "RestartsExceeded",
    "InitializerFailed",
    "Disrupted",
]
"""How a worker ended, unless in order or on request."""

FailureAction = Literal["Restart", "Ignore", "FailWorker", "FailRun"]

MAX_RULES: Final = 8
"""Maximum rules. With the operator's own rules, three plus two for each of two downloads, they stay
below Kubernetes' limit of 20 in a podFailurePolicy."""
MAX_GROUPS_PER_RULE: Final = 4
"""An API server compares each with every group of every site."""

GroupName = Annotated[str, Limits(**LABEL_FORM, max_length=GROUP_NAME_LENGTH)]


@dataclass(frozen=True)
class EndKind:
    """One way in which a worker ends."""

    codes: tuple[int, ...]
    """Exit codes of its trainer; empty: others than those of all ends, of an init container, or a
    pod's condition."""
    action: FailureAction
    """What follows if no rule matches."""
    meaning: str


ENDS: Final[Mapping[WorkerEnd, EndKind]] = {
    "Crashed": EndKind((), "Restart", "exit code 1, a signal, or a code that DLion does not know"),
    "Killed": EndKind(
        (SIGKILL_EXIT_CODE,), "Restart", "SIGKILL, most often for want of memory (`OOMKilled`)"
    ),
    "Unavailable": EndKind(
        (ExitCode.UNAVAILABLE,), "Restart", "a peer or the coordinator was missing"
    ),
    "ProgramFailed": EndKind(
        (ExitCode.PROGRAM,), "FailWorker", "the program raised, or broke its protocol"
    ),
    "DataFailed": EndKind((ExitCode.DATA,), "FailWorker", "a file is missing or corrupt"),
    "StorageFailed": EndKind((ExitCode.STORAGE,), "FailWorker", "a disk is full or not writable"),
    "Diverged": EndKind((ExitCode.DIVERGED,), "FailWorker", "loss or weights are not finite"),
    "InvalidSpec": EndKind((ExitCode.SPEC,), "FailWorker", "the manifest is wrong for this worker"),
    "RestartsExceeded": EndKind(
        (ExitCode.RESTARTS,), "FailWorker", "it ended more often than `maxRestarts` allows"
    ),
    "InitializerFailed": EndKind(
        (),
        "Restart",
        "a download of `trainer.initializer` failed, in its init container",
    ),
    "Disrupted": EndKind(
        (),
        "Ignore",
        "Kubernetes ended the pod (`DisruptionTarget`): eviction, drain, preemption, spot end, lost"
        " node",
    ),
}
"""Every end, with what follows by default. An initializer that failed with a fatal exit code is not
started again by default."""

_UNMATCHED = frozenset(
    {
        ExitCode.OK, ExitCode.USAGE, ExitCode.MODEL_LOST, ExitCode.DENIED, ExitCode.ENDED_EARLY,
        ExitCode.PARTIAL, ExitCode.DEADLINE, ExitCode.INTERRUPTED,
    }
)  # fmt: skip
"""Exit codes of no end: in order, on request, or after the training."""
NAMED_CODES: Final = frozenset(int(code) for kind in ENDS.values() for code in kind.codes) | {
    int(code) for code in _UNMATCHED
}
"""All exit codes but those of `Crashed`."""


@dataclass(frozen=True, kw_only=True)
class FailureRule:
    """What follows some ends of workers, of some groups or of all."""

    on_ends: tuple[WorkerEnd, ...] = setting(
        "ways in which a worker ends. Disrupted (condition DisruptionTarget) and InitializerFailed"
        " (a download) apply whatever the exit code; Killed is SIGKILL, as when memory is full.",
        unique=True,
        min_items=1,
        max_items=len(ENDS),
    )
    groups: tuple[GroupName, ...] = setting(
        "only workers of these groups, at any site.",
        default=(),
        unique=True,
        max_items=MAX_GROUPS_PER_RULE,
    )
    action: FailureAction = setting(
        "Restart: within maxRestarts. Ignore: restart without counting. FailWorker: failurePolicy"
        " applies. FailRun: the others save their state, and the run has failed without a retry."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!('RestartsExceeded' in self.onEnds) || self.action.startsWith('Fail')",
            message="after RestartsExceeded there are no restarts left",
            holds=lambda it: "RestartsExceeded" not in it.on_ends or it.action.startswith("Fail"),
            reads=("action", "onEnds"),
            given=lambda it: str(it.action),
            allowed=lambda _: "FailWorker, FailRun",
            advice="Raise maxRestarts for more restarts, or use Ignore for the ends before.",
        ),
    )


def end_of_exit(code: int) -> WorkerEnd | None:
    """Return the end that a trainer's exit code stands for (128 + n: by signal n).

    None: it ended in order, on request, or after the training.

    >>> end_of_exit(67), end_of_exit(139), end_of_exit(0)
    ('ProgramFailed', 'Crashed', None)
    """
    if code in _UNMATCHED:
        return None
    return next((end for end, kind in ENDS.items() if code in kind.codes), "Crashed")


def matching_rule(rules: Sequence[FailureRule], end: WorkerEnd, group: str) -> int | None:
    """Return the index of the first rule for that end of a worker of that group, or None."""
    for number, rule in enumerate(rules):
        if end in rule.on_ends and (not rule.groups or group in rule.groups):
            return number
    return None


def action_after(rules: Sequence[FailureRule], end: WorkerEnd, group: str) -> FailureAction:
    """Return what follows that end of a worker of that group."""
    number = matching_rule(rules, end, group)
    return ENDS[end].action if number is None else rules[number].action


def fail_run_cause(rules: Sequence[FailureRule], end: WorkerEnd | None, group: str) -> str:
    """Return which rule fails the run after a worker that ended so for good. Empty: none.

    An end with restarts is for good once there are none left: then it is `RestartsExceeded`.

    >>> rule = FailureRule(on_ends=("ProgramFailed",), action="FailRun")
    >>> fail_run_cause([rule], "ProgramFailed", "small"), fail_run_cause([rule], "Killed", "small")
    ('failureRules[0] is FailRun for ProgramFailed', '')
    """
    if end is not None and action_after(rules, end, group) == "Restart":
        end = "RestartsExceeded"
    if end is None or action_after(rules, end, group) != "FailRun":
        return ""
    return f"failureRules[{matching_rule(rules, end, group)}] is FailRun for {end}"


def _unknown_groups(spec: Spec) -> list[str]:
    """Groups of failure rules that no site has."""
    known = {group.name for site in spec.sites for group in site.groups}
    return sorted({name for rule in spec.failure_rules for name in rule.groups} - known)


FAILURE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        cel="self.failureRules.all(r, r.groups.all(g,"
        " self.sites.exists(s, s.groups.exists(x, x.name == g))))",
        message="failureRules may name groups of spec.sites only",
        holds=lambda it: not _unknown_groups(it),
        reads=("failureRules", "sites"),
        given=lambda it: ", ".join(_unknown_groups(it)),
        allowed=lambda it: ", ".join(sorted({g.name for s in it.sites for g in s.groups})),
    ),
    Rule(
        cel="self.maxRetries == 0 || size(self.sites) == 1",
        message="maxRetries needs a job of one site: sites do not agree on retries",
        holds=lambda it: it.max_retries == 0 or len(it.sites) == 1,
        reads=("maxRetries", "sites"),
        advice="Leave maxRetries out, and give a new runId at every site after a failure.",
    ),
)
"""Rules of `Spec`."""
