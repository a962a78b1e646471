"""Kueue beside a real API server: its own definitions, and its manager as a process.

The program is built once from the Go module in `kueue_manager/`, into the testbed's cache
(testbed.binaries). Its definitions are put beside it. Its webhooks are not registered, so requests
of other programs do not depend on it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from dlion_api.errors import UnavailableError
from operator_process import free_ports
from testbed.binaries import BuiltFolder, go, source_of
from testbed.certificates import Authority

if TYPE_CHECKING:
    from types import TracebackType

    from testbed.kubectl import Kubectl

MODULE = Path(__file__).with_name("kueue_manager")
NAME = "sigs.k8s.io/kueue"
NAMESPACE = "kueue-system"
_ALONE = """
mount -t tmpfs none /etc
mkdir -p /etc/kueue/metrics/certs
cp "$0"/tls.crt "$0"/tls.key /etc/kueue/metrics/certs
cp "$1" "$2" /etc/kueue
shift 2
mount -t tmpfs none /tmp
mkdir /tmp/k8s-webhook-server
ln -s /etc/kueue/metrics/certs /tmp/k8s-webhook-server/serving-certs
exec "$@"
"""
"""The manager reads the certificates of its metrics and webhooks at fixed paths (root)."""
EXTERNAL = "DLionJob.v1alpha1.dlion.dev"
_KINDS = ("workloads", "clusterqueues", "localqueues", "resourceflavors", "workloadpriorityclasses")


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        package = f"{NAME}/cmd/kueue"
        go("build", "-trimpath", "-ldflags", "-s -w", "-o", made, package, module=MODULE)
        (Path(made) / "kueue").rename(folder / "kueue")


def _copy_definitions(folder: Path) -> None:
    go("mod", "download", NAME, module=MODULE)
    for path in (source_of(NAME, MODULE) / "config/components/crd/bases").glob("*.yaml"):
        shutil.copyfile(path, folder / path.name)


_PROGRAMS = BuiltFolder("kueue", MODULE, _make)
built, build = _PROGRAMS.built, _PROGRAMS.build
definitions = BuiltFolder("kueue-kinds", MODULE, _copy_definitions).build
"""Only its definitions, without the program, which takes five minutes to build on two cores."""


def install(kubectl: Kubectl) -> None:
    """Add its kinds to the API server."""
    files = [f"--filename={path}" for path in sorted(definitions().glob("*.yaml"))]
    kubectl.run("apply", "--server-side", *files)
    kubectl.wait_until_known(*(f"{kind}.kueue.x-k8s.io" for kind in _KINDS))


def resource_flavor(name: str, labels: dict[str, str], **spec: Any) -> dict[str, Any]:
    """A ResourceFlavor of nodes with these labels."""
    return _document("ResourceFlavor", name, spec={"nodeLabels": labels, **spec})


def priority_class(name: str, value: int) -> dict[str, Any]:
    """A WorkloadPriorityClass."""
    return _document("WorkloadPriorityClass", name, value=value)


def cluster_queue(name: str, flavor: str, *, cpu: str, **more: Any) -> dict[str, Any]:
    """A ClusterQueue with that much CPU, in which a job of higher priority preempts."""
    resources = [
        {"name": "cpu", "nominalQuota": cpu},
        {"name": "memory", "nominalQuota": "64Gi"},
    ]
    group = {
        "coveredResources": ["cpu", "memory"],
        "flavors": [{"name": flavor, "resources": resources}],
    }
    spec = {
        "namespaceSelector": {},
        "resourceGroups": [group],
        "preemption": {"withinClusterQueue": "LowerPriority"},
        **more,
    }
    return _document("ClusterQueue", name, spec=spec)


def local_queue(name: str, cluster_queue: str) -> dict[str, Any]:
    """A LocalQueue of the namespace that it is applied to."""
    return _document("LocalQueue", name, spec={"clusterQueue": cluster_queue})


def worker_cluster(name: str, kubeconfig: Path) -> list[dict[str, Any]]:
    """The objects of an admission check that dispatches to one cluster; both have that name."""
    reached = {"kubeConfig": {"locationType": "Secret", "location": name}}
    config = {"apiGroup": "kueue.x-k8s.io", "kind": "MultiKueueConfig", "name": name}
    check = {"controllerName": "kueue.x-k8s.io/multikueue", "parameters": config}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "stringData": {"kubeconfig": kubeconfig.read_text()},
        },
        _document("MultiKueueCluster", name, spec={"clusterSource": reached}),
        _document("MultiKueueConfig", name, spec={"clusters": [name]}),
        _document("AdmissionCheck", name, spec=check),
    ]


def _document(kind: str, name: str, **parts: Any) -> dict[str, Any]:
    metadata = {"name": name}
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": metadata, **parts}


def workload_of(kubectl: Kubectl, job: str) -> dict[str, Any] | None:
    """Return the Workload of that DLionJob, or None."""
    found = kubectl.get("workloads.kueue.x-k8s.io", "-l", f"dlion.dev/job-name={job}")["items"]
    return found[0] if found else None


def admit(kubectl: Kubectl, job: str, flavor: str) -> None:
    """Admit a job's Workload as Kueue does, all in that flavor."""
    workload = workload_of(kubectl, job)
    assert workload is not None
    assignments = [
        {"name": each["name"], "count": each["count"], "flavors": {"cpu": flavor}}
        for each in workload["spec"]["podSets"]
    ]
    admission = {"clusterQueue": "all", "podSetAssignments": assignments}
    states = {"QuotaReserved": "True", "Admitted": "True", "Evicted": "False"}
    _write_status(kubectl, workload, states, admission=admission)


def evict(kubectl: Kubectl, job: str, reason: str = "Preempted") -> None:
    """Evict a job's Workload as Kueue does when it reclaims the quota."""
    workload = workload_of(kubectl, job)
    assert workload is not None
    _write_status(kubectl, workload, {"Evicted": "True"}, reason=reason)


def _write_status(
    kubectl: Kubectl,
    workload: dict[str, Any],
    states: dict[str, str],
    *,
    reason: str = "ByTest",
    **status: Any,
) -> None:
    before = (workload.get("status") or {}).get("conditions") or []
    made = [
        {
            "type": type_,
            "status": state,
            "reason": reason,
            "message": f"{type_} by the test",
            "lastTransitionTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        }
        for type_, state in states.items()
    ]
    conditions = [each for each in before if each["type"] not in states] + made
    patch = json.dumps({"status": {"conditions": conditions, **status}})
    name = workload["metadata"]["name"]
    kubectl.run("patch", "workloads.kueue.x-k8s.io", name, "--subresource=status",
                "--type=merge", "-p", patch)  # fmt: skip


class Kueue:
    """Its manager, for a whole cluster that knows its kinds; the context ends it."""

    def __init__(self, folder: Path, kubectl: Kubectl, work: Path) -> None:
        """`folder` is the result of `build`; its configuration and log are kept in `work`."""
        self._folder, self._kubectl, self._work = folder, kubectl, work
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        certificates = self._work / "certificates"
        Authority.make(certificates, "ca").issue("tls", "kueue", hosts=("127.0.0.1",))
        health, metrics, webhook = free_ports(3)
        configuration = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "metrics": {"bindAddress": f"127.0.0.1:{metrics}"},
            "webhook": {"port": webhook, "host": "127.0.0.1"},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["batch/job"], "externalFrameworks": [EXTERNAL]},
            "multiKueue": {"externalFrameworks": [{"name": EXTERNAL}]},
        }
        path = self._work / "kueue.yaml"
        path.write_text(yaml.safe_dump(configuration))
        with (self._work / "kueue.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--propagation=private", "sh", "-ec", _ALONE,
                 str(certificates), str(path), str(self._kubectl.kubeconfig),
                 str(self._folder / "kueue"), f"--config=/etc/kueue/{path.name}",
                 f"--kubeconfig=/etc/kueue/{self._kubectl.kubeconfig.name}",
                 "--zap-log-level=2", "--feature-gates=VisibilityOnDemand=false"],
                stdout=log, stderr=log,
            )  # fmt: skip
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def check(self) -> None:
        """Raises: UnavailableError with the end of its log if it has ended."""
        if self._process is None or self._process.poll() is not None:
            output = (self._work / "kueue.log").read_text()[-3000:]
            raise UnavailableError(f"Kueue ended: {output}")
