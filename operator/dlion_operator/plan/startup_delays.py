"""Pods that take too long to start, without an error. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from dlion_api import cluster_names as names
from dlion_api.status import Reason
from dlion_operator.model.job_view import Document
from dlion_operator.plan.initializer_state import initialized_at, running_initializer
from dlion_operator.plan.observed import PodProblem, PodView, UnreadyPod
from dlion_operator.plan.runs import Run

STUCK_AFTER = timedelta(seconds=60)
"""A pod that cannot start for this long is reported as stuck. Kubernetes still retries."""
START_TIMEOUT = timedelta(minutes=10)
"""A large image over a slow link takes minutes, and looks like an image that never arrives."""
JOIN_TIMEOUT = timedelta(minutes=5)
"""Time from the container's start: includes importing TensorFlow and loading data on a small
machine."""


def start_delay(pod: PodView, now: datetime) -> PodProblem | None:
    """Why a pod without an error does not run yet. None: it runs, or may soon."""
    if pod.phase != "Pending" or pod.deleted_at is not None or not is_start_overdue(pod, now):
        return None
    if running_initializer(pod.document):  # a download takes its time
        return None
    hint = f"see `kubectl describe pod {pod.name}`"
    scheduled = pod.condition("PodScheduled")
    if scheduled.get("status") != "True":
        if is_gated(pod):
            return None
        return PodProblem(Reason.UNSCHEDULABLE, f"{pod.worker}: no scheduler has placed it; {hint}")
    if pod.condition("PodReadyToStartContainers").get("status") == "False":
        message = f"{pod.worker}: its volumes or its network are not there; {hint}"
        return PodProblem(Reason.CONTAINER_BROKEN, message)
    since = starts_since(pod)
    if since is not None and now - since >= START_TIMEOUT:
        minutes = START_TIMEOUT.total_seconds() / 60
        message = f"{pod.worker}: its node has not started it in {minutes:.0f} minutes; {hint}"
        return PodProblem(Reason.CONTAINER_BROKEN, message)
    return None


def is_start_overdue(pod: PodView, now: datetime) -> bool:
    """Whether the pod should have started by now."""
    return pod.created_at is not None and now - pod.created_at >= STUCK_AFTER


def starts_since(pod: PodView) -> datetime | None:
    """Time since which its trainer could start, apart from what Kubernetes has to do."""
    return initialized_at(pod.document) or pod.created_at


def join_delay(run: Run, pod: PodView) -> PodProblem | None:
    """The problem of a pod that runs while its worker does not join; or None."""
    if pod.phase != "Running" or pod.deleted_at is not None or pod.trainer_started_at is None:
        return None
    started_for = run.observed.now - pod.trainer_started_at
    if min(silence_duration(run, pod), started_for) < JOIN_TIMEOUT:
        return None
    message = f"{pod.worker}: runs and does not join; see `kubectl logs {pod.name} -c trainer`"
    return PodProblem(Reason.NOT_JOINING, message)


def unready_keepers(pods: Iterable[Document]) -> list[UnreadyPod]:
    """Keepers' pods that run and do not serve. `reconcile` counts for how long.

    A keeper serves only after this operator has signed its certificate. So the time without an
    operator must not count.
    """
    keepers = (pod for pod in map(PodView, pods) if pod.component == names.KEEPER)
    return [each for keeper in keepers if (each := keeper.unready)]


def keeper_not_ready(pod: PodView, unready_s: Mapping[UnreadyPod, float]) -> PodProblem | None:
    """The problem of a pod that has run without serving for too long, or None."""
    if pod.unready is None or unready_s.get(pod.unready, 0.0) < STUCK_AFTER.total_seconds():
        return None
    message = f"{pod.worker}: runs and does not become ready; see `kubectl logs {pod.name}`"
    return PodProblem(Reason.CONTAINER_BROKEN, message)


def is_gated(pod: PodView) -> bool:
    """Whether a scheduling gate keeps the pod from being placed, until its owner removes it."""
    return pod.condition("PodScheduled").get("reason") == "SchedulingGated"


def silence_duration(run: Run, pod: PodView) -> timedelta:
    """Time since that pod's worker was last heard, as far as is known here."""
    name = f"{run.site}/{pod.worker}"
    return timedelta(seconds=run.view.report_age_s.get(name, run.view.open_s))
