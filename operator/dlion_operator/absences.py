"""Pods that there should be and that do not come to be: a quota, pod security, a missing service
account.

Pure. `missing` names them for `reconcile`, which counts for how long they are; `podless` and
`keeper_troubles` say in `findings` what has been missing for too long, and where to look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import JobKey
from dlion_api.status import Reason
from dlion_operator.delays import STUCK_AFTER, delay, is_old, unready
from dlion_operator.job_view import JobView
from dlion_operator.observed import Missing, Observed, PodView, Trouble
from dlion_operator.runs import Run

FIRST_BACKOFF_S = 10.0
LONGEST_BACKOFF_S = 600.0
"""Kubernetes lets so long go by before it replaces a pod of a Job that failed, doubling from the
first to the longest. Source: its Job controller (DefaultJobPodFailureBackOff)."""
MOST_NAMED = 5

_AT_ONCE_S = STUCK_AFTER.total_seconds()


def missing(
    key: JobKey, jobs: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]]
) -> list[Missing]:
    """The pods of that run that Kubernetes was asked for and that are not there."""
    views = [v for v in map(JobView, jobs) if v.run_id == key.run_id and _is_to_run(v)]
    there = [p for p in map(PodView, pods) if p.labels.get(names.RUN_LABEL) == key.run_id]
    found = [
        (view.name, index)
        for view in views
        for index in sorted(set(range(view.workers)) - view.over_indexes - _there(view, there))
    ]
    keepers = (p for p in there if p.labels.get(names.COMPONENT_LABEL) == names.KEEPER)
    if views and not any(_is_here(pod) for pod in keepers):
        found.append((names.keeper_name(key), 0))
    return found


def _is_to_run(view: JobView) -> bool:
    return not view.suspended and view.ended_at is None


def _is_here(keeper: PodView) -> bool:
    return not keeper.is_over and keeper.deleted_at is None


def _there(view: JobView, pods: Iterable[PodView]) -> set[int]:
    """Indexes of that Job with a pod that has not failed."""
    return {
        pod.index
        for pod in pods
        if pod.index is not None
        and pod.phase != "Failed"
        and pod.labels.get(names.GROUP_LABEL) == view.group
    }


def is_keeper_missing(key: JobKey, missing_s: Mapping[Missing, float]) -> bool:
    """Whether the keeper has been without a pod for too long."""
    return missing_s.get((names.keeper_name(key), 0), 0.0) >= _AT_ONCE_S


def podless(run: Run, seen: Observed) -> list[Trouble]:
    """Jobs whose pods do not come to be, and the keeper's Deployment."""
    troubles = []
    for group, view in run.jobs.items():
        late = [
            f"{group}-{index}"
            for (name, index), since_s in seen.missing_s.items()
            if name == view.name and since_s >= _AT_ONCE_S + _backoff_s(run, group, index)
        ]
        if late:
            more = f" and {len(late) - MOST_NAMED} more" if len(late) > MOST_NAMED else ""
            whose = f"pods for {', '.join(late[:MOST_NAMED])}{more}"
            words = f"Job {view.name} makes no {whose}: see `kubectl describe job {view.name}`"
            troubles.append(Trouble(Reason.PODS_REFUSED, words))
    return [*troubles, *_keeperless(run, seen)]


def _backoff_s(run: Run, group: str, index: int) -> float:
    """What Kubernetes waits after the newest pod of that worker."""
    pods = [p for p in run.pods if p.labels.get(names.GROUP_LABEL) == group and p.index == index]
    if not pods:
        return 0.0
    failures = max(pod.failures for pod in pods)
    return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 10))


def _keeperless(run: Run, seen: Observed) -> Iterator[Trouble]:
    if not is_keeper_missing(run.job.key, seen.missing_s):
        return
    name = names.keeper_name(run.job.key)
    conditions = ((seen.keeper or {}).get("status") or {}).get("conditions") or ()
    why = [str(c.get("message")) for c in conditions if _is_refusal(c)]
    look = f"see `kubectl describe deployment {name}`"
    words = f"Deployment {name} makes no pod for the keeper: {'; '.join([*why, look])}"
    yield Trouble(Reason.PODS_REFUSED, words)


def _is_refusal(condition: Mapping[str, Any]) -> bool:
    return condition.get("type") == "ReplicaFailure" and condition.get("status") == "True"


def keeper_troubles(run: Run, seen: Observed) -> list[Trouble]:
    """What keeps the run's keeper from serving for a minute and more; empty: nothing known."""
    pods = [pod for pod in run.keepers if _is_here(pod) and is_old(pod, seen.now)]
    found = (pod.trouble() or delay(pod, seen.now) or unready(pod, seen.unready_s) for pod in pods)
    return [*_keeperless(run, seen), *filter(None, found)]
