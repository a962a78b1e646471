"""Diagnose a run in progress: from its Jobs, pods and workers to a phase and a message. Pure."""

from dataclasses import replace

from dlion_api import cluster_names as names
from dlion_api.names import SiteName
from dlion_api.status import Reason
from dlion_operator.pki.named_authority import NamedAuthority
from dlion_operator.plan.initializer_state import failed_initializer, running_initializer
from dlion_operator.plan.missing_pods import keeper_problems, pod_creation_problems
from dlion_operator.plan.objects.exposure import exposure_problems, is_exposure_overdue
from dlion_operator.plan.observed import PodProblem, PodView, RunView, first_of
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase
from dlion_operator.plan.outcome.training_history import has_trained
from dlion_operator.plan.queues.queueing import diagnose_queue
from dlion_operator.plan.runs import Run
from dlion_operator.plan.startup_delays import (
    JOIN_TIMEOUT,
    START_TIMEOUT,
    STUCK_AFTER,
    is_gated,
    is_start_overdue,
    join_delay,
    keeper_not_ready,
    silence_duration,
    start_delay,
    starts_since,
)

MAX_LISTED = 5
START_AND_JOIN_TIMEOUT = START_TIMEOUT + JOIN_TIMEOUT
"""Counted from a pod's creation. No known start takes longer."""


def diagnose(run: Run) -> Diagnosis:
    """Diagnose a run in progress."""
    return with_note(_diagnose(run), run.too_many_workers)


def _diagnose(run: Run) -> Diagnosis:
    if run.view.stop_reason and has_trained(run):
        # Workers leave one after the other; none of them is lost. An operator that has started
        # meanwhile hears no more steps, and nothing of those that have left.
        return _diagnose_keeper(run, f"ending: {run.view.stop_reason}")
    if run.view.training:
        return _diagnose_training(run)
    if problems := pod_creation_problems(run):
        message = join_messages([problem.message for problem in problems])
        return Diagnosis(JobPhase.STUCK, Reason.PODS_REFUSED, message)
    if problems := _pod_problems(run):
        message = join_messages([problem.message for problem in problems])
        if _is_stuck(run):
            return Diagnosis(JobPhase.STUCK, problems[0].reason, message)
        return Diagnosis(JobPhase.WAITING, Reason.WORKERS_STARTING, message)
    return _diagnose_start(run)


def with_last_error(diagnosis: Diagnosis, last_error: str) -> Diagnosis:
    """Add a lasting error of the operator. Workers that train continue training."""
    if not last_error:
        return diagnosis
    message = join_messages([f"cannot be kept up: {last_error}; retrying", diagnosis.message])
    if diagnosis.phase in (JobPhase.WAITING, JobPhase.STUCK):
        return Diagnosis(JobPhase.STUCK, Reason.UPKEEP_FAILING, message)
    return replace(diagnosis, message=message)


def with_note(diagnosis: Diagnosis, note: str) -> Diagnosis:
    if not note:
        return diagnosis
    return replace(diagnosis, message=join_messages([diagnosis.message, note]))


def missing_authority(run: Run) -> Diagnosis | None:
    """Diagnose a run that cannot start because nothing can sign its workers' certificates. None: it
    can."""
    authority = run.authority
    if authority is None or not authority.problem:
        return None
    is_overdue = authority.missing_s >= STUCK_AFTER.total_seconds()
    phase = JobPhase.STUCK if is_overdue else JobPhase.WAITING
    return Diagnosis(phase, Reason.NO_AUTHORITY, authority.problem)


def with_signing_problem(diagnosis: Diagnosis, authority: NamedAuthority | None) -> Diagnosis:
    """Add that nothing can be signed now. Workers with certificates continue."""
    if authority is None or not authority.problem:
        return diagnosis
    message = join_messages(
        [f"no certificate can be signed: {authority.problem}", diagnosis.message]
    )
    if diagnosis.reason in (Reason.WORKERS_STARTING, Reason.NOT_JOINING):
        return Diagnosis(diagnosis.phase, Reason.NO_AUTHORITY, message)
    return replace(diagnosis, message=message)


def _diagnose_training(run: Run) -> Diagnosis:
    view = run.view
    training = {site: _training_workers(view, site) for site in {*view.ready, *view.linked}}
    sites, quorum = [site for site, count in training.items() if count], run.job.spec.min_sites
    if len(sites) < quorum:
        if queued := diagnose_queue(run):
            return queued
        few = f"{len(sites)} of at least {quorum} sites (minSites) take part"
        message = join_messages([few, *_revocation_messages(run), *_remote_problems(view)])
        return Diagnosis(JobPhase.WAITING, Reason.BELOW_QUORUM, message)
    here = training.pop(run.site, 0)
    size, total = run.trusted_size, run.trusted_total(view)
    elsewhere = total - size
    there = sum(training.values())
    link_problems = [*_remote_problems(view), *exposure_problems(run)]
    if here < size or there < elsewhere:
        messages = [f"{here} of {size} workers train here, {there} of {elsewhere} elsewhere"]
        messages += [*_revocation_messages(run), *_queue_messages(run), *link_problems]
        problems = (*pod_creation_problems(run), *_pod_problems(run))
        messages += [problem.message for problem in problems]
        messages += [pod.failure for pod in run.pods if pod.failure]
        return Diagnosis(JobPhase.DEGRADED, Reason.PEERS_LOST, join_messages(messages))
    workers = "worker trains" if here + there == 1 else "workers train"
    messages = [f"{here + there} {workers}", *_queue_messages(run), *run.oversized_groups]
    messages += link_problems
    if revoked := _revocation_messages(run):
        message = join_messages([*revoked, *messages])
        return Diagnosis(JobPhase.DEGRADED, Reason.WORKERS_REVOKED, message)
    return _diagnose_keeper(run, join_messages(messages))


def _diagnose_keeper(run: Run, message: str) -> Diagnosis:
    """Diagnose a run in which all workers train, depending on its keeper."""
    problems = keeper_problems(run)
    if not problems:
        return Diagnosis(JobPhase.TRAINING, Reason.TRAINING, message)
    absent = "the keeper is away: checkpoints and the model wait for it"
    message = join_messages([absent, *(problem.message for problem in problems), message])
    return Diagnosis(JobPhase.KEEPER_AWAY, Reason.KEEPER_UNAVAILABLE, message)


def _training_workers(view: RunView, site: SiteName) -> int:
    """Number of that site's workers that train along, as far as is known here.

    The site's operator reports it. While that one is unreachable, or has not heard from all its
    workers, the links count. Without federation the joined workers count.
    """
    there, ready, linked = view.remote.get(site), view.ready.get(site, 0), view.linked.get(site, 0)
    if there is None or (there.is_reachable and there.knows_all):
        return ready
    return max(ready, linked) if linked or there.is_reachable else 0


def _revocation_messages(run: Run) -> list[str]:
    """Messages that name workers not accepted here, and those not accepted elsewhere."""
    acting, others = [], []
    for each in run.revocations:
        why = f": {each.reason}" if each.reason else ""
        if each.is_effective:
            how = "quarantined" if each.is_automatic else "revoked"
            acting.append(f"{each.name} is {how} at {each.by}{why}")
        else:
            others.append(f"{each.by} refuses {each.name}{why}")
    return acting + others


def _queue_messages(run: Run) -> list[str]:
    queued = diagnose_queue(run)
    return [queued.message] if queued else []


def _diagnose_start(run: Run) -> Diagnosis:
    if queued := diagnose_queue(run):
        return queued
    view = run.view
    here, total = view.ready.get(run.site, 0), run.trusted_total(view)
    size, revoked = run.trusted_size, _revocation_messages(run)
    if here >= size and (problems := exposure_problems(run)):
        phase = JobPhase.STUCK if is_exposure_overdue(run) else JobPhase.WAITING
        return Diagnosis(phase, Reason.NOT_EXPOSED, join_messages(problems))
    joined = sum(view.ready.values())
    if here >= size and joined < total:
        messages = [f"{joined} of {total} workers have joined", *revoked, *_remote_problems(view)]
        if view.remote and (few := _quorum_shortfall(run)):
            return Diagnosis(JobPhase.WAITING, Reason.BELOW_QUORUM, join_messages([few, *messages]))
        return Diagnosis(JobPhase.WAITING, Reason.WAITING_FOR_PEERS, join_messages(messages))
    if here >= size and view.all_joined_s >= JOIN_TIMEOUT.total_seconds():
        return Diagnosis(JobPhase.STUCK, Reason.NOT_LINKED, _not_linked_message(run))
    if downloading := _initializing(run):
        return Diagnosis(JobPhase.WAITING, Reason.INITIALIZING, downloading)
    running = sum(pod.phase == "Running" for pod in run.pods)
    starting = join_messages(
        [f"{here} of {size} workers have joined, {running} pods run", *revoked]
    )
    if _is_join_overdue(run):
        minutes = START_AND_JOIN_TIMEOUT.total_seconds() / 60
        hint = f"see `kubectl describe jobs,pods -l {names.JOB_LABEL}={run.job.key.name}`"
        late = f"{starting}, {minutes:.0f} minutes after they were made; {hint} and the logs"
        return Diagnosis(JobPhase.STUCK, Reason.NOT_JOINING, late)
    return Diagnosis(JobPhase.WAITING, Reason.WORKERS_STARTING, starting)


def _initializing(run: Run) -> str:
    """Which workers still download. Empty: none."""
    found = ((pod, running_initializer(pod.document)) for pod in run.trusted_pods)
    pods = [(pod, name) for pod, name in found if name]
    if not pods:
        return ""
    (first, its_container), *_ = pods
    shown = [f"{pod.worker} ({name}{_progress(run, pod, name)})" for pod, name in pods]
    listed = first_of(shown, MAX_LISTED)
    count = f"{len(pods)} of {run.trusted_size} workers download their data or model"
    hint = f"see `kubectl logs {first.name} -c {its_container}`"
    failed = [pod.failure for pod in run.pods if failed_initializer(pod.document)]
    return join_messages([f"{count}: {listed}", hint, *failed])


def _progress(run: Run, pod: PodView, initializer: str) -> str:
    """How much that pod's initializer has downloaded. Empty: it has not reported yet."""
    progress = run.view.downloads.get(f"{run.site}/{pod.worker}")
    if progress is None or (progress.container, progress.pod_uid) != (initializer, pod.uid):
        return ""
    return f", {progress}"


def _not_linked_message(run: Run) -> str:
    minutes = JOIN_TIMEOUT.total_seconds() / 60
    arrived = f"all {run.trusted_total(run.view)} workers have joined"
    messages = [f"{arrived}, and none has begun to train in {minutes:.0f} minutes"]
    if (links := run.view.links) is not None:
        messages.append(f"{links.connected} of {links.expected} links between them are up")
    # Of workers alone: kubectl gives up at the first pod without that container, as the keeper's.
    chosen = f"{names.JOB_LABEL}={run.job.key.name},{names.COMPONENT_LABEL}={names.WORKER}"
    hint = f"`kubectl logs -l {chosen} -c trainer`"
    messages.append(f"see events PeersUnreached, or {hint}, for the blocked direction")
    return join_messages(messages)


def _is_join_overdue(run: Run) -> bool:
    """Whether a worker with a pod should have joined by now, whatever the obstacle."""
    if any(map(is_gated, run.pods)):
        return False
    return any(
        min(silence_duration(run, pod), run.observed.now - since) >= START_AND_JOIN_TIMEOUT
        for pod in run.trusted_pods
        if (since := starts_since(pod)) is not None and not pod.is_finished
        if pod.deleted_at is None and not running_initializer(pod.document)
    )


def _quorum_shortfall(run: Run) -> str:
    """Whether fewer sites than the quorum have this run by this manifest. Empty: enough have."""
    others = [site for site in run.view.remote.values() if site.has_run and site.agrees]
    have, quorum = 1 + len(others), run.job.spec.min_sites
    return f"{have} of at least {quorum} sites (minSites) have this run" if have < quorum else ""


def _remote_problems(view: RunView) -> list[str]:
    """Problems between this site and others, and differences between manifests."""
    messages = [f"{site}: {each.problem}" for site, each in view.remote.items() if each.problem]
    return [*messages, view.drift] if view.drift else messages


def _pod_problems(run: Run) -> list[PodProblem]:
    now = run.observed.now
    starting = [pod.problem() or start_delay(pod, now) for pod in (*run.pods, *run.keepers)]
    starting += [
        keeper_not_ready(pod, run.observed.unready_s) for pod in run.keepers if not pod.problem()
    ]
    running = [join_delay(run, pod) for pod in run.trusted_pods]
    return [problem for problem in (*starting, *running) if problem]


def _is_stuck(run: Run) -> bool:
    pods = [pod for pod in run.pods if is_start_overdue(pod, run.observed.now)]
    keepers = [pod for pod in run.keepers if is_start_overdue(pod, run.observed.now)]
    return bool(_pod_problems(replace(run, pods=pods, keepers=keepers)))


def join_messages(messages: list[str]) -> str:
    """Join messages into one; of many only the first few, and the number of the rest."""
    more = len(messages) - MAX_LISTED
    return "; ".join(messages[:MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
