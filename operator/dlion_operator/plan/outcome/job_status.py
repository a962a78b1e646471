"""Build the status of a job from a diagnosis and the coordinator's view. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

from dlion_api.document import schema, to_document
from dlion_api.endings import is_stop_rule
from dlion_api.names import SiteName
from dlion_api.status import (
    MAX_REVOKED,
    AttemptStatus,
    Condition,
    ConditionType,
    Reason,
    RevokedStatus,
    SiteStatus,
    Status,
    state_of,
)
from dlion_operator.model.job_view import format_time, generation_of, job_key, parse_time
from dlion_operator.plan.observed import Observed, RemoteView, RunView
from dlion_operator.plan.outcome.job_phases import (
    Diagnosis,
    JobPhase,
    SpecConsistency,
    job_conditions,
)
from dlion_operator.plan.outcome.run_outcome import model_ranks, stop_reason
from dlion_operator.plan.outcome.training_history import has_trained
from dlion_operator.plan.runs import Run, status_of_run

TELEMETRY = (
    "trainerStatus", "stepsPerSecond", "links", "readyWorkers", "readySites", "sites"
)  # fmt: skip
"""Fields that change constantly while a job trains."""
_FIELDS = frozenset(schema(Status)["properties"])
HEARTBEAT_TOLERANCE = timedelta(seconds=60)

NO_REMOTE_SITES = "this operator knows no other sites; name them in the chart's values (sites)"


def status_without_run(diagnosis: Diagnosis, observed: Observed) -> dict[str, Any]:
    """The status of a job without a run here. What it reports of its run stays."""
    held = _conditions(diagnosis, observed)
    run_id = job_key(observed.document).run_id[:24]
    status = Status(
        observed_generation=generation_of(observed.document),
        state=state_of(held).value,
        run_id=run_id,
        conditions=held,
    )
    return {**status_of_run(observed, run_id), **_completed(status, observed)}


def run_status(
    diagnosis: Diagnosis, run: Run, attempt: AttemptStatus | None = None
) -> dict[str, Any]:
    """Return the status of a job with a run. `attempt`: the one that follows a failed one."""
    held = _conditions(diagnosis, run.observed)
    view = run.observed.run or run.observed.remote_view
    ended = diagnosis.phase in (JobPhase.SUCCEEDED, JobPhase.FAILED)
    total = run.total_size(view)
    sites = tuple(_site(site.name, run, view) for site in run.job.spec.sites)
    before = run.status
    status = Status(
        observed_generation=generation_of(run.observed.document),
        state=state_of(held).value,
        run_id=run.job.key.run_id,
        spec_hash=run.spec_hash,
        training_start_time=_training_start(run),
        conditions=held,
        sites=() if ended else sites,
        revoked=_revoked(run),
        ready_sites=f"{sum(site.state == 'Ready' for site in sites)}/{len(sites)}",
        ready_workers=f"{min(sum(view.ready.values()), total)}/{total}",
        steps_per_second="" if ended else view.steps_per_second,
        links=None if ended else view.links,
        trainer_status=view.trainer_status,
    )
    document = _completed(status, run.observed)
    if attempt is not None:
        document["attempt"] = to_document(attempt)
    elif "attempt" in before:
        document["attempt"] = before["attempt"]
    if "trainerStatus" in before and _is_same_progress(document, before):
        document["trainerStatus"] = before["trainerStatus"]
    if ended or view.stop_reason:
        _keep_participants(document, before)
    if ended:
        _write_end(document, diagnosis, run)
    return document


def _is_same_progress(document: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether progress is unknown or unchanged: an operator that has just started does not know it
    yet, and the time alone must not cause a write."""
    new, old = (each.get("trainerStatus") or {} for each in (document, before))
    return not new or new | {"lastUpdatedTime": old.get("lastUpdatedTime")} == old


def _completed(status: Status, observed: Observed) -> dict[str, Any]:
    """The status as a document, with the entries of others: conditions of other controllers, and
    fields of a newer operator, which may be installed again."""
    document = to_document(status)
    before = status_of_run(observed, status.run_id)
    document |= {name: value for name, value in before.items() if name not in _FIELDS}
    ours = set(ConditionType)
    all_before = (observed.document.get("status") or {}).get("conditions") or ()
    document["conditions"] += [each for each in all_before if each.get("type") not in ours]
    return document


def _training_start(run: Run) -> str | None:
    """When this site's workers were first observed to train in this run, or in its latest attempt
    that trained, or None."""
    previous: str | None = run.status.get("trainingStartTime")
    if not has_trained(run) or run.earlier_jobs:
        return previous
    began, attempt_start = parse_time(previous), run.attempt_start
    is_of_earlier = began is None or (attempt_start is not None and began < attempt_start)
    return format_time(run.observed.now) if is_of_earlier else previous


def _revoked(run: Run) -> tuple[RevokedStatus, ...]:
    """The revocations. Where there are too many, those that were made here come first, as a new
    operator takes its quarantines from the status; then those that act here."""
    chosen = sorted(run.revocations, key=lambda each: (each.by != run.site, not each.is_effective))
    return tuple(
        RevokedStatus(
            name=each.name,
            by=each.by,
            effective=each.is_effective,
            reason=each.reason,
            automatic=each.is_automatic,
        )
        for each in sorted(chosen[:MAX_REVOKED], key=lambda each: (each.name, each.by))
    )


def _keep_participants(document: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Keep the participants in the status, although workers leave one after the other now."""
    for name in ("readyWorkers", "readySites"):
        document[name] = before.get(name, document[name])
    if document.get("sites"):
        document["sites"] = before.get("sites", document["sites"])


def _write_end(document: dict[str, Any], diagnosis: Diagnosis, run: Run) -> None:
    """Write the final progress: 100 % only if the stop rule was met."""
    trainer = dict(document.get("trainerStatus") or {})
    trainer.pop("estimatedRemainingSeconds", None)
    if is_stop_rule(stop_reason(run)):
        trainer |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    if trainer:
        document["trainerStatus"] = trainer
    if diagnosis.reason not in (Reason.COMPLETED, Reason.PARTIAL):
        return
    total = document["readyWorkers"].partition("/")[2]
    document["readyWorkers"] = f"{run.succeeded}/{total}"
    sites = {worker.site for worker in run.workers if worker.rank in model_ranks(run)}
    took_part = len(sites | {run.site})
    ready_before, _, of = document["readySites"].partition("/")
    document["readySites"] = f"{took_part if sites else max(took_part, int(ready_before))}/{of}"


def _site(name: str, run: Run, view: RunView) -> SiteStatus:
    site = SiteName(name)
    ready = view.ready.get(site, 0)
    workers = run.size if name == run.site else run.remote_size(site, view)
    trusted = workers - sum(worker.site == name for worker in run.revoked_workers)
    status = SiteStatus(name=name, state="Ready", workers=workers, ready_workers=ready)
    if name == run.site:
        return replace(
            status,
            state="Ready" if ready >= trusted else "Starting",
            spec_hash=run.spec_hash,
            iteration=view.iteration or None,
            samples_per_second=_rate(view.samples_per_s),
        )
    there = view.remote.get(site)
    if there is None and ready >= trusted:
        return status
    if there is None:
        return replace(status, state="Unreachable", message=NO_REMOTE_SITES)
    return replace(
        status,
        state=_remote_state(there, is_complete=ready >= trusted),
        spec_hash=there.spec_hash,
        message=(there.problem if there.agrees else view.drift)[:1024],
        iteration=there.iteration or None,
        samples_per_second=_rate(there.samples_per_s),
        last_heartbeat_time=_heartbeat_time(name, there, run),
    )


def _remote_state(
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


def _heartbeat_time(name: str, there: RemoteView, run: Run) -> str | None:
    """When that site was last heard. A recent value stays as it is: heartbeats alone must not cause
    status writes."""
    if there.heartbeat_age_s is None:
        return None
    heartbeat = run.observed.now - timedelta(seconds=there.heartbeat_age_s)
    sites = run.status.get("sites") or ()
    before = [each.get("lastHeartbeatTime") for each in sites if each.get("name") == name]
    previous = parse_time(before[0]) if before else None
    is_recent = previous is not None and abs(heartbeat - previous) < HEARTBEAT_TOLERANCE
    return str(before[0]) if is_recent else format_time(heartbeat)


def _conditions(diagnosis: Diagnosis, observed: Observed) -> tuple[Condition, ...]:
    now, consistency = format_time(observed.now), _consistency(observed.run)
    return job_conditions(diagnosis, observed.document, now, consistency)


def _consistency(view: RunView | None) -> SpecConsistency:
    """Whether the sites' manifests are the same, as far as all sites have reported."""
    if view is None:
        return SpecConsistency()
    if view.drift:
        return SpecConsistency("False", view.drift)
    is_known = view.remote and all(site.has_run for site in view.remote.values())
    return SpecConsistency("True" if is_known else "Unknown")
