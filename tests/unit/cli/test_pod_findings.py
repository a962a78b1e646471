"""Test which problems of pods `dlion describe` finds, from documents as Kubernetes writes them.

- Each usual cause of a pod that does not run or keeps ending has its reason, rank, advice and
  command. Equal causes of several pods are one finding. An earlier problem, or a replaced pod, is
  no error.
- Documents with missing, foreign or hostile fields cause no error. No text of a message enters a
  command.

The messages are those of Kubernetes 1.34's scheduler and kubelet, of containerd 2 and of the Job
controller, taken from their sources and from clusters.

Left out: jobs (test_job_findings.py) and a real API server (tests/cluster/test_cli_pods.py).
"""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import Any

import pytest

from dlion_api.cluster_names import group_job_name
from dlion_api.names import JobKey
from dlion_cli.findings.container_messages import exit_advice
from dlion_cli.findings.find_problems import find_problems, why_not_running
from dlion_cli.findings.job_problem import JobProblem, JobScope
from dlion_cli.views.pod_status import pods_of_run
from manifest_table import changed, smallest

NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
EARLIER, RECENT = "2026-01-31T12:00:00Z", "2026-01-31T12:28:00Z"
JOB_NAME = group_job_name(JobKey("ml", "digits", "1"), "small")
POD = f"{JOB_NAME}-0-x2x7k"


def job() -> dict[str, Any]:
    made = changed(smallest(), {"metadata.creationTimestamp": EARLIER, "spec.runId": "1"})
    made["metadata"] |= {"name": "digits", "namespace": "ml", "generation": 1}
    ready = {"type": "Ready", "status": "False", "reason": "WorkersStarting", "message": "pods"}
    reconciling = ready | {"type": "Reconciling", "status": "True"}
    status = {"observedGeneration": 1, "runId": "1", "state": "Pending",
              "conditions": [ready, reconciling]}  # fmt: skip
    return made | {"status": status}


def pod(name: str = POD, *, index: int = 0, keeper: bool = False, node: str = "n1", **status: Any
        ) -> dict[str, Any]:  # fmt: skip
    labels = {
        "dlion.dev/job-name": "digits", "dlion.dev/run-id": "1", "dlion.dev/site": "plant-a",
        "app.kubernetes.io/component": "keeper" if keeper else "worker",
    }  # fmt: skip
    if not keeper:
        labels |= {
            "dlion.dev/group": "small",
            "batch.kubernetes.io/job-completion-index": f"{index}",
        }
    metadata = {
        "name": name, "namespace": "ml", "labels": labels,
        "creationTimestamp": status.pop("created", EARLIER),
        "ownerReferences": [{"kind": "Job", "name": JOB_NAME}],
    }  # fmt: skip
    if deleted := status.pop("deleted", None):
        metadata["deletionTimestamp"] = deleted
    return {"metadata": metadata, "spec": {"nodeName": node} if node else {},
            "status": {"phase": "Pending", **status}}  # fmt: skip


def waiting(reason: str, message: str = "", container: str = "trainer", **more: Any) -> Any:
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return [{"name": container, "ready": False, "restartCount": 0, "state": state, **more}]


def ended(code: int, *, reason: str = "Error", message: str = "", restarts: int = 0,
          crashing: bool = False) -> Any:  # fmt: skip
    terminated = {"exitCode": code, "reason": reason, "message": message}
    if crashing:
        return waiting(
            "CrashLoopBackOff", "back-off 5m0s restarting failed container=trainer",
            restartCount=restarts, lastState={"terminated": terminated},
        )  # fmt: skip
    return [{"name": "trainer", "ready": False, "restartCount": restarts,
             "state": {"terminated": terminated}}]  # fmt: skip


def unscheduled(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                 "message": message}  # fmt: skip
    return pod(node="", conditions=[condition])


def event(reason: str, message: str, *, kind: str = "Pod", name: str = POD, at: str = RECENT,
          type_: str = "Warning") -> dict[str, Any]:  # fmt: skip
    return {
        "involvedObject": {"kind": kind, "name": name}, "reason": reason, "message": message,
        "type": type_, "lastTimestamp": at,
    }  # fmt: skip


PULL = (
    'Failed to pull image "registry.example/dlion:9": rpc error: code = {} desc = failed to pull '
    'and unpack image "registry.example/dlion:9": failed to resolve reference '
    '"registry.example/dlion:9": {}'
)
BACK_OFF = 'Back-off pulling image "registry.example/dlion:9"'
QUOTA = (
    f'Error creating: pods "{POD}" is forbidden: exceeded quota: compute, requested: '
    "limits.cpu=4, used: limits.cpu=6, limited: limits.cpu=8"
)
SECURITY = (
    f'Error creating: pods "{POD}" is forbidden: violates PodSecurity "restricted:latest": '
    'allowPrivilegeEscalation != false (container "trainer" must set '
    "securityContext.allowPrivilegeEscalation=false)"
)
EVICTED_MEMORY = (
    "The node was low on resource: memory. Threshold quantity: 100Mi, available: 52820Ki. Container"
    " trainer was using 3Gi, request is 0, has larger consumption of memory."
)
EVICTED_DISK = (
    "The node was low on resource: ephemeral-storage. Threshold quantity: 2Gi, available: 1Gi."
)
Case = tuple[str, list[dict[str, Any]], list[dict[str, Any]], str, str, str, str]
CASES: list[Case] = [
    # name, pods, events, severity, reason, text of the advice, text of the command
    ("a taint",
     [unscheduled("0/1 nodes are available: 1 node(s) had untolerated taint "
                  "{node-role.kubernetes.io/control-plane: }. preemption: 0/1 nodes are available: "
                  "1 Preemption is not helpful for scheduling.")], [],
     "error", "UntoleratedTaint", "podTemplate of the job, or of the group", "kubectl get nodes"),
    ("a node that is not ready",
     [unscheduled("0/1 nodes are available: 1 node(s) had untolerated taint "
                  "{node.kubernetes.io/not-ready: }.")], [],
     "error", "NodeNotReady", "Bring the nodes back", "kubectl get nodes"),
    ("a node that is not ready, and a taint",
     [unscheduled("0/3 nodes are available: 1 node(s) had untolerated taint "
                  "{node.kubernetes.io/not-ready: }, 2 node(s) had untolerated taint "
                  "{gpu: only}.")], [],
     "error", "Unschedulable", "or remove the taint gpu: only", "kubectl get nodes"),
    ("nodes that are not ready and unreachable",
     [unscheduled("0/3 nodes are available: 1 node(s) had untolerated taint "
                  "{node.kubernetes.io/not-ready: }, 2 node(s) had untolerated taint "
                  "{node.kubernetes.io/unreachable: }.")], [],
     "error", "NodeNotReady", "Bring the nodes back", "kubectl get nodes"),
    ("a node that joins the cluster",
     [unscheduled("0/2 nodes are available: 1 node(s) had untolerated taint "
                  "{node.kubernetes.io/network-unavailable: }, 1 node(s) had untolerated taint "
                  "{node.cloudprovider.kubernetes.io/uninitialized: true}.")], [],
     "error", "NodeNotReady", "Bring the nodes back", "kubectl get nodes"),
    ("a node short of disk",
     [unscheduled("0/1 nodes are available: 1 node(s) had untolerated taint "
                  "{node.kubernetes.io/disk-pressure: }.")], [],
     "error", "NodePressure", "disk-pressure", "kubectl describe nodes"),
    ("no cpu", [unscheduled("0/3 nodes are available: 3 Insufficient cpu. no new claims to "
                            "deallocate, preemption: 0/3 nodes are available: 3 No preemption "
                            "victims found for incoming pod.")], [],
     "error", "InsufficientResources", "Lower cpu in the group's resources.requests", "nodes"),
    ("no memory and a taint",
     [unscheduled("0/3 nodes are available: 1 node(s) had untolerated taint {gpu: only}, 2 "
                  "Insufficient memory.")], [],
     "error", "Unschedulable", "gpu: only; or: Lower memory", "kubectl get nodes"),
    ("no GPU", [unscheduled("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")], [],
     "error", "InsufficientDevices", "nvidia.com/gpu free: check its device plugin", "nodes"),
    ("no node with the labels",
     [unscheduled("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.")],
     [], "error", "NodeSelectorMismatch", "nodeSelector", "--show-labels"),
    ("a claim that is not bound",
     [unscheduled("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.")],
     [], "error", "ClaimPending", "StorageClass", "kubectl describe pvc"),
    ("a claim that is not there",
     [unscheduled('0/1 nodes are available: persistentvolumeclaim "data" not found.')], [],
     "error", "ClaimMissing", "PersistentVolumeClaim data", "kubectl get pvc"),
    ("an unknown reason of a newer scheduler",
     [unscheduled("0/1 nodes are available: 1 node(s) were of the wrong colour.")], [],
     "error", "Unschedulable", "Free capacity", "kubectl get nodes"),
    ("no scheduler", [pod(node="")], [],
     "error", "Unschedulable", "Check the scheduler", f"kubectl describe pod {POD} -n ml"),
    ("a gate", [pod(node="", conditions=[{"type": "PodScheduled", "status": "False",
                                          "reason": "SchedulingGated"}])], [],
     "note", "SchedulingGated", "Kueue", "kubectl describe pod"),
    ("an image that is not there",
     [pod(containerStatuses=waiting("ErrImagePull", PULL.format(
         "NotFound", "registry.example/dlion:9: not found")))], [],
     "error", "ImageNotFound", "name and tag", "kubectl describe pod"),
    ("an image that is not there, by its event",
     [pod(containerStatuses=waiting("ImagePullBackOff", BACK_OFF))],
     [event("Failed", PULL.format("NotFound", "registry.example/dlion:9: not found"))],
     "error", "ImageNotFound", "name and tag", "kubectl describe pod"),
    ("an image that needs a Secret",
     [pod(containerStatuses=waiting("ImagePullBackOff", BACK_OFF + ": ErrImagePull: " + PULL.format(
         "Unknown", "failed to authorize: failed to fetch anonymous token: unexpected status from "
         "GET request to https://registry.example/token: 401 Unauthorized")))], [],
     "error", "ImageAccessDenied", "imagePullSecrets", "create secret docker-registry"),
    ("a registry that does not answer",
     [pod(containerStatuses=waiting("ErrImagePull", PULL.format(
         "Unknown", 'failed to do request: Head "https://registry.example/v2/": dial tcp: lookup '
         "registry.example: no such host")))], [],
     "error", "RegistryUnreachable", "DNS", "kubectl describe pod"),
    ("a name that is none",
     [pod(containerStatuses=waiting(
         "InvalidImageName", "Failed to apply default image tag \"A:B\": couldn't parse image name "
         '"A:B": invalid reference format'))], [],
     "error", "InvalidImageName", "name of the image", ""),
    ("a pull Secret that is missing",
     [pod(containerStatuses=waiting("ContainerCreating"))],
     [event("FailedToRetrieveImagePullSecret", "Unable to retrieve some image pull secrets "
            "(regcred); attempting to pull the image may not succeed.")],
     "warning", "PullSecretMissing", "Create the pull Secret", "kubectl get secrets"),
    ("a ConfigMap that is missing",
     [pod(containerStatuses=waiting(
         "CreateContainerConfigError", 'configmap "settings" not found'))], [],
     "error", "ConfigMapMissing", "Create the ConfigMap settings", "kubectl get configmaps -n ml"),
    ("a Secret that is missing",
     [pod(containerStatuses=waiting("CreateContainerConfigError", 'secret "token" not found'))], [],
     "error", "SecretMissing", "Create the Secret token", "kubectl get secrets"),
    ("a key that is missing",
     [pod(containerStatuses=waiting(
         "CreateContainerConfigError", "couldn't find key password in Secret ml/token"))], [],
     "error", "KeyMissing", "key password to the Secret token", "kubectl describe Secret token"),
    ("an image that wants root",
     [pod(containerStatuses=waiting(
         "CreateContainerConfigError", "container has runAsNonRoot and image will run as root "
         '(pod: "x", container: trainer)'))], [],
     "error", "RunsAsRoot", "runAsUser", ""),
    ("a command that is missing",
     [pod(phase="Running", containerStatuses=waiting(
         "RunContainerError", 'failed to create containerd task: OCI runtime create failed: exec: '
         '"env": executable file not found in $PATH'))], [],
     "error", "CommandMissing", "lacks the command env", ""),
    ("a volume that is missing",
     [pod(containerStatuses=waiting("ContainerCreating"))],
     [event("FailedMount", 'MountVolume.SetUp failed for volume "program" : configmap "prog" not '
            "found")],
     "error", "ConfigMapMissing", "ConfigMap prog", "kubectl get configmaps"),
    ("a volume that cannot be attached",
     [pod(containerStatuses=waiting("ContainerCreating"))],
     [event("FailedAttachVolume", 'AttachVolume.Attach failed for volume "pvc-1" : rpc error')],
     "error", "VolumeUnavailable", "driver", "kubectl get pvc,pv"),
    ("a network that is missing",
     [pod(containerStatuses=waiting("ContainerCreating"))],
     [event("FailedCreatePodSandBox", "Failed to create pod sandbox: plugin type=\"bridge\" failed "
            "(add): cni plugin not initialized")],
     "error", "PodNetwork", "CNI", "kubectl get nodes"),
    ("volumes or network, without events",
     [pod(conditions=[{"type": "PodScheduled", "status": "True"},
                      {"type": "PodReadyToStartContainers", "status": "False"}],
          containerStatuses=waiting("ContainerCreating"))], [],
     "error", "ContainerBroken", "events", "kubectl describe pod"),
    ("a large image", [pod(containerStatuses=waiting("ContainerCreating"))], [],
     "note", "StillStarting", "slow link", "kubectl describe pod"),
    ("a program that raises",
     [pod(phase="Running", containerStatuses=ended(
         67, message="Traceback\nValueError: no such layer", restarts=4, crashing=True))], [],
     "error", "CrashLoopBackOff", "see the traceback",
     "dlion logs digits --group small --worker 0 -n ml"),
    ("a trainer on which its supervisor gave up",
     [pod(phase="Failed", containerStatuses=ended(
         76, message='{"supervisor": "giving up", "code": 69, "restarts": 10}'))], [],
     "error", "ContainerFailed", "A peer or the coordinator", "dlion logs digits"),
    ("an image with another command",
     [pod(phase="Running", containerStatuses=ended(127, restarts=2, crashing=True))], [],
     "error", "CrashLoopBackOff", "docs/images.md", "dlion logs digits"),
    ("a sidecar that keeps ending",
     [pod(phase="Running", containerStatuses=waiting(
         "CrashLoopBackOff", container="sidecar", restartCount=3,
         lastState={"terminated": {"exitCode": 1}}))], [],
     "error", "CrashLoopBackOff", "See its log", "--worker 0 -c sidecar"),
    ("a keeper that keeps ending",
     [pod("digits-1-keeper-a", keeper=True, phase="Running", containerStatuses=waiting(
         "CrashLoopBackOff", container="keeper", restartCount=3,
         lastState={"terminated": {"exitCode": 74}}))], [],
     "error", "CrashLoopBackOff", "ephemeral-storage", "dlion logs digits -c keeper -n ml"),
    ("out of memory, again and again",
     [pod(phase="Running", containerStatuses=ended(
         137, reason="OOMKilled", restarts=3, crashing=True))], [],
     "error", "OOMKilled", "Raise memory in the group's resources.limits", "describe pod"),
    ("out of memory, once",
     [pod(phase="Running", containerStatuses=[{
         "name": "trainer", "ready": True, "restartCount": 1, "state": {"running": {}},
         "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}])], [],
     "warning", "OOMKilled", "Raise memory", "describe pod"),
    ("evicted for memory", [pod(phase="Failed", reason="Evicted", message=EVICTED_MEMORY)], [],
     "error", "Evicted", "ran out of memory", "kubectl describe nodes"),
    ("evicted for disk", [pod(phase="Failed", reason="Evicted", message=EVICTED_DISK)], [],
     "error", "Evicted", "raise ephemeral-storage", "kubectl describe nodes"),
    ("evicted for the size of its folder",
     [pod(phase="Failed", reason="Evicted",
          message='Usage of EmptyDir volume "state" exceeds the limit "1Gi".')], [],
     "error", "Evicted", "ephemeral-storage", "nodes"),
    ("a drained node",
     [pod(phase="Failed", conditions=[
         {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
          "message": "Eviction API: evicting"}])], [],
     "warning", "EvictionByEvictionAPI", "replaced", "kubectl get nodes"),
    ("a drained node, in its grace",
     [pod(phase="Running", deleted="2026-01-31T12:30:20Z", conditions=[
         {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
          "message": "Eviction API: evicting"}])], [],
     "warning", "EvictionByEvictionAPI", "replaced", "kubectl get nodes"),
    ("a node that is gone",
     [pod(phase="Failed", conditions=[
         {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
          "message": "Taint manager: deleting due to NoExecute taint"}])], [],
     "warning", "DeletionByTaintManager", "did not answer", "kubectl get nodes"),
    ("a node that does not answer",
     [pod(phase="Running", conditions=[{"type": "Ready", "status": "False"}])],
     [event("NodeNotReady", "Node is not ready")],
     "error", "NodeNotReady", "Bring the node back", "kubectl get nodes"),
    ("a pod that does not go",
     [pod(phase="Running", deleted="2026-01-31T12:10:00Z")], [],
     "warning", "PodNotReleased", "node is ready", "kubectl get nodes"),
    ("a keeper that does not serve",
     [pod("digits-1-keeper-a", keeper=True, phase="Running", conditions=[
         {"type": "Ready", "status": "False", "lastTransitionTime": EARLIER}])], [],
     "warning", "KeeperUnavailable", "log", "-c keeper"),
    ("a quota", [], [event("FailedCreate", QUOTA, kind="Job", name=JOB_NAME)],
     "error", "QuotaExceeded", "Raise the ResourceQuota compute",
     "kubectl describe resourcequota compute -n ml"),
    ("a quota that wants resources", [],
     [event("FailedCreate", f'Error creating: pods "{POD}" is forbidden: failed quota: compute: '
            "must specify limits.cpu for: sidecar", kind="Job", name=JOB_NAME)],
     "error", "QuotaNeedsResources", "limits.cpu for: sidecar", "resourcequota compute"),
    ("pod security", [], [event("FailedCreate", SECURITY, kind="Job", name=JOB_NAME)],
     "error", "PodSecurityViolated", "Remove from spec.podTemplate", "kubectl describe job"),
    ("a service account", [],
     [event("FailedCreate", f'Error creating: pods "{POD}" is forbidden: error looking up service '
            'account ml/robot: serviceaccount "robot" not found', kind="Job", name=JOB_NAME)],
     "error", "ServiceAccountMissing", "robot", "kubectl create serviceaccount robot -n ml"),
    ("an admission webhook", [],
     [event("FailedCreate", 'Error creating: admission webhook "policy.example" denied the '
            "request: no", kind="ReplicaSet", name=f"digits-{JOB_NAME[-6:]}-keeper-6d4")],
     "error", "AdmissionDenied", "policy.example", "kubectl describe replicaset"),
    ("a claim without a volume", [],
     [event("ProvisioningFailed", 'storageclass.storage.k8s.io "fast" not found',
            kind="PersistentVolumeClaim", name="digits-keeper")],
     "error", "ClaimPending", "StorageClass", "kubectl describe pvc digits-keeper -n ml"),
    ("workers that cannot reach each other", [],
     [event("PeersUnreached", "plant-a/small-0 has no link to plant-b/large-0 (10.0.0.9:7440)",
            kind="DLionJob", name="digits")],
     "warning", "PeersUnreached", "NetworkPolicies", "dlion events digits --types Warning -n ml"),
]  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        ";curl x|sh",
        "\x1b]0;x\x07",
        "$(x)",
        "`x`",
        "&x",
        "\n-x",
        " --kubeconfig=/x",
        " -n kube-system",
    ],
)
def test_no_command_contains_shell_or_terminal_characters(more: str) -> None:
    """Any client may choose the names in events."""
    event_of = event("FailedCreate", "no", kind="Job", name=JOB_NAME + more)
    claim = event(
        "ProvisioningFailed", "no", kind="PersistentVolumeClaim", name=f"digits-keeper{more}"
    )
    for problem in find_problems(job(), [], [event_of, claim], NOW):
        assert "--kubeconfig" not in problem.command
        assert "kube-system" not in problem.command
        assert problem.command.isprintable()
        assert not set(problem.command) & set(";|$`&()\n"), problem.command


def found(pods: Any, events: Any) -> list[JobProblem]:
    """Return all findings except those from the job's own conditions."""
    problems = find_problems(job(), pods, events, NOW)
    return [each for each in problems if each.object != "dlionjob/digits" or each.reason
            == "PeersUnreached"]  # fmt: skip


@pytest.mark.parametrize(
    ("pods", "events", "severity", "reason", "advice", "command"),
    [case[1:] for case in CASES], ids=[case[0] for case in CASES],
)  # fmt: skip
def test_each_cause_has_its_reason_advice_and_command(
    pods: list[dict[str, Any]],
    events: list[dict[str, Any]],
    severity: str,
    reason: str,
    advice: str,
    command: str,
) -> None:
    problem, *others = found(pods, events)
    assert (problem.severity, problem.reason) == (severity, reason)
    assert advice in problem.advice
    assert command in problem.command
    assert not others
    assert "preemption" not in problem.message.lower()


def test_the_most_severe_problem_is_first_and_equal_causes_are_one() -> None:
    pods = [
        pod(f"w-{index}", index=index, containerStatuses=waiting("InvalidImageName", "bad"))
        for index in range(6)
    ]
    pods.append(pod("k", keeper=True, phase="Running", conditions=[
        {"type": "Ready", "status": "False", "lastTransitionTime": EARLIER}]))  # fmt: skip
    image, keeper = found(pods, [])
    assert image.object == "pod/w-0, pod/w-1, pod/w-2, pod/w-3 and 2 more"
    assert image.command == "kubectl describe pod w-0 -n ml"
    assert (image.severity, keeper.severity) == ("error", "warning")


def test_a_cause_found_in_pods_is_not_reported_twice() -> None:
    with_cause = find_problems(job(), [CASES[0][1][0]], [], NOW)
    assert [each.reason for each in with_cause] == ["UntoleratedTaint"]
    assert [each.reason for each in find_problems(job(), [], [], NOW)] == ["WorkersStarting"]


def test_a_pod_with_a_successor_is_not_an_error() -> None:
    first = pod("old", phase="Failed", reason="Evicted", message=EVICTED_MEMORY)
    running = pod("new", phase="Running", created=RECENT)
    (problem,) = found([running, first], [])
    assert (problem.severity, problem.object) == ("warning", "pod/old")


@pytest.mark.parametrize(
    ("pods", "events"),
    [
        ([pod(phase="Running")], [event("FailedMount", 'configmap "x" not found')]),
        ([pod(phase="Succeeded", containerStatuses=ended(0))], []),
        ([pod(created=RECENT, containerStatuses=waiting("ContainerCreating"))],
         [event("FailedMount", "timed out", at=EARLIER)]),
        ([pod(conditions=[{"type": "PodReadyToStartContainers", "status": "True"}],
              containerStatuses=waiting("ContainerCreating"))],
         [event("FailedMount", "failed to sync configmap cache: timed out"),
          event("FailedCreatePodSandBox", "cni plugin not initialized")]),
        ([pod(phase="Running", created="2026-01-31T12:29:00Z")],
         [event("FailedCreate", QUOTA, kind="Job", name=JOB_NAME)]),
        ([], [event("FailedCreate", QUOTA, kind="Job", name=JOB_NAME, at=EARLIER)]),
        ([], [event("QuorumLost", "1 of 2", kind="DLionJob", name="digits", at=EARLIER)]),
        ([pod(phase="Running", deleted="2026-01-31T12:30:20Z")], []),
    ],
    ids=["mounted since", "ended well", "event of long ago", "pulls its image by now",
         "created since", "refused long ago", "quorum of long ago", "in its grace"],
)  # fmt: skip
def test_an_earlier_problem_is_not_an_error(pods: Any, events: Any) -> None:
    assert [each for each in found(pods, events) if each.severity != "note"] == []


def test_a_pod_that_downloads_does_not_start_slowly() -> None:
    states = [{"name": "dataset-initializer", "state": {"running": {"startedAt": EARLIER}}}]
    waits = waiting("PodInitializing")
    assert [each.reason for each in found([pod(containerStatuses=waits)], [])] == ["StillStarting"]
    assert found([pod(containerStatuses=waits, initContainerStatuses=states)], []) == []


def test_a_restored_quorum_is_not_a_problem() -> None:
    lost = event("QuorumLost", "1 of 2", kind="DLionJob", name="digits", at=RECENT)
    back = event("QuorumBack", "2 of 2", kind="DLionJob", name="digits", type_="Normal",
                 at="2026-01-31T12:29:00Z")  # fmt: skip
    reasons = [each.reason for each in find_problems(job(), [], [back, lost], NOW)]
    assert "QuorumLost" not in reasons
    assert "QuorumLost" in [each.reason for each in find_problems(job(), [], [lost], NOW)]


def test_without_rights_to_pods_their_events_still_count() -> None:
    problems = find_problems(job(), None, [event("FailedCreate", SECURITY, kind="Job",
                                                 name=JOB_NAME)], NOW)  # fmt: skip
    assert problems[0].reason == "PodSecurityViolated"
    assert find_problems(job(), None, None, NOW)[0].reason == "WorkersStarting"


def test_the_column_states_why_a_pod_does_not_run() -> None:
    documents = [CASES[0][1][0], pod("w-1", index=1, phase="Running")]
    why = why_not_running(pods_of_run(documents, "1"), [], JobScope("digits", "ml", NOW))
    assert list(why) == [POD]
    assert "untolerated taint" in why[POD]


@pytest.mark.parametrize("code", [1, 2, 65, 66, 67, 69, 73, 74, 75, 76, 77, 126, 137, 139, 250, -1])
def test_every_exit_code_has_advice(code: int) -> None:
    assert exit_advice(code)


ODD: list[Any] = [
    {}, {"metadata": None}, {"metadata": {"labels": []}, "spec": 3, "status": "x"},
    pod(containerStatuses={}), pod(containerStatuses=[None, 3, {}]), pod(conditions=[{}, "x"]),
    pod(containerStatuses=[{"name": "trainer", "restartCount": "9", "state": {"waiting": 3}}]),
    pod(phase="Failed", containerStatuses=ended("x")),  # type: ignore[arg-type]
    pod(phase="Failed", containerStatuses=ended(10**40)),
    pod(phase="Failed", containerStatuses=ended(
        76, message='{"supervisor": "giving up", "code": Infinity, "restarts": 1}')),
    pod(created="long ago", deleted="soon"),
    pod(phase="\x1b[2J", reason="[bold]\n", message="\x00" * 9000),
    unscheduled("{0} {1} %s " * 500),
    pod(index=10**12), pod(name="\x1b]0;x"),
]  # fmt: skip
ODD_EVENTS: list[Any] = [
    {}, {"involvedObject": 3}, {"involvedObject": {"kind": "Pod"}, "lastTimestamp": 5},
    event("FailedMount", "x" * 100_000), event("FailedCreate", "{0}{9}", kind="Job"),
    event("\x1b[2J", "\x1b[2J", kind="DLionJob", name="digits"),
    event("FailedMount", "x", at="never"), {"series": [], "involvedObject": {"kind": None}},
]  # fmt: skip


def test_malformed_documents_cause_no_error() -> None:
    for odd in ODD:
        for each in find_problems(job(), [odd, pod()], ODD_EVENTS, NOW):
            line = f"{each.object}{each.message}{each.advice}{each.command}"
            assert line.isprintable()
            assert len(line) < 4000


HOSTILE = "$(touch /tmp/x);`id`&&rm"


@pytest.mark.parametrize(
    "message",
    [
        f"exceeded quota: {HOSTILE}, requested", f'serviceaccount "{HOSTILE}" not found',
        f"couldn't find key {HOSTILE} in Secret {HOSTILE}",
        f"failed quota: {HOSTILE}: must specify x",
    ],
)  # fmt: skip
def test_no_text_of_a_message_enters_a_command(message: str) -> None:
    pods = [pod(containerStatuses=waiting("CreateContainerConfigError", message))]
    events = [event("FailedCreate", message, kind="Job", name=JOB_NAME)]
    for each in found(pods, events) + found([], events):
        assert not set("$`;&|<>(") & set(each.command), each.command
        assert shlex.split(each.command)
