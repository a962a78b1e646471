"""What is to be done about a job: from what is seen to a decision. Pure, level-based.

Looks at the world as it is, never at what was done before; so it may be asked at any time, as often
as one likes, and by an operator that has just started. Called by `reconcile`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.errors import Problem, SpecError
from dlion_api.names import JobKey, SiteName
from dlion_api.spec import load_job
from dlion_api.status import ConditionType, Reason
from dlion_operator import children
from dlion_operator.children.pods import owner_of
from dlion_operator.cluster import Kind
from dlion_operator.corrections import (
    CORRECTED,
    ignored_fields,
    is_corrected,
    made_again,
    manifest_digest,
    unreadable,
    wrong_template,
)
from dlion_operator.decisions import (
    Action,
    Apply,
    CloseRun,
    Create,
    Decision,
    Delete,
    FinishRun,
    OpenRun,
    Patch,
    StopRun,
)
from dlion_operator.exposure import addresses, exposing_objects, hindrances
from dlion_operator.findings import (
    hindered,
    noting,
    standing,
    unsigned,
    without_authority,
)
from dlion_operator.job_view import JobView, moment
from dlion_operator.news import news_of
from dlion_operator.observed import Observed
from dlion_operator.run_ends import (
    A_WORKER_FINISHED,
    ended_at,
    failure,
    has_trained,
    just_opened,
    status_of_run,
    too_long,
    verdict,
    why_over,
)
from dlion_operator.run_trust import authority_of, written
from dlion_operator.runs import Run, groups_of
from dlion_operator.settings import Settings
from dlion_operator.situations import Finding, Situation
from dlion_operator.statuses import bare_status, run_status
from dlion_operator.tidying import (
    earlier_runs,
    left_over,
    lost_pods,
    superfluous_services,
    unused_services,
    without_objects,
)

MANAGED_BY = "dlion.dev/operator"
MADE_ONCE = frozenset({Kind.CLAIM, Kind.CONFIG_MAP, Kind.DEPLOYMENT})
"""Workers of a run read what they were started with, whatever a newer operator fills in; but for
where that operator is and what it is known by, which new pods need (`children.to_follow`). A keeper
that is made anew loses what it keeps where it has no claim; a claim is the user's to change."""
FINISH_WITHIN = timedelta(seconds=60)
"""What workers have to save what they trained when a run is given up."""
KEPT_AT_LEAST = timedelta(seconds=60)
"""The keeper writes down how the run ended before anything goes."""
SERVED_AFTER_END = timedelta(minutes=10)
"""So long the keeper can hear that a run is over."""
LOOK_AGAIN_S = 10.0


def decide(seen: Observed, settings: Settings) -> Decision:
    """What is to be done about that job now."""
    document = seen.document
    if is_left_alone(document):
        is_ours = _managed_by(document) == MANAGED_BY
        released = lost_pods(seen) if is_ours else ()
        again_s = LOOK_AGAIN_S if is_ours and seen.leaving else None
        return Decision((CloseRun(), *released), look_again_s=again_s)
    unknown: list[Problem] = []
    try:
        job = load_job(document, unknown=unknown)
    except SpecError as error:
        run_id = _run_id(document)
        if ended_at(seen, run_id):
            return Decision((), _seen_again(seen))
        return _without_a_run(unreadable(error, seen, run_id), seen)
    if not groups_of(job, settings.site):
        words = f"spec.sites does not name this site, {settings.site}"
        return _without_a_run(Finding(Situation.NOT_SELECTED, Reason.NOT_SELECTED, words), seen)
    run = Run.of(job, seen, SiteName(settings.site))
    if ended := ended_at(seen, job.key.run_id):
        return _after_the_end(run, seen, settings, *ended)
    return _decide_run(run, seen, settings, ignored_fields(unknown))


def _run_id(document: Mapping[str, Any]) -> str:
    return str((document.get("spec") or {}).get("runId", ""))


def _without_a_run(finding: Finding, seen: Observed) -> Decision:
    """Nothing is done about this run; what is left of an earlier one goes all the same."""
    run_id = _run_id(seen.document)
    views = [JobView(document) for document in seen.jobs]
    strays = [view for view in views if view.run_id != run_id]
    metadata = seen.document["metadata"]
    key = JobKey(metadata["namespace"], metadata["name"], run_id)
    # Workers that train under a manifest that cannot be read are served on.
    closing = () if len(strays) < len(views) else (CloseRun(),)
    actions = (*closing, *left_over(strays, key, seen), *lost_pods(seen))
    return _told(finding, seen, bare_status(finding, seen), actions)


def is_left_alone(document: Mapping[str, Any]) -> bool:
    """Whether that job is on its way out, or somebody else's to act on."""
    is_going = bool(document["metadata"].get("deletionTimestamp"))
    return is_going or _managed_by(document) != MANAGED_BY


def _managed_by(document: Mapping[str, Any]) -> str:
    return str((document.get("spec") or {}).get("managedBy", MANAGED_BY))


# ---- a run that goes on ----------------------------------------------------------------------


def _decide_run(run: Run, seen: Observed, settings: Settings, note: str) -> Decision:
    """`note`: what else is to be said of its manifest."""
    cleaning = (*earlier_runs(run, seen), *lost_pods(seen))
    if run.job.spec.suspend:
        return _suspended(run, seen, settings, cleaning)
    if run.has_ended:
        return _ended(verdict(run, seen), run, seen, cleaning)
    if is_corrected(run, seen):
        status = run_status(CORRECTED, run, seen)
        return _told(CORRECTED, seen, status, (*cleaning, *made_again(run)))
    if given_up := _given_up(run, seen):
        return _ended(given_up, run, seen, cleaning)
    wrong = "" if run.is_complete else wrong_template(run, seen, settings)
    if not run.jobs and (finding := _unstarted(run, seen, wrong)):
        finding = noting(finding, note)
        making = () if wrong else _beginnings(run, seen, settings, finding)
        return _told(finding, seen, run_status(finding, run, seen), (*cleaning, *making))
    actions = (
        *cleaning,
        *superfluous_services(run, seen),
        _opened(run, seen, settings),
        *_objects(run, seen, settings, with_jobs=not wrong),
        *_changes(run),
        *_kept_trust(run, seen),
    )
    if why := _why_stop(run, seen):
        actions = (*actions, StopRun(why))
    unreached = hindrances(run, seen, settings)
    finding = unsigned(standing(run, seen, unreached), authority_of(run.job, seen.authority))
    finding = hindered(finding, wrong or (seen.refused.message if seen.refused else ""))
    finding = noting(hindered(finding, seen.hindrance), note)
    if _just_started(seen, finding, run):
        return Decision(actions, look_again_s=2.0)
    return _told(finding, seen, run_status(finding, run, seen), actions)


def _unstarted(run: Run, seen: Observed, wrong: str) -> Finding | None:
    """Why a run without Jobs gets none for now; None: it gets them. Nothing of it is final."""
    if wrong:
        return Finding(Situation.STUCK, Reason.INVALID_SPEC, wrong)
    if lacking := without_authority(run.job, seen):
        return lacking
    if seen.refused is not None:
        return Finding(Situation.STUCK, seen.refused.reason, seen.refused.message)
    return None


def _beginnings(
    run: Run, seen: Observed, settings: Settings, finding: Finding
) -> tuple[Action, ...]:
    """What is asked for of a run that has no Jobs yet."""
    opened = _opened(run, seen, settings)
    if finding.reason is Reason.NO_AUTHORITY:
        return (opened, *_requested(run, seen, settings))
    return (opened, *_objects(run, seen, settings))


def _suspended(
    run: Run, seen: Observed, settings: Settings, cleaning: tuple[Action, ...]
) -> Decision:
    finding = Finding(Situation.SUSPENDED, Reason.SUSPENDED, "spec.suspend is true")
    stopping = tuple(_halt(run))
    # While pods end in order they report, and the keeper hears of it.
    if run.pods and not _all_over(run):
        actions = (*cleaning, *stopping, _opened(run, seen, settings))
    else:
        actions = (*cleaning, *stopping, *unused_services(run, seen), CloseRun())
    return _told(finding, seen, run_status(finding, run, seen), actions)


def _opened(run: Run, seen: Observed, settings: Settings) -> OpenRun:
    age = seen.now - run.made_at if run.made_at else timedelta()
    return OpenRun(
        run.job,
        run.workers,
        run.spec_hash,
        age_s=max(0.0, age.total_seconds()),
        failed=run.failed_ranks,
        addresses=addresses(run, seen, settings),
        authority=authority_of(run.job, seen.authority),
        kept_bundles=run.kept_bundles,
    )


def _all_over(run: Run) -> bool:
    return all(pod.phase in ("Succeeded", "Failed") for pod in run.pods)


def _requested(run: Run, seen: Observed, settings: Settings) -> Iterator[Action]:
    """What cert-manager is asked for, where it is to make the job's authority."""
    if run.job.spec.tls.mode == "CertManager":
        yield Apply(children.authority_certificate(run.job, settings, owner_of(seen.document)))


def _objects(
    run: Run, seen: Observed, settings: Settings, *, with_jobs: bool = True
) -> Iterator[Action]:
    """Everything that belongs to the run, as it should be. `with_jobs`: its Jobs as well."""
    owner = owner_of(seen.document)
    yield from _requested(run, seen, settings)
    documents = [
        children.config_map(run.job, settings, owner, authority_pem=seen.authority_pem),
        children.headless_service(run.job, settings, owner),
        *children.keeper_objects(run.job, settings, owner),
    ]
    for document in documents:
        yield Create(document) if Kind.of(document) in MADE_ONCE else Apply(document)
    for group in run.groups if with_jobs else ():
        if group.name not in run.jobs:
            made = children.worker_job(run.job, group, settings, owner)
            digest = run.manifest_digest or manifest_digest(run.job)
            made["metadata"]["annotations"][names.MANIFEST_ANNOTATION] = digest
            yield Create(made)
    for service, document in exposing_objects(run, seen, settings):
        yield Apply(document, exposes=service)


def _changes(run: Run) -> Iterator[Action]:
    """What may change of a Job while it runs: whether it does, and its size."""
    for group in run.groups:
        view = run.jobs.get(group.name)
        if view is None or view.ended_at is not None:
            continue
        spec: dict[str, Any] = {}
        if view.suspended and not view.queued:
            spec["suspend"] = False
        if view.workers != (size := run.size_of(group)):
            # Not before Kueue has counted its pods; its `startTime` is set anew then.
            spec |= {"suspend": True} if view.is_emptied else {}
            spec |= {"parallelism": size, "completions": size}
        if spec:
            yield Patch(Kind.JOB, view.name, _of(view, spec))


def _kept_trust(run: Run, seen: Observed) -> Iterator[Action]:
    """By whom workers are known stays with the Jobs, for an operator that starts anew."""
    if seen.run is None or not seen.run.bundles:
        return
    kept = {names.AUTHORITIES_ANNOTATION: written(seen.run.bundles, run.site)}
    for view in run.jobs.values():
        if view.ended_at is None and not kept.items() <= view.annotations.items():
            patch = {"metadata": {"uid": view.uid, "annotations": kept}}
            yield Patch(Kind.JOB, view.name, patch)


def _why_stop(run: Run, seen: Observed) -> str:
    """Why workers are to finish what they are about and end the run; empty: they are not."""
    if too_long(run, seen.now):
        limit = run.job.spec.active_deadline_seconds
        return f"the run took longer than activeDeadlineSeconds ({limit} s)"
    if run.succeeded:
        # Whoever comes back now would wait for peers that are gone.
        return A_WORKER_FINISHED
    why = why_over(run, seen)
    return f"{', '.join(run.failed)} failed for good, and {why}" if why else ""


def _given_up(run: Run, seen: Observed) -> Finding | None:
    """A run that does not come to its end by itself, though it was asked to."""
    if too_long(run, seen.now - FINISH_WITHIN):
        return verdict(run, seen)
    if not has_trained(run, seen) and why_over(run, seen):
        return failure(run)
    return None


def _just_started(seen: Observed, finding: Finding, run: Run) -> bool:
    """Whether the status says more than an operator can know that has started just now."""
    conditions = status_of_run(seen, run.job.key.run_id).get("conditions") or ()
    said = {c.get("type"): c.get("status") for c in conditions}
    was_training = said.get(ConditionType.READY) == "True"
    was_training &= said.get(ConditionType.SUSPENDED) != "True"
    less = (Situation.WAITING, Situation.STUCK, Situation.DEGRADED)
    return was_training and finding.situation in less and just_opened(run, seen)


def _ended(finding: Finding, run: Run, seen: Observed, cleaning: tuple[Action, ...]) -> Decision:
    """The run is over: the keeper is told, and the status says so."""
    succeeded = finding.situation is Situation.SUCCEEDED
    # Once the status says so, what still runs is halted (`_after_the_end`): an operator that
    # is killed in between must not take a halted run for one that goes on.
    actions = (*cleaning, FinishRun(finding.message, succeeded))
    return _told(finding, seen, run_status(finding, run, seen), actions)


def _halt(run: Run) -> Iterator[Action]:
    """Pods that still run end; those that have ended keep their logs.

    A Job in a queue is made empty instead: Kueue starts any that it has admitted whenever it is
    suspended, and gives up the place of one whose size has changed.
    """
    for view in run.jobs.values():
        if view.ended_at is not None:
            continue
        if view.queued and view.workers:
            yield Patch(Kind.JOB, view.name, _of(view, {"parallelism": 0}))
        elif not view.queued and not view.suspended:
            yield Patch(Kind.JOB, view.name, _of(view, {"suspend": True}))


def _of(view: JobView, spec: dict[str, Any]) -> dict[str, Any]:
    """A patch that another Job of the same name refuses."""
    return {"metadata": {"uid": view.uid}, "spec": spec}


def _after_the_end(run: Run, seen: Observed, settings: Settings, type_: str, time: str) -> Decision:
    """`type_`, `time`: of the condition by which it is over."""
    age = seen.now - (moment(time) or seen.now)
    actions: list[Action] = [*earlier_runs(run, seen), *_halt(run), *lost_pods(seen)]
    actions += unused_services(run, seen)
    waits = [SERVED_AFTER_END]
    if age >= SERVED_AFTER_END:
        actions.append(CloseRun())
    elif seen.run is None:
        finish = FinishRun(_last_words(seen), type_ == ConditionType.SUCCEEDED)
        actions += [_opened(run, seen, settings), finish]
    ttl = run.job.spec.ttl_seconds_after_finished
    if ttl is not None:
        ttl = max(ttl, int(KEPT_AT_LEAST.total_seconds()))
        waits.append(timedelta(seconds=ttl))
        if age >= timedelta(seconds=ttl):
            actions += [Delete(Kind.JOB, view.name, view.uid) for view in run.jobs.values()]
            actions += without_objects(run.job.key)
    due = [(wait - age).total_seconds() for wait in waits if wait > age]
    due += [LOOK_AGAIN_S] if seen.leaving else []
    return Decision(tuple(actions), _seen_again(seen), look_again_s=min(due, default=None))


def _seen_again(seen: Observed) -> dict[str, Any]:
    """The status as it stands, said of the manifest as it is now."""
    generation = seen.document["metadata"].get("generation")
    return {**(seen.document.get("status") or {}), "observedGeneration": generation}


def _last_words(seen: Observed) -> str:
    conditions = (seen.document.get("status") or {}).get("conditions") or ()
    ready = (str(each.get("message")) for each in conditions if each.get("type") == "Ready")
    return next(ready, "") or "over"


def _told(
    finding: Finding, seen: Observed, status: dict[str, Any], actions: tuple[Action, ...]
) -> Decision:
    """With what of it is worth an event."""
    notices = news_of(finding, seen, status)
    # Of a suspended job nothing changes here, of its other sites something may.
    is_alone = len(status.get("sites") or ()) < 2
    is_idle = finding.situation is Situation.NOT_SELECTED or (
        finding.situation is Situation.SUSPENDED and is_alone
    )
    looks_again = seen.leaving or not is_idle
    return Decision(actions, status, notices, LOOK_AGAIN_S if looks_again else None)
