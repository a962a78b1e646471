"""What is wrong with one pod, from its document and its events. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from dlion_api import cluster_names as names
from dlion_api.endings import cause_of_exit, describe_exit
from dlion_cli.cluster.cluster_jobs import event_time
from dlion_cli.findings.container_messages import (
    container_problem,
    exit_advice,
    image_problem,
    unschedulable,
)
from dlion_cli.findings.job_problem import JobProblem, JobScope, Severity, one_line
from dlion_cli.views.pod_status import ContainerStatus, PodStatus

STUCK_AFTER: Final = timedelta(seconds=60)
"""A pod that cannot start for this long is stuck; the same as the operator's limit."""
EVENTS_WITHIN: Final = timedelta(minutes=20)
"""Kubernetes repeats the event of a lasting problem more often than this."""
OOM_KILLED: Final = "OOMKilled"
_MOUNT_REASONS: Final = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_SANDBOX: Final = "FailedCreatePodSandBox"
_DISRUPTIONS: Final = {
    "DeletionByTaintManager": "Its node did not answer; see whether it is back",
    "EvictionByEvictionAPI": "It was evicted, as for the drain of a node; it is replaced",
    "PreemptionByScheduler": "A pod with a higher priority took its place: set a priorityClassName",
    "TerminationByKubelet": "Its node shut down or ran short of a resource",
    "DeletionByPodGC": "Its node is gone",
    "NodeLost": "Its node did not answer; see whether it is back",
}


def pod_problems(
    pod: PodStatus, events: Sequence[Mapping[str, Any]], scope: JobScope, *, is_replaced: bool
) -> list[JobProblem]:
    """The problems of one pod. `events`: those about it, oldest first.

    `is_replaced`: a newer pod has its place, so that no problem is more than a warning.
    """
    finder = _PodFinder(pod, events, scope)
    problems = list(finder.problems())
    if is_replaced:
        return [replace(each, severity=Severity.WARNING) for each in problems[:1]]
    return problems


class _PodFinder:
    """Finds the problems of one pod."""

    def __init__(
        self, pod: PodStatus, events: Sequence[Mapping[str, Any]], scope: JobScope
    ) -> None:
        self._pod, self._events, self._scope = pod, events, scope
        self._describe = scope.command(f"kubectl describe pod {pod.name}")

    def problems(self) -> Iterator[JobProblem]:
        pod = self._pod
        if pod.phase == "Succeeded":
            return
        if pod.phase == "Failed":
            yield self._failure()
            return
        if pod.deleted:
            yield from self._deletion()
            return
        found = [*self._placement(), *self._waiting_containers(), *self._start_events()]
        yield from found
        yield from self._ended_containers()
        yield from self._node()
        if pod.phase == "Pending" and not found and not pod.is_initializing:
            yield from self._slow_start()
        if pod.phase == "Running" and not found:
            yield from self._unready_keeper()

    def _problem(
        self,
        severity: Severity,
        reason: str,
        message: str,
        advice: str,
        command: str | None = None,
    ) -> JobProblem:
        """A problem of this pod; without `command` that which describes it."""
        given = self._scope.command(command) if command else self._describe
        text = one_line(message)
        return JobProblem(severity, reason, f"pod/{self._pod.name}", text, advice, given)

    # ---- it does not start -----------------------------------------------------------------------

    def _placement(self) -> Iterator[JobProblem]:
        scheduled = self._pod.condition("PodScheduled")
        if scheduled.get("status") == "True" or self._pod.node:
            return
        if scheduled.get("reason") == "SchedulingGated":
            yield self._problem(
                Severity.NOTE, "SchedulingGated", "a scheduling gate holds the pod back",
                "Wait for the controller that set the gate, such as Kueue",
            )  # fmt: skip
        elif scheduled.get("reason") == "Unschedulable":
            kept, found = unschedulable(one_line(scheduled.get("message")))
            message = f"no node fits the pod: {kept}"
            yield self._problem(Severity.ERROR, found.reason, message, found.advice, found.command)
        elif self._scope.is_older(self._pod.created, STUCK_AFTER):
            yield self._problem(
                Severity.ERROR, "Unschedulable", "no scheduler has placed the pod",
                "Check the scheduler, and schedulerName in spec.podTemplate",
            )  # fmt: skip

    def _waiting_containers(self) -> Iterator[JobProblem]:
        for container in self._pod.containers:
            reason = str(container.waiting.get("reason") or "")
            message = str(container.waiting.get("message") or "")
            where = f"container {container.name}: {reason}"
            if reason in names.IMAGE_REASONS:
                detail = self._event_message("Failed", "pull") or self._event_message("Failed")
                full = one_line(f"{message} {detail}" if detail not in message else message)
                found = image_problem(reason, full)
                yield self._problem(
                    Severity.ERROR, found.reason, f"{where}: {full}", found.advice,
                    found.command or None,
                )  # fmt: skip
            elif reason == "CrashLoopBackOff":
                yield self._exit(container, container.last, Severity.ERROR, "CrashLoopBackOff")
            elif reason in names.CONTAINER_REASONS:
                cause = container_problem(reason, message)
                yield self._problem(
                    Severity.ERROR,
                    cause.reason if cause else reason,
                    f"{where}: {message}" if message else where,
                    cause.advice if cause else "Correct what the message names",
                    cause.command if cause and cause.command else None,
                )

    def _start_events(self) -> Iterator[JobProblem]:
        """Problems that only events name: volumes, network, pull Secrets."""
        if self._pod.phase != "Pending":
            return
        # Events of a cause that has passed stay: volumes and network are there by now.
        is_set_up = self._pod.condition("PodReadyToStartContainers").get("status") == "True"
        for reason in () if is_set_up else (*_MOUNT_REASONS, _SANDBOX):
            if message := self._event_message(reason):
                cause = container_problem(reason, message)
                yield self._problem(
                    Severity.ERROR, cause.reason if cause else reason, f"{reason}: {message}",
                    cause.advice if cause else "Correct what the message names",
                    cause.command if cause and cause.command else None,
                )  # fmt: skip
                break
        if message := self._event_message("FailedToRetrieveImagePullSecret"):
            yield self._problem(
                Severity.WARNING, "PullSecretMissing", message,
                "Create the pull Secret in this namespace, or correct imagePullSecrets in "
                "spec.podTemplate",
                "kubectl get secrets",
            )  # fmt: skip

    def _slow_start(self) -> Iterator[JobProblem]:
        if not self._scope.is_older(self._pod.created, STUCK_AFTER):
            return
        if self._pod.condition("PodReadyToStartContainers").get("status") == "False":
            yield self._problem(
                Severity.ERROR, "ContainerBroken", "its volumes or its network are not there",
                "See the pod's events",
            )  # fmt: skip
            return
        minutes = (self._scope.age(self._pod.created) or STUCK_AFTER).total_seconds() / 60
        yield self._problem(
            Severity.NOTE, "StillStarting", f"its node has not started it in {minutes:.0f} minutes",
            "Wait: a large image over a slow link takes minutes; the pod's events show the pull",
        )  # fmt: skip

    # ---- it has ended, or keeps ending -----------------------------------------------------------

    def _ended_containers(self) -> Iterator[JobProblem]:
        for container in self._pod.containers:
            if container.waiting.get("reason") == "CrashLoopBackOff":
                continue
            ended = container.terminated or container.last
            if ended and ended.get("exitCode") != 0 and (container.restarts or ended is
                                                         container.terminated):  # fmt: skip
                yield self._exit(container, ended, Severity.WARNING, "ContainerRestarted")

    def _exit(
        self,
        container: ContainerStatus,
        ended: Mapping[str, Any],
        severity: Severity,
        reason: str,
    ) -> JobProblem:
        """How a container ended, from the status of its last instance."""
        logs = self._logs_command(container.name)
        often = f" {container.restarts} times" if container.restarts > 1 else ""
        if ended.get("reason") == OOM_KILLED:
            message = f"container {container.name} was killed{often}: it needs more memory"
            return self._problem(severity, OOM_KILLED, message, self._memory_advice(container))
        code = ended.get("exitCode")
        if not isinstance(code, int):
            message = f"container {container.name} keeps ending{often}"
            return self._problem(severity, reason, message, "See its log", logs)
        lines = [line for line in str(ended.get("message") or "").splitlines() if line.strip()]
        # The supervisor's lines are JSON, which must stay whole.
        lines = [line if line.startswith("{") else one_line(line) for line in lines]
        message = f"container {container.name} ended{often} with {describe_exit(code, lines)}"
        advice = exit_advice(cause_of_exit(code, lines))
        return self._problem(severity, reason, message, advice, logs)

    def _memory_advice(self, container: ContainerStatus) -> str:
        if container.name == names.TRAINER_CONTAINER:
            return "Raise memory in the group's resources.limits, or lower the batch"
        return "Raise the container's memory limit (chart values, or spec.podTemplate)"

    def _logs_command(self, container: str) -> str:
        name, pod = self._scope.name, self._pod
        if pod.is_keeper:
            return f"dlion logs {name} -c {names.KEEPER_CONTAINER}"
        is_known = container in (names.TRAINER_CONTAINER, names.SIDECAR_CONTAINER)
        if pod.index is None or not pod.group or not is_known:
            return f"kubectl logs {pod.name} -c {container}"
        other = "" if container == names.TRAINER_CONTAINER else f" -c {container}"
        return f"dlion logs {name} --group {pod.group} --worker {pod.index}{other}"

    def _failure(self) -> JobProblem:
        pod = self._pod
        if pod.reason == "Evicted":
            return self._eviction(pod.message)
        if (disruption := self._disruption()) is not None:
            return disruption
        for container in pod.containers:
            if container.terminated and container.terminated.get("exitCode") != 0:
                return self._exit(
                    container, container.terminated, Severity.ERROR, "ContainerFailed"
                )
        message = f"it failed: {pod.reason or 'no reason given'} {pod.message}"
        return self._problem(Severity.ERROR, pod.reason or "PodFailed", message, "See its events")

    def _disruption(self) -> JobProblem | None:
        """Why Kubernetes ends the pod; None if it does not."""
        disruption = self._pod.condition("DisruptionTarget")
        if disruption.get("status") != "True":
            return None
        reason = str(disruption.get("reason") or "Disrupted")
        message = f"it was ended: {reason}: {disruption.get('message') or self._pod.message}"
        advice = _DISRUPTIONS.get(reason, "Kubernetes replaces it")
        if reason == "TerminationByKubelet" and "low on resource" in message:
            return self._eviction(message)
        return self._problem(Severity.WARNING, reason, message, advice, "kubectl get nodes")

    def _eviction(self, message: str) -> JobProblem:
        lower = message.lower()
        if "memory" in lower and "emptydir" not in lower:
            advice = "The node ran out of memory: set requests to what a worker needs, or add nodes"
        elif any(word in lower for word in ("ephemeral", "emptydir", "disk", "inode", "fs")):
            advice = "Free disk space on the node, or raise ephemeral-storage in the resources"
        else:
            advice = "Free the resource on the node"
        return self._problem(
            Severity.ERROR, "Evicted", f"its node evicted it: {message}", advice,
            "kubectl describe nodes",
        )  # fmt: skip

    def _deletion(self) -> Iterator[JobProblem]:
        if (disruption := self._disruption()) is not None:
            yield disruption
        if not self._scope.is_older(self._pod.deleted, STUCK_AFTER):
            return
        node = self._pod.node or "none"
        yield self._problem(
            Severity.WARNING, "PodNotReleased",
            f"it should have gone and is still there; its node ({node}) does not confirm its end",
            "Check whether the node is ready; DLion's operator releases pods of dead nodes",
            "kubectl get nodes",
        )  # fmt: skip

    # ---- it runs ---------------------------------------------------------------------------------

    def _node(self) -> Iterator[JobProblem]:
        if self._pod.condition("Ready").get("status") != "False":
            return
        if self._event_message("NodeNotReady"):
            yield self._problem(
                Severity.ERROR, "NodeNotReady",
                f"its node {self._pod.node} does not answer or is not ready",
                "Bring the node back; if it stays away the pod is replaced", "kubectl get nodes",
            )  # fmt: skip

    def _unready_keeper(self) -> Iterator[JobProblem]:
        ready = self._pod.condition("Ready")
        since = str(ready.get("lastTransitionTime") or "")
        if not self._pod.is_keeper or ready.get("status") != "False":
            return
        if self._scope.is_older(since, STUCK_AFTER):
            yield self._problem(
                Severity.WARNING, "KeeperUnavailable", "the keeper runs and does not serve",
                "See its log", self._logs_command(names.KEEPER_CONTAINER),
            )  # fmt: skip

    def _event_message(self, reason: str, part: str = "") -> str:
        """The newest recent event with that reason whose message has that part; empty if none."""
        for event in reversed(self._events):
            message = one_line(event.get("message"))
            if event.get("reason") == reason and part in message and self._scope.is_within(
                event_time(dict(event)), EVENTS_WITHIN
            ):  # fmt: skip
                return message
        return ""
