"""The status of a job, written out: from a finding and what the coordinator knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Literal

from dlion_api.document import schema, to_document
from dlion_api.endings import is_stop_rule
from dlion_api.names import SiteName
from dlion_api.status import Condition, ConditionType, Reason, SiteStatus, Status, state_of
from dlion_operator.job_view import moment
from dlion_operator.observed import Observed, RemoteView, RunView
from dlion_operator.run_ends import has_trained, model_ranks, status_of_run, stop_reason
from dlion_operator.runs import Run
from dlion_operator.situations import Consistency, Finding, Situation, conditions

TELEMETRY = (
    "trainerStatus", "stepsPerSecond", "links", "readyWorkers", "readySites", "sites"
)  # fmt: skip
"""Fields that change all the time while a job trains."""
_FIELDS = frozenset(schema(Status)["properties"])
HEARD_TO_WITHIN = timedelta(seconds=60)

KNOWS_NO_OTHERS = "this operator is told of no other sites; name them in the chart's values (sites)"


def bare_status(finding: Finding, seen: Observed) -> dict[str, Any]:
    """The status of a job of which nothing is done here. What was said of its run stays."""
    held = _conditions(finding, seen)
    spec = seen.document.get("spec") or {}
    run_id = str(spec.get("runId", ""))[:24]
    status = Status(
        observed_generation=_generation(seen),
        state=state_of(held).value,
        run_id=run_id,
        conditions=held,
    )
    return {**status_of_run(seen, run_id), **_completed(status, seen)}


def run_status(finding: Finding, run: Run, seen: Observed) -> dict[str, Any]:
    """The status of a job with a run here."""
    held = _conditions(finding, seen)
    view = seen.run or seen.elsewhere
    ended = finding.situation in (Situation.SUCCEEDED, Situation.FAILED)
    total = run.size_of_all(view)
    sites = tuple(_site(site.name, run, view, seen) for site in run.job.spec.sites)
    before = _before(seen, run)
    status = Status(
        observed_generation=_generation(seen),
        state=state_of(held).value,
        run_id=run.job.key.run_id,
        spec_hash=run.spec_hash,
        training_start_time=_training_start(run, seen),
        conditions=held,
        sites=() if ended else sites,
        ready_sites=f"{sum(site.state == 'Ready' for site in sites)}/{len(sites)}",
        ready_workers=f"{min(sum(view.ready.values()), total)}/{total}",
        steps_per_second="" if ended else view.steps_per_second,
        links=None if ended else view.links,
        trainer_status=view.trainer_status,
    )
    document = _completed(status, seen)
    if view.trainer_status is None and "trainerStatus" in before:
        # An operator that has just started does not know yet how far the run has come.
        document["trainerStatus"] = before["trainerStatus"]
    if ended or view.stop_reason:
        _keep_participants(document, before)
    if ended:
        _write_end(document, finding, run, seen)
    return document


def _completed(status: Status, seen: Observed) -> dict[str, Any]:
    """The document of that status, with what others have written: conditions of other controllers,
    and fields of a newer operator, which may come back."""
    document = to_document(status)
    before = status_of_run(seen, status.run_id)
    document |= {name: value for name, value in before.items() if name not in _FIELDS}
    ours = set(ConditionType)
    all_before = (seen.document.get("status") or {}).get("conditions") or ()
    document["conditions"] += [each for each in all_before if each.get("type") not in ours]
    return document


def _training_start(run: Run, seen: Observed) -> str | None:
    """When this site's workers were first seen to train in this run; None: they were not."""
    said = _before(seen, run).get("trainingStartTime")
    if said is None and has_trained(run, seen):
        return as_kubernetes(seen.now)
    return said


def _keep_participants(document: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Those that took part, though workers leave one after the other now."""
    for name in ("readyWorkers", "readySites"):
        document[name] = before.get(name, document[name])
    if document.get("sites"):
        document["sites"] = before.get("sites", document["sites"])


def _write_end(document: dict[str, Any], finding: Finding, run: Run, seen: Observed) -> None:
    """The progress that was reached: 100 % only where the stop rule was met."""
    trainer = dict(document.get("trainerStatus") or {})
    trainer.pop("estimatedRemainingSeconds", None)
    if is_stop_rule(stop_reason(run, seen)):
        trainer |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    if trainer:
        document["trainerStatus"] = trainer
    if finding.reason not in (Reason.COMPLETED, Reason.PARTIAL):
        return
    total = document["readyWorkers"].partition("/")[2]
    document["readyWorkers"] = f"{run.succeeded}/{total}"
    sites = {worker.site for worker in run.workers if worker.rank in model_ranks(run)}
    took_part = len(sites | {run.site})
    said, _, of = document["readySites"].partition("/")
    document["readySites"] = f"{took_part if sites else max(took_part, int(said))}/{of}"


def _before(seen: Observed, run: Run) -> Mapping[str, Any]:
    """The status as it stands, if it is of this run."""
    return status_of_run(seen, run.job.key.run_id)


def _site(name: str, run: Run, view: RunView, seen: Observed) -> SiteStatus:
    site = SiteName(name)
    ready = view.ready.get(site, 0)
    if name == run.site:
        return SiteStatus(
            name=name,
            state="Ready" if ready >= run.size else "Starting",
            workers=run.size,
            ready_workers=ready,
            spec_hash=run.spec_hash,
            iteration=view.iteration or None,
            samples_per_second=_rate(view.samples_per_s),
        )
    workers = run.size_there(site, view)
    there = view.remote.get(site)
    if there is None:
        return SiteStatus(
            name=name,
            state="Ready" if ready >= workers else "Unreachable",
            workers=workers,
            ready_workers=ready,
            message="" if ready >= workers else KNOWS_NO_OTHERS,
        )
    return SiteStatus(
        name=name,
        state=_state_there(there, is_complete=ready >= workers),
        workers=workers,
        ready_workers=ready,
        spec_hash=there.spec_hash,
        message=(there.problem if there.agrees else view.drift)[:1024],
        iteration=there.iteration or None,
        samples_per_second=_rate(there.samples_per_s),
        last_heartbeat_time=_heard_at(name, there, run, seen),
    )


def _state_there(
    there: RemoteView, *, is_complete: bool
) -> Literal["Ready", "Starting", "Absent", "Unreachable", "Refused"]:
    if not there.is_reachable:
        return "Unreachable"
    if not there.has_run:
        return "Absent"
    if not there.agrees:
        return "Refused"
    return "Ready" if is_complete else "Starting"


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.4g}" if samples_per_s else ""


def _heard_at(name: str, there: RemoteView, run: Run, seen: Observed) -> str | None:
    """When that site was last heard; as it was said before, while that is not long ago: heartbeats
    alone are no reason to write a status."""
    if there.heartbeat_age_s is None:
        return None
    heard = seen.now - timedelta(seconds=there.heartbeat_age_s)
    sites = _before(seen, run).get("sites") or ()
    before = [each.get("lastHeartbeatTime") for each in sites if each.get("name") == name]
    said = moment(before[0]) if before else None
    is_recent = said is not None and abs(heard - said) < HEARD_TO_WITHIN
    return str(before[0]) if is_recent else as_kubernetes(heard)


def _conditions(finding: Finding, seen: Observed) -> tuple[Condition, ...]:
    before = (seen.document.get("status") or {}).get("conditions") or ()
    return conditions(
        finding,
        before=before,
        generation=_generation(seen),
        now=as_kubernetes(seen.now),
        consistency=_consistency(seen.run),
    )


def _consistency(view: RunView | None) -> Consistency:
    """Whether the sites' manifests are the same, as far as all have said."""
    if view is None:
        return Consistency()
    if view.drift:
        return Consistency("False", view.drift)
    is_known = view.remote and all(site.has_run for site in view.remote.values())
    return Consistency("True" if is_known else "Unknown")


def _generation(seen: Observed) -> int:
    return int(seen.document["metadata"].get("generation") or 0)


def as_kubernetes(moment: datetime) -> str:
    """A time as Kubernetes writes it: UTC, whole seconds."""
    return moment.replace(microsecond=0).isoformat().replace("+00:00", "Z")
