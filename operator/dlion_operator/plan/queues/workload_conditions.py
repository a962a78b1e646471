"""The conditions that the operator writes to a Workload in place of Kueue's own job controller.
Pure.

Source: Kueue 0.17, `pkg/workload/workload.go` (UnsetQuotaReservationWithCondition,
SyncAdmittedCondition, Finish) and `pkg/controller/jobframework/reconciler.go`.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime

from dlion_api.names import JobKey
from dlion_operator.kubernetes.client import Document, Kind
from dlion_operator.model.job_view import condition, format_time, generation_of
from dlion_operator.model.workload_view import (
    ADMITTED,
    EVICTED,
    FINISHED,
    PODS_READY,
    QUOTA_RESERVED,
    REQUEUED,
    WorkloadView,
)
from dlion_operator.plan.decisions import Action, Patch

_REQUEUED_AT_ONCE = frozenset({"Preempted", "NodeFailures"})
"""Reasons of an eviction after which a Workload queues again at once. After others Kueue itself
sets the condition Requeued to True, when their cause is over."""


def finished(view: WorkloadView, key: JobKey, *, succeeded: bool) -> Mapping[str, Document]:
    """The condition by which Kueue frees the quota of a run that is over. Empty: it has it."""
    if view.is_finished:
        return {}
    reason = "Succeeded" if succeeded else "Failed"
    return {FINISHED: _made(view, FINISHED, "True", reason, f"the run of {key.name} is over")}


def given_back(view: WorkloadView, why: str) -> Mapping[str, Document]:
    """The conditions by which an unusable copy of a job gives its quota back. Empty: it has none.

    Kueue ends a prebuilt Workload that does not fit its job likewise. MultiKueue would make a
    deleted one again.
    """
    if view.is_finished or not view.has_quota:
        return {}
    if view.is_evicted:
        return _released(view)
    return {FINISHED: _made(view, FINISHED, "True", "OutOfSync", why)}


def quota_conditions(
    view: WorkloadView, *, is_stopped: bool, pods_are_ready: bool
) -> Mapping[str, Document]:
    """The conditions of a Workload with quota that have to change."""
    if not view.may_run:
        is_over = view.is_evicted and is_stopped
        return _released(view) if is_over else {}
    before = condition(view.document, PODS_READY)
    if pods_are_ready:
        again = before.get("reason") in ("WaitForRecovery", "Recovered")
        reason, status = "Recovered" if again else "Started", "True"
        message = "all pods of the run are ready or have succeeded"
    else:
        was_ready = before.get("status") == "True" or before.get("reason") == "WaitForRecovery"
        reason, status = "WaitForRecovery" if was_ready else "WaitForStart", "False"
        message = "not all pods of the run are ready or have succeeded"
    if before.get("status") == status:
        return {}
    return {PODS_READY: _made(view, PODS_READY, status, reason, message)}


def _released(view: WorkloadView) -> Mapping[str, Document]:
    """The conditions of an evicted Workload without quota."""
    evicted = condition(view.document, EVICTED)
    reason, message = str(evicted.get("reason") or EVICTED), str(evicted.get("message") or "")
    at_once = "True" if reason in _REQUEUED_AT_ONCE else "False"
    no_quota = "The workload has no reservation"
    return {
        REQUEUED: _made(view, REQUEUED, at_once, reason, message),
        QUOTA_RESERVED: _made(view, QUOTA_RESERVED, "False", "Pending", message),
        ADMITTED: _made(view, ADMITTED, "False", "NoReservation", no_quota),
        PODS_READY: _made(view, PODS_READY, "False", "WaitForStart", "it is evicted"),
    }


def _made(view: WorkloadView, type_: str, status: str, reason: str, message: str) -> Document:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message[:1024],
        "observedGeneration": generation_of(view.document),
    }


def status_patch(
    view: WorkloadView, changed: Mapping[str, Document], time: datetime
) -> Iterator[Action]:
    """Write these conditions and leave the others, unless another program writes meanwhile."""
    if not changed:
        return
    now = format_time(time)
    conditions = [
        each
        for each in (view.document.get("status") or {}).get("conditions") or ()
        if each.get("type") not in changed
    ]
    for type_, made in changed.items():
        before = condition(view.document, type_)
        is_same = before.get("status") == made["status"] and before.get("lastTransitionTime")
        since = before["lastTransitionTime"] if is_same else now
        conditions.append({**made, "lastTransitionTime": since})
    status: Document = {"conditions": conditions}
    if changed.get(QUOTA_RESERVED, {}).get("status") == "False":
        status["admission"] = None
    metadata = {"uid": view.uid, "resourceVersion": view.version}
    patch = {"metadata": metadata, "status": status}
    yield Patch(Kind.WORKLOAD, view.name, patch, subresource="status")
