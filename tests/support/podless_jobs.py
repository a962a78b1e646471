"""Jobs beside an API server that runs no pods: manifests, child objects, and a substitute for a
node."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fault_proxy import waited
from manifest_table import smallest

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

KINDS = "jobs,services,configmaps,deployments,pvc,pods"
WORKERS = "app.kubernetes.io/component=worker"
SILENT_NODE = "silent"
_WITHIN_S = 60


def manifest(name: str = "digits", *, small: int = 2, **changes: Any) -> dict[str, Any]:
    """A manifest with two groups at plant-a, of `small` workers and one; `changes` apply to its
    spec."""
    document = smallest()
    document["metadata"] = {"name": name}
    groups = [{"name": "small", "workers": small}, {"name": "large", "workers": 1}]
    document["spec"] |= {"sites": [{"name": "plant-a", "groups": groups}], **changes}
    return document


def children(kubectl: Kubectl) -> list[str]:
    """Kind and name of all objects of a job, pods without their suffix; each has one owner."""
    chosen = "app.kubernetes.io/managed-by=dlion-operator,dlion.dev/job-name"
    found = kubectl.get(KINDS, "-l", chosen)["items"]
    there = [each for each in found if not each["metadata"].get("deletionTimestamp")]
    for each in there:
        assert len(each["metadata"]["ownerReferences"]) == 1, each["metadata"]["name"]
    return sorted(_place(each["kind"], each["metadata"]["name"]) for each in there)


def _place(kind: str, name: str) -> str:
    return f"{kind}/{re.sub('-[a-z0-9]{5}$', '', name)}" if kind == "Pod" else f"{kind}/{name}"


def settled(kubectl: Kubectl, *, pods: int, jobs: int = 2) -> list[str]:
    """Return the children once that number of Jobs exists (two for each run), with their pods and
    the keepers'."""

    def there() -> bool:
        names = children(kubectl)
        of_jobs = [each for each in names if each.startswith("Pod/") and "keeper" not in each]
        keepers = [each.partition("/")[0] for each in names if "keeper" in each]
        return (
            sum(each.startswith("Job/") for each in names) == jobs
            and len(of_jobs) == pods
            and all(keepers.count(kind) == jobs // 2 for kind in ("Deployment", "Pod", "Service"))
        )

    assert waited(there, _WITHIN_S), children(kubectl)
    return children(kubectl)


def state_of(kubectl: Kubectl, name: str = "digits") -> str:
    """The job's state, in one word; empty before there is one."""
    return str((kubectl.get("dlj", name).get("status") or {}).get("state", ""))


def workers(kubectl: Kubectl, name: str = "digits") -> list[dict[str, Any]]:
    """The pods of a job's workers."""
    chosen = f"dlion.dev/job-name={name},{WORKERS}"
    found: list[dict[str, Any]] = kubectl.get("pods", "-l", chosen)["items"]
    return found


def has_silent_worker(kubectl: Kubectl, name: str = "digits") -> bool:
    """Whether a worker is on the node of `lose_worker`."""
    return any(pod["spec"].get("nodeName") == SILENT_NODE for pod in workers(kubectl, name))


def end_workers(kubectl: Kubectl, name: str = "digits") -> None:
    """Report in place of a kubelet that every worker has ended."""
    ended = json.dumps({"status": {"phase": "Succeeded"}})
    for pod in workers(kubectl, name):
        kubectl.run("patch", "pod", pod["metadata"]["name"], "--subresource=status",
                    "--type=merge", "-p", ended)  # fmt: skip


def place(kubectl: Kubectl, pod: str) -> None:
    """Bind a pod to a node that never reports."""
    kubectl.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": SILENT_NODE}})
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod},
        "target": {"apiVersion": "v1", "kind": "Node", "name": SILENT_NODE},
    }
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/binding"
    kubectl.run("create", "--raw", path, "-f", "-", text=json.dumps(binding))


def lose_worker(kubectl: Kubectl, name: str = "digits") -> None:
    """Delete a worker's pod on a node that never reports its end, as Kubernetes does for a lost
    node."""
    lost = workers(kubectl, name)[0]["metadata"]["name"]
    place(kubectl, lost)
    given_up = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByTaintManager",
        "lastTransitionTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",  # else it counts as old
    }
    kubectl.run("patch", "pod", lost, "--subresource=status",
                "-p", json.dumps({"status": {"conditions": [given_up]}}))  # fmt: skip
    kubectl.run("delete", "pod", lost, "--grace-period=1", "--wait=false")


def conditions(kubectl: Kubectl) -> dict[str, tuple[str, str, str]]:
    """Status, reason and message of each condition of the job."""
    status = kubectl.get("dlj", "digits").get("status") or {}
    return {
        each["type"]: (each["status"], each["reason"], each.get("message", ""))
        for each in status.get("conditions") or ()
    }


def is_over(kubectl: Kubectl) -> bool:
    """Whether the run of the job has ended, successfully or not."""
    found = conditions(kubectl)
    return any(found[each][0] == "True" for each in ("Succeeded", "Failed") if each in found)


def jobs(kubectl: Kubectl) -> list[dict[str, Any]]:
    """The Jobs of the job."""
    found: list[dict[str, Any]] = kubectl.get("jobs", "-l", "dlion.dev/job-name=digits")["items"]
    return found
