"""How a run stands: from its Jobs, pods and workers to a situation in words. Pure.

Called by `decide`; knows nothing of what is done about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from dlion_api import cluster_names as names
from dlion_api.names import SiteName
from dlion_api.spec import Job
from dlion_api.status import Reason
from dlion_operator.absences import keeper_troubles, podless
from dlion_operator.delays import (
    JOINED_WITHIN,
    STARTED_WITHIN,
    STUCK_AFTER,
    delay,
    is_held_back,
    is_old,
    silence,
    silent_for,
    unready,
)
from dlion_operator.exposure import is_late
from dlion_operator.job_authority import NamedAuthority
from dlion_operator.observed import NOTHING_KNOWN, Observed, RunView, Trouble
from dlion_operator.run_trust import authority_of
from dlion_operator.runs import Run
from dlion_operator.situations import Finding, Situation

MOST_NAMED = 5
TOGETHER_WITHIN = STARTED_WITHIN + JOINED_WITHIN
"""From a pod's making; nothing that is known takes longer."""
_QUEUED = Finding(Situation.WAITING, Reason.QUEUED, "waiting for a place in the queue")


def standing(run: Run, seen: Observed, unreached: Sequence[str] = ()) -> Finding:
    """How a run that goes on stands. `unreached`: what keeps other sites from workers here."""
    view = seen.run or NOTHING_KNOWN
    if view.stop_reason and view.training:
        # Workers leave one after the other: nobody is lost.
        return _kept(run, seen, f"ending: {view.stop_reason}")
    if view.training:
        return _training(run, view, seen, unreached)
    if lacking := podless(run, seen):
        words = joined([trouble.message for trouble in lacking])
        return Finding(Situation.STUCK, Reason.PODS_REFUSED, words)
    if troubles := _troubles(run, view, seen):
        words = joined([trouble.message for trouble in troubles])
        if _is_stuck(run, view, seen):
            return Finding(Situation.STUCK, troubles[0].reason, words)
        return Finding(Situation.WAITING, Reason.WORKERS_STARTING, words)
    return _starting(run, view, seen, unreached)


def hindered(finding: Finding, hindrance: str) -> Finding:
    """The same run, while the operator cannot do what it needs: who trains goes on training."""
    if not hindrance:
        return finding
    words = joined([f"cannot be kept up: {hindrance}; tried again", finding.message])
    if finding.situation in (Situation.WAITING, Situation.STUCK):
        return Finding(Situation.STUCK, Reason.UPKEEP_FAILING, words)
    return replace(finding, message=words)


def noting(finding: Finding, note: str) -> Finding:
    """The same, with a remark that changes nothing of it."""
    return replace(finding, message=joined([finding.message, note])) if note else finding


def without_authority(job: Job, seen: Observed) -> Finding | None:
    """Why nothing of a run is started: there is nothing to sign its workers' certificates with;
    None: there is."""
    found = authority_of(job, seen.authority)
    if found is None or not found.problem:
        return None
    is_late = found.missing_s >= STUCK_AFTER.total_seconds()
    situation = Situation.STUCK if is_late else Situation.WAITING
    return Finding(situation, Reason.NO_AUTHORITY, found.problem)


def unsigned(finding: Finding, found: NamedAuthority | None) -> Finding:
    """The same run, while nothing new can be signed: who has a certificate goes on."""
    if found is None or not found.problem:
        return finding
    words = joined([f"no certificate can be signed: {found.problem}", finding.message])
    if finding.reason in (Reason.WORKERS_STARTING, Reason.NOT_JOINING):
        return Finding(finding.situation, Reason.NO_AUTHORITY, words)
    return replace(finding, message=words)


def _training(run: Run, view: RunView, seen: Observed, unreached: Sequence[str]) -> Finding:
    training = {site: _train_along(view, site) for site in {*view.ready, *view.linked}}
    sites, quorum = [site for site, count in training.items() if count], run.job.spec.min_sites
    if len(sites) < quorum:
        if _is_queued(run):
            return _QUEUED
        few = f"{len(sites)} of at least {quorum} sites (minSites) take part"
        return Finding(Situation.WAITING, Reason.BELOW_QUORUM, joined([few, *_away(view)]))
    here = training.pop(run.site, 0)
    elsewhere = run.size_of_all(view) - run.size
    there = sum(training.values())
    if here < run.size or there < elsewhere:
        words = [f"{here} of {run.size} workers train here, {there} of {elsewhere} elsewhere"]
        words += [_QUEUED.message] if _is_queued(run) else []
        words += [*_away(view), *unreached]
        troubles = (*podless(run, seen), *_troubles(run, view, seen))
        words += [trouble.message for trouble in troubles]
        words += [pod.failure for pod in run.pods if pod.failure]
        return Finding(Situation.DEGRADED, Reason.PEERS_LOST, joined(words))
    workers = "worker trains" if here + there == 1 else "workers train"
    words = [f"{here + there} {workers}", *run.too_many, *_away(view), *unreached]
    return _kept(run, seen, joined(words))


def _kept(run: Run, seen: Observed, words: str) -> Finding:
    """That all train, and whether there is somebody to keep what they make."""
    troubles = keeper_troubles(run, seen)
    if not troubles:
        return Finding(Situation.TRAINING, Reason.TRAINING, words)
    said = "the keeper is away: checkpoints and the model wait for it"
    words = joined([said, *(trouble.message for trouble in troubles), words])
    return Finding(Situation.UNKEPT, Reason.KEEPER_UNAVAILABLE, words)


def _train_along(view: RunView, site: SiteName) -> int:
    """Workers of that site that train along, as far as is known here: its operator says so, or,
    while that is not heard or has not heard from all of them yet, links do. Without federation the
    workers that have joined."""
    there, ready, linked = view.remote.get(site), view.ready.get(site, 0), view.linked.get(site, 0)
    if there is None or (there.is_reachable and there.knows_all):
        return ready
    return max(ready, linked) if linked or there.is_reachable else 0


def _is_queued(run: Run) -> bool:
    """Whether Kueue has not admitted any group of this site, or has taken it back."""
    return bool(run.jobs) and all(job.suspended and job.queued for job in run.jobs.values())


def _starting(run: Run, view: RunView, seen: Observed, unreached: Sequence[str]) -> Finding:
    if _is_queued(run):
        return _QUEUED
    here, total = view.ready.get(run.site, 0), run.size_of_all(view)
    if here >= run.size and unreached:
        situation = Situation.STUCK if is_late(run, seen.now) else Situation.WAITING
        return Finding(situation, Reason.NOT_EXPOSED, joined([*unreached]))
    if here >= run.size and sum(view.ready.values()) < total:
        words = [f"{sum(view.ready.values())} of {total} workers have joined", *_away(view)]
        if view.remote and (few := _too_few_sites(run, view)):
            return Finding(Situation.WAITING, Reason.BELOW_QUORUM, joined([few, *words]))
        return Finding(Situation.WAITING, Reason.WAITING_FOR_PEERS, joined(words))
    if here >= run.size and view.gathered_s >= JOINED_WITHIN.total_seconds():
        return Finding(Situation.STUCK, Reason.NOT_LINKED, _unlinked(run, view))
    running = sum(pod.phase == "Running" for pod in run.pods)
    starting = f"{here} of {run.size} workers have joined, {running} pods run"
    if _is_overdue(run, view, seen.now):
        minutes = TOGETHER_WITHIN.total_seconds() / 60
        look = f"`kubectl describe jobs,pods -l {names.JOB_LABEL}={run.job.key.name}`"
        late = f"{starting}, {minutes:.0f} minutes after they were made; {look} and logs say why"
        return Finding(Situation.STUCK, Reason.NOT_JOINING, late)
    return Finding(Situation.WAITING, Reason.WORKERS_STARTING, starting)


def _unlinked(run: Run, view: RunView) -> str:
    """That all have joined, and none has found the others it waits for."""
    minutes = JOINED_WITHIN.total_seconds() / 60
    arrived = f"all {run.size_of_all(view)} workers have joined"
    words = [f"{arrived}, and none has begun to train in {minutes:.0f} minutes"]
    if view.links is not None:
        words.append(f"{view.links.connected} of {view.links.expected} links between them are up")
    look = f"`kubectl logs -l {names.JOB_LABEL}={run.job.key.name} -c trainer`"
    words.append(f"events PeersUnreached, or {look}, say which way is closed")
    return joined(words)


def _is_overdue(run: Run, view: RunView, now: datetime) -> bool:
    """Whether a worker whose pod is there should have joined by now, whatever keeps it from it."""
    if any(map(is_held_back, run.pods)):
        return False
    return any(
        min(silent_for(f"{run.site}/{pod.worker}", view), now - pod.made_at) >= TOGETHER_WITHIN
        for pod in run.pods
        if pod.made_at is not None and not pod.is_over and pod.deleted_at is None
    )


def _too_few_sites(run: Run, view: RunView) -> str:
    """Whether fewer sites than the quorum have this run, by this manifest; empty: enough have."""
    others = [site for site in view.remote.values() if site.has_run and site.agrees]
    have, quorum = 1 + len(others), run.job.spec.min_sites
    return f"{have} of at least {quorum} sites (minSites) have this run" if have < quorum else ""


def _away(view: RunView) -> list[str]:
    """What stands between this site and others, and where manifests differ."""
    words = [f"{site}: {each.problem}" for site, each in view.remote.items() if each.problem]
    return [*words, view.drift] if view.drift else words


def _troubles(run: Run, view: RunView, seen: Observed) -> list[Trouble]:
    """What keeps pods from running, and workers from joining."""
    now = seen.now
    starting = [pod.trouble() or delay(pod, now) for pod in (*run.pods, *run.keepers)]
    starting += [unready(pod, seen.unready_s) for pod in run.keepers if not pod.trouble()]
    running = [silence(pod, f"{run.site}/{pod.worker}", view, now) for pod in run.pods]
    return [trouble for trouble in (*starting, *running) if trouble]


def _is_stuck(run: Run, view: RunView, seen: Observed) -> bool:
    pods = [pod for pod in run.pods if is_old(pod, seen.now)]
    keepers = [pod for pod in run.keepers if is_old(pod, seen.now)]
    return bool(_troubles(replace(run, pods=pods, keepers=keepers), view, seen))


def joined(words: list[str]) -> str:
    """These words as one message; of many the first few, and how many more there are."""
    more = len(words) - MOST_NAMED
    return "; ".join(words[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
