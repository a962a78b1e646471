"""Problems that events of a job and of its Jobs, keeper and claim report. Pure.

Events about pods are in `pod_problems`.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from dlion_api.names import KIND
from dlion_api.reasons import EventReason
from dlion_api.status_names import Reason
from dlion_cli.cluster.cluster_jobs import event_time
from dlion_cli.cluster.documents import mapping_of
from dlion_cli.findings.container_messages import creation_problem
from dlion_cli.findings.job_problem import (
    OBJECT_NAME,
    JobProblem,
    JobScope,
    Severity,
    one_line,
)
from dlion_cli.findings.pod_problems import EVENTS_WITHIN
from dlion_cli.views.pod_status import PodStatus

_CLAIM_REASONS: Final = ("ProvisioningFailed", "FailedBinding", "VolumeFailedDelete")
_ENDED_BY: Final = {
    EventReason.QUORUM_LOST: (EventReason.QUORUM_BACK,),
    EventReason.KEEPER_AWAY: (EventReason.MODEL_KEPT, EventReason.CHECKPOINT_KEPT),
    EventReason.CHECKPOINT_FAILED: (EventReason.CHECKPOINT_SAVED,),
    EventReason.PUBLISH_FAILED: (EventReason.MODEL_PUBLISHED,),
    "PeerLost": (EventReason.WORKER_REJOINED,),
    EventReason.PEERS_UNREACHED: (EventReason.TRAINING_STARTED,),
}
"""Reasons of later events after which the problem is over."""
_ADVICE: Final[Mapping[str, str]] = {
    EventReason.PEERS_UNREACHED: "Check NetworkPolicies, firewalls and addresses between the "
    "workers' ports that the message names",
    "PeerLost": "The others train on; the worker returns by itself. See its pod",
    "BandwidthDropped": "The link carries less than half of its mean: see what else uses it",
    "PodEvicted": "Kubernetes replaces it. See what drains its node, takes its place (set a "
    "priorityClassName) or is short there",
    "PodNotReleased": "The node is ready but does not end the pod: see `kubectl describe pod`",
    "CallerRefused": "A caller cannot prove its identity or speaks another protocol: see "
    "docs/several-sites.md",
    "Refused": "The API server refuses an object; training continues. Correct what it names",
    EventReason.QUORUM_LOST: "Fewer than minSites sites are connected: see the links and sites",
    EventReason.KEEPER_AWAY: "Files wait for the keeper: see its pod, its log and its disk",
    EventReason.KEEP_FAILED: "The keeper refused a file: see its log and its disk",
    EventReason.CHECKPOINT_FAILED: "Free disk space, or raise ephemeral-storage",
    EventReason.PUBLISH_FAILED: "Free disk space, or raise ephemeral-storage",
    EventReason.DATA_UNAVAILABLE: "Check the volume with the data; training continues with what is "
    "loaded",
    EventReason.DATA_SKIPPED: "Correct or remove the file that the message names",
    EventReason.EVALUATION_FAILED: "Check evaluationPath and the program's accuracy",
    EventReason.MESSAGE_REFUSED: "Run the same release at every site",
    EventReason.RECORDS_DROPPED: "The coordinator was away too long: check the operator",
    EventReason.REPLICA_MISSING: "See the log of the worker that the message names",
    EventReason.CERTIFICATE_NOT_RENEWED: "Check the operator; the old certificate is still used",
}


def job_event_problems(
    events: Sequence[Mapping[str, Any]], job_name: str, scope: JobScope
) -> Iterator[JobProblem]:
    """The newest recent warning of each reason about the job itself, unless it is over."""
    newest: dict[str, Mapping[str, Any]] = {}
    for event in events:
        if mapping_of(event.get("involvedObject")).get("kind") == KIND:
            newest[str(event.get("reason"))] = event
    for reason, event in newest.items():
        time = event_time(dict(event))
        is_over = any(
            ended in newest and _instant(newest[ended]) >= _instant(event)
            for ended in _ENDED_BY.get(reason, ())
        )
        # The conditions report the operator's own reasons.
        if event.get("type") != "Warning" or is_over or reason in set(Reason):
            continue
        if scope.is_within(time, EVENTS_WITHIN):
            yield JobProblem(
                Severity.WARNING,
                one_line(reason),
                f"dlionjob/{job_name}",
                one_line(event.get("message")),
                _ADVICE.get(reason, "See docs/results.md for this reason"),
                scope.command(f"dlion events {job_name} --types Warning"),
            )


def owner_event_problems(
    events: Sequence[Mapping[str, Any]], pods: Sequence[PodStatus] | None, scope: JobScope
) -> Iterator[JobProblem]:
    """Pods that Kubernetes refuses to create, and claims that get no volume.

    `pods` is None if they may not be read.
    """
    newest: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for event in events:
        about = mapping_of(event.get("involvedObject"))
        key = (str(about.get("kind")), str(about.get("name")), str(event.get("reason")))
        newest[key] = event
    for (kind, name, reason), event in newest.items():
        if not scope.is_within(event_time(dict(event)), EVENTS_WITHIN):
            continue
        message, thing = one_line(event.get("message")), f"{kind.lower()}/{one_line(name)}"
        if reason in ("FailedCreate", "ReplicaSetCreateError") and kind in (
            "Job", "ReplicaSet", "Deployment"
        ):  # fmt: skip
            if _was_created_since(name, event, pods):
                continue
            found = creation_problem(message)
            command = found.command or _describe(kind.lower(), name)
            yield JobProblem(
                Severity.ERROR, found.reason, thing, f"it creates no pod: {message}",
                found.advice, scope.command(command),
            )  # fmt: skip
        elif kind == "PersistentVolumeClaim" and reason in _CLAIM_REASONS and _may_wait(pods):
            yield JobProblem(
                Severity.ERROR, "ClaimPending", thing, f"it gets no volume: {message}",
                "Name a StorageClass that can provision it, or free storage",
                scope.command(_describe("pvc", name)),
            )  # fmt: skip


def _describe(kind: str, name: str) -> str:
    """The command that shows the object; empty if it has no valid name."""
    return f"kubectl describe {kind} {name}" if OBJECT_NAME.fullmatch(name) else ""


def _was_created_since(
    owner: str, event: Mapping[str, Any], pods: Sequence[PodStatus] | None
) -> bool:
    """Whether that object has created a pod after the event, so that the refusal is over."""
    refused = _instant(event)
    return any(owner in pod.owners and _time(pod.created) > refused for pod in pods or ())


def _may_wait(pods: Sequence[PodStatus] | None) -> bool:
    """Whether a pod may wait for a volume."""
    return pods is None or not pods or any(pod.phase == "Pending" for pod in pods)


def _instant(event: Mapping[str, Any]) -> float:
    return _time(event_time(dict(event)))


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0
