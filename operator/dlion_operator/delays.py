"""Pods that take too long, though nobody says that they cannot start. Pure.

Called by `findings`. Each has a moment after which waiting alone is no advice any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.status import Reason
from dlion_operator.observed import PodView, RunView, Trouble, Unready

STUCK_AFTER = timedelta(seconds=60)
"""A pod that cannot start for so long is said to be stuck; it is still tried on."""
STARTED_WITHIN = timedelta(minutes=10)
"""A large image over a slow link takes minutes; nothing tells it from what never comes."""
JOINED_WITHIN = timedelta(minutes=5)
"""From its container's start: TensorFlow's import and the data on a small machine."""


def delay(pod: PodView, now: datetime) -> Trouble | None:
    """Why a pod that nobody refuses does not run yet; None: it runs, or may soon."""
    if pod.phase != "Pending" or pod.deleted_at is not None or not is_old(pod, now):
        return None
    look = f"`kubectl describe pod {pod.name}` says why"
    scheduled = pod.condition("PodScheduled")
    if scheduled.get("status") != "True":
        if is_held_back(pod):
            return None
        return Trouble(Reason.UNSCHEDULABLE, f"{pod.worker}: no scheduler has placed it; {look}")
    if pod.condition("PodReadyToStartContainers").get("status") == "False":
        words = f"{pod.worker}: its volumes or its network are not there; {look}"
        return Trouble(Reason.CONTAINER_BROKEN, words)
    if pod.made_at is not None and now - pod.made_at >= STARTED_WITHIN:
        minutes = STARTED_WITHIN.total_seconds() / 60
        words = f"{pod.worker}: its node has not started it in {minutes:.0f} minutes; {look}"
        return Trouble(Reason.CONTAINER_BROKEN, words)
    return None


def is_old(pod: PodView, now: datetime) -> bool:
    """Whether a pod that cannot start should have started by now."""
    return pod.made_at is not None and now - pod.made_at >= STUCK_AFTER


def silence(pod: PodView, name: str, view: RunView, now: datetime) -> Trouble | None:
    """That a pod runs, and its worker (of that name) does not come to the run; None: it does."""
    if pod.phase != "Running" or pod.deleted_at is not None or pod.runs_since is None:
        return None
    if min(silent_for(name, view), now - pod.runs_since) < JOINED_WITHIN:
        return None
    words = f"{pod.worker}: runs and does not join; `kubectl logs {pod.name} -c trainer` says why"
    return Trouble(Reason.NOT_JOINING, words)


def unready_keepers(pods: Iterable[Mapping[str, Any]]) -> list[Unready]:
    """Keepers' pods that run and do not serve: `reconcile` counts for how long.

    A keeper serves once this operator has signed its certificate: for the time that it was away
    nobody can be blamed.
    """
    views = map(PodView, pods)
    keepers = (pod for pod in views if pod.labels.get(names.COMPONENT_LABEL) == names.KEEPER)
    return [each for keeper in keepers if (each := keeper.unready)]


def unready(pod: PodView, unready_s: Mapping[Unready, float]) -> Trouble | None:
    """That a pod runs, and was seen not to serve for too long; None: it does, or may soon."""
    if pod.unready is None or unready_s.get(pod.unready, 0.0) < STUCK_AFTER.total_seconds():
        return None
    words = f"{pod.worker}: runs and does not become ready; `kubectl logs {pod.name}` says why"
    return Trouble(Reason.CONTAINER_BROKEN, words)


def is_held_back(pod: PodView) -> bool:
    """Whether somebody keeps it from being placed on a node, and will let it go."""
    return pod.condition("PodScheduled").get("reason") == "SchedulingGated"


def silent_for(name: str, view: RunView) -> timedelta:
    """Since when nothing has been heard of the worker of that name, as far as is known here."""
    return timedelta(seconds=view.away_s.get(name, view.open_s))
