"""What is wrong with a job as a whole: its conditions, sites and links. Pure."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from dlion_api.bounds import MAX_PAIRS
from dlion_api.cluster_names import (
    DATASET_INITIALIZER,
    MODEL_INITIALIZER,
    MULTIKUEUE,
    QUEUE_LABEL,
    dispatched_workload_name,
)
from dlion_api.status_names import ConditionType, Reason, State
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.findings.condition_advice import ADVICE, NO_PROBLEM
from dlion_cli.findings.job_problem import JobProblem, JobScope, Severity, one_line
from dlion_cli.views.job_status import ConditionView, JobStatus, outcome_exit_code, text
from dlion_cli.views.job_tables import NOT_OBSERVED

MANAGED_BY: Final = "dlion.dev/operator"
UNOBSERVED_AFTER: Final = timedelta(seconds=30)
DELETED_WITHIN: Final = timedelta(minutes=2)
_TAKES_PART: Final = ("Ready", "Starting")
_PREFLIGHT: Final = "dlion preflight FILE --contexts A,B"


class JobFinder:
    """Finds the problems of one job's document."""

    def __init__(self, job: JobStatus, scope: JobScope, cluster: str = "") -> None:
        """`cluster`: where MultiKueue runs the job's copy. Empty: nowhere, or not known."""
        self._job, self._scope, self._cluster = job, scope, cluster
        self._metadata = mapping_of(job.document.get("metadata"))
        self._spec = mapping_of(job.document.get("spec"))
        self._status = mapping_of(job.document.get("status"))
        self._object = f"dlionjob/{job.name}"

    def problems(self) -> Iterator[JobProblem]:
        """Problems of its conditions and, during its run, of sites and links."""
        yield from self._deletion()
        yield from self._observation()
        if self._job.outcome is not None:
            yield from self._outcome(self._job.outcome)
            return
        yield from self._conditions()
        if self._job.state not in (State.SUSPENDED, State.NOT_SELECTED):
            yield from self._sites()
            yield from self._links()

    def _problem(
        self,
        severity: Severity,
        reason: str,
        message: str,
        advice: str,
        command: str = "",
        *,
        about: str = "",
    ) -> JobProblem:
        command = self._scope.command(command) if command else ""
        thing = about or self._object
        return JobProblem(severity, reason, thing, one_line(message, 1500), advice, command)

    def _of_reason(self, severity: Severity, reason: str, message: str) -> JobProblem:
        """A problem with the advice for its reason; one of a newer operator has none."""
        advice, command = "See docs/conditions.md", ""
        if reason in set(Reason):
            advice, command = ADVICE[Reason(reason)]
        command = command.format(name=self._job.name, initializer=self._initializer(message))
        return self._problem(severity, reason, message or reason, advice, command)

    def _initializer(self, message: str) -> str:
        """The init container that the message names, else the job's first."""
        given = mapping_of(mapping_of(self._spec.get("trainer")).get("initializer"))
        by_field = {"dataset": DATASET_INITIALIZER, "model": MODEL_INITIALIZER}
        own = [name for field, name in by_field.items() if field in given]
        named = [name for name in own if name in message]
        return next(iter([*named, *own]), DATASET_INITIALIZER)

    # ---- whether an operator acts ----------------------------------------------------------------

    def _deletion(self) -> Iterator[JobProblem]:
        deleted = self._metadata.get("deletionTimestamp")
        if not deleted:
            return
        waits = ", ".join(self._job.finalizers) or "its objects"
        is_late = self._scope.is_older(str(deleted), DELETED_WITHIN)
        yield self._problem(
            Severity.WARNING if is_late else Severity.NOTE,
            "Deleting",
            f"the job is being deleted; it waits for {waits}",
            "Wait; if it lasts, see which pods or objects remain",
            f"kubectl get all -l dlion.dev/job-name={self._job.name}",
        )

    def _observation(self) -> Iterator[JobProblem]:
        managed_by = text(self._spec.get("managedBy"), MANAGED_BY)
        if self._job.is_dispatched:
            yield self._dispatch()
        elif managed_by != MANAGED_BY:
            advice = "Nothing here: that controller runs the job, elsewhere or later"
            if managed_by == MULTIKUEUE:
                advice = f"Add the label {QUEUE_LABEL}: MultiKueue dispatches queued jobs alone"
            yield self._problem(
                Severity.NOTE, "ManagedElsewhere",
                f"spec.managedBy is {managed_by}: DLion's operator leaves the job alone", advice,
            )  # fmt: skip
        elif not self._job.was_ever_observed:
            created = str(self._metadata.get("creationTimestamp", ""))
            is_late = self._scope.is_older(created, UNOBSERVED_AFTER)
            yield self._problem(
                Severity.ERROR if is_late else Severity.NOTE,
                "NotObserved",
                "no operator has observed this job",
                NOT_OBSERVED.split(". ", 1)[1].split(":")[0],
                "kubectl get pods -A -l app.kubernetes.io/name=dlion",
            )
        elif not self._job.is_observed and "generation" in self._metadata:
            yield self._problem(
                Severity.NOTE, "NotObserved",
                "the operator has not processed the last change of the manifest yet",
                "Wait some seconds; if it lasts, check the operator",
                "kubectl get pods -A -l app.kubernetes.io/name=dlion",
            )  # fmt: skip

    def _dispatch(self) -> JobProblem:
        reason = "ManagedElsewhere"
        if self._cluster:
            message = f"MultiKueue runs the job: its copy is in cluster {self._cluster}"
            advice = "The status is the copy's. Look for pods, logs and the model there"
            return self._problem(Severity.NOTE, reason, message, advice)
        message = "MultiKueue has no copy of the job in another cluster, or its place is not known"
        advice = "See the conditions and admission checks of its Workload"
        workload = dispatched_workload_name(self._job.name)
        command = f"kubectl describe workloads.kueue.x-k8s.io {workload}"
        return self._problem(Severity.NOTE, reason, message, advice, command)

    # ---- conditions ------------------------------------------------------------------------------

    def _outcome(self, outcome: ConditionView) -> Iterator[JobProblem]:
        code = outcome_exit_code(outcome)
        if outcome.type == ConditionType.SUCCEEDED:
            return
        ending = f"the run has failed ({outcome.reason}, exit code {int(code)} of `dlion watch`)"
        message = f"{ending}: {outcome.message}" if outcome.message else ending
        yield self._of_reason(Severity.ERROR, outcome.reason, message)

    def _conditions(self) -> Iterator[JobProblem]:
        consistent = self._job.condition(ConditionType.SPEC_CONSISTENT)
        if consistent is not None and consistent.status == "False":
            yield self._of_reason(Severity.ERROR, Reason.SPEC_DIFFERS, consistent.message)
        ready = self._job.condition(ConditionType.READY)
        for type_, severity in (
            (ConditionType.STALLED, Severity.ERROR),
            (ConditionType.DEGRADED, Severity.WARNING),
            (ConditionType.SUSPENDED, Severity.NOTE),
            (ConditionType.RECONCILING, Severity.NOTE),
        ):
            condition = self._job.condition(type_)
            if condition is None or not condition.is_true:
                continue
            if condition.reason in (Reason.WAITING_FOR_PEERS, Reason.BELOW_QUORUM):
                severity = Severity.WARNING
            # Each condition carries the message; Ready does in any case.
            message = condition.message or (ready.message if ready else "")
            yield self._of_reason(severity, condition.reason, message)
            return
        if ready is not None and ready.is_true and ready.reason == Reason.NOT_SELECTED:
            yield self._of_reason(Severity.NOTE, ready.reason, ready.message)
        elif ready is not None and not ready.is_true and ready.reason not in NO_PROBLEM:
            yield self._of_reason(Severity.WARNING, ready.reason, ready.message)

    # ---- sites and links -------------------------------------------------------------------------

    def _sites(self) -> Iterator[JobProblem]:
        sites = mappings_in(self._status.get("sites"))
        for site in sites:
            name, state = text(site.get("name")), site.get("state")
            message = text(site.get("message"), "")
            if state == "Unreachable":
                yield self._problem(
                    Severity.ERROR, "SiteUnreachable",
                    message or "its operator does not answer",
                    "Check the link, both operators and their lists of sites; its workers may "
                    "train on",
                    _PREFLIGHT, about=f"site/{name}",
                )  # fmt: skip
            elif state == "Refused":
                yield self._problem(
                    Severity.ERROR, "SiteRefused", message or "its manifest differs",
                    "Apply the same manifest there", f"dlion get {self._job.name} --context {name}",
                    about=f"site/{name}",
                )  # fmt: skip
            elif state == "Absent":
                yield self._problem(
                    Severity.WARNING, "SiteAbsent",
                    message or "its operator does not have this run",
                    "Apply the manifest there, or resume the job there",
                    "dlion submit FILE --context …", about=f"site/{name}",
                )  # fmt: skip
            elif state in _TAKES_PART and message:
                yield self._problem(
                    Severity.WARNING, "SiteProblem", message, "Correct what the message names",
                    about=f"site/{name}",
                )  # fmt: skip
        yield from self._quorum(sites)

    def _quorum(self, sites: list[dict[str, Any]]) -> Iterator[JobProblem]:
        quorum = self._spec.get("minSites", 1)
        ready = self._job.condition(ConditionType.READY)
        if not sites or not isinstance(quorum, int):
            return
        if ready is not None and ready.reason == Reason.BELOW_QUORUM:
            return  # the condition's problem names it
        taking = sum(site.get("state") in _TAKES_PART for site in sites)
        if taking < quorum:
            yield self._problem(
                Severity.ERROR, Reason.BELOW_QUORUM,
                f"{taking} of at least {quorum} sites (minSites) take part",
                *ADVICE[Reason.BELOW_QUORUM],
            )  # fmt: skip

    def _links(self) -> Iterator[JobProblem]:
        links = mapping_of(self._status.get("links"))
        ready = self._job.condition(ConditionType.READY)
        if not links or ready is None or not ready.is_true:
            return
        pairs = mappings_in(links.get("pairs"))
        down = [pair for pair in pairs if _has_links_down(pair)]
        for pair in down:
            yield self._problem(
                Severity.WARNING, "LinksDown",
                f"{pair['connected']} of {pair['expected']} links from {text(pair.get('pair'))} "
                "are up",
                "The workers dial on; check firewalls and addresses between them",
                f"dlion events {self._job.name} --types Warning",
            )  # fmt: skip
        if not down and _has_links_down(links):
            yield self._problem(
                Severity.WARNING, "LinksDown",
                f"{links['connected']} of {links['expected']} links between workers are up",
                "The workers dial on; see which pods do not run",
            )  # fmt: skip
        yield from self._missing_pairs(pairs)
        yield from self._slowest(pairs, text(links.get("slowest"), ""))

    def _missing_pairs(self, pairs: list[dict[str, Any]]) -> Iterator[JobProblem]:
        """Pairs of sites that take part and of which no site reports links."""
        from dlion_api.spec import Exchange  # most commands need no manifest

        ready = [
            text(site.get("name"))
            for site in mappings_in(self._status.get("sites"))
            if site.get("state") == "Ready"
        ]
        topology = mapping_of(self._spec.get("exchange")).get("topology", Exchange().topology)
        if not pairs or len(pairs) >= MAX_PAIRS or topology != "allToAll":
            return
        reported = {text(pair.get("pair")) for pair in pairs}
        wanted = [f"{one} to {other}" for one in ready for other in ready if one != other]
        missing = [pair for pair in wanted if pair not in reported]
        if missing:
            yield self._problem(
                Severity.WARNING, "PairMissing",
                f"no links are reported from {', '.join(missing[:4])}",
                "Wait for that site's operator, then check the links from there", _PREFLIGHT,
            )  # fmt: skip

    def _slowest(self, pairs: list[dict[str, Any]], slowest: str) -> Iterator[JobProblem]:
        rates = [
            (rate, text(pair.get("pair")))
            for pair in pairs
            if (rate := _rate(pair)) is not None
        ]  # fmt: skip
        if len(rates) > 1:
            least, name = min(rates)
            message = f"the slowest link is from {name}: {least:g} Mbit/s"
        elif slowest:
            message = f"the slowest link is {slowest}"
        else:
            return
        yield self._problem(
            Severity.NOTE, "SlowestLink", message,
            "It bounds what the workers exchange; a preflight measures it",
            "dlion preflight FILE --contexts A,B --bandwidth",
        )  # fmt: skip


def _has_links_down(counts: Mapping[str, Any]) -> bool:
    connected, expected = counts.get("connected"), counts.get("expected")
    return isinstance(connected, int) and isinstance(expected, int) and connected < expected


def _rate(pair: Mapping[str, Any]) -> float | None:
    """The pair's Mbit/s; None if unknown or no positive number."""
    try:
        rate = float(str(pair.get("megabitsPerSecond") or "nan"))
    except ValueError:
        return None
    return rate if 0 < rate < float("inf") else None
