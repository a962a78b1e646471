"""The status of a job, written out: from a finding and what the coordinator knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Literal

from dlion_api.document import to_document
from dlion_api.names import SiteName
from dlion_api.status import Condition, SiteStatus, Status, state_of
from dlion_operator.job_view import moment
from dlion_operator.observed import Observed, RemoteView, RunView
from dlion_operator.runs import Run
from dlion_operator.situations import Consistency, Finding, Situation, conditions

TELEMETRY = (
    "trainerStatus", "stepsPerSecond", "links", "readyWorkers", "readySites", "sites"
)  # fmt: skip
"""Fields that change all the time while a job trains."""
HEARD_TO_WITHIN = timedelta(seconds=60)

KNOWS_NO_OTHERS = "this operator is told of no other sites; name them in the chart's values (sites)"


def bare_status(finding: Finding, seen: Observed) -> dict[str, Any]:
    """The status of a job that has no run here."""
    held = _conditions(finding, seen)
    spec = seen.document.get("spec") or {}
    status = Status(
        observed_generation=_generation(seen),
        state=state_of(held).value,
        run_id=str(spec.get("runId", ""))[:24],
        conditions=held,
    )
    return to_document(status)


def run_status(finding: Finding, run: Run, seen: Observed) -> dict[str, Any]:
    """The status of a job with a run here."""
    held = _conditions(finding, seen)
    view = seen.run or seen.elsewhere
    ended = finding.situation in (Situation.SUCCEEDED, Situation.FAILED)
    total = run.size_of_all(view)
    sites = tuple(_site(site.name, run, view, seen) for site in run.job.spec.sites)
    status = Status(
        observed_generation=_generation(seen),
        state=state_of(held).value,
        run_id=run.job.key.run_id,
        spec_hash=run.spec_hash,
        conditions=held,
        sites=() if ended else sites,
        ready_sites=f"{sum(site.state == 'Ready' for site in sites)}/{len(sites)}",
        ready_workers=f"{min(sum(view.ready.values()), total)}/{total}",
        steps_per_second="" if ended else view.steps_per_second,
        links=None if ended else view.links,
        trainer_status=view.trainer_status,
    )
    document = to_document(status)
    if view.trainer_status is None:
        _keep_telemetry(document, seen, run)
    if ended or view.stop_reason:
        _as_before_the_end(document, seen, run)
    if finding.situation is Situation.SUCCEEDED:
        _crown(document, run)
    return document


def _keep_telemetry(document: dict[str, Any], seen: Observed, run: Run) -> None:
    """An operator that has just started does not know yet how far the run has come."""
    before = _before(seen, run)
    if "trainerStatus" in before:
        document["trainerStatus"] = before["trainerStatus"]


def _as_before_the_end(document: dict[str, Any], seen: Observed, run: Run) -> None:
    """Who took part, though workers leave one after the other now."""
    before = _before(seen, run)
    for name in ("readyWorkers", "readySites"):
        document[name] = before.get(name, document[name])
    if document.get("sites"):
        document["sites"] = before.get("sites", document["sites"])


def _crown(document: dict[str, Any], run: Run) -> None:
    """All the way has been gone."""
    total = document["readyWorkers"].partition("/")[2]
    document["readyWorkers"] = f"{run.succeeded}/{total}"
    trainer = dict(document.get("trainerStatus") or {})
    trainer |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    document["trainerStatus"] = trainer


def _before(seen: Observed, run: Run) -> Mapping[str, Any]:
    """The status as it stands, if it is of this run."""
    status = seen.document.get("status") or {}
    return status if status.get("runId") == run.job.key.run_id else {}


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
