"""Kubeflow Trainer beside a real API server: its manager and that of JobSet, as processes.

Both are built once from the Go module in `kubeflow_trainer/`, into the testbed's cache. They have
the configuration that their projects ship, without leader election. The API server calls their
webhooks, as in a cluster. A TrainJob refers to a runtime with one replicated job.
"""

from __future__ import annotations

import base64
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from job_kind import JobKind
from one_run import Figures, Run, Size, start, work_folder
from scaled_site import scaled_site

from dlion_api.errors import UnavailableError
from operator_process import cpu_of, free_ports, http_get, resident_mb, sum_of_samples
from testbed.binaries import BuiltFolder, go, source_of
from testbed.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Sequence

    from testbed.kubectl import Kubectl

MODULE = Path(__file__).with_name("kubeflow_trainer")
TRAINER, JOBSET = "github.com/kubeflow/trainer/v2", "sigs.k8s.io/jobset"
_PROGRAMS = {
    "trainer-controller-manager": f"{TRAINER}/cmd/trainer-controller-manager",
    "jobset": JOBSET,
}
_FILES = {
    TRAINER: ("manifests/base/crds/trainer.*.yaml", "manifests/base/webhook/manifests.yaml"),
    JOBSET: ("config/components/crd/bases/*.yaml", "config/components/webhook/manifests.yaml"),
}
_SHIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "trainer-controller-manager": (
        "trainer.kubeflow.org",
        {
            "certManagement": {"enable": False},
            "clientConnection": {"qps": 50, "burst": 100},
            "controller": {
                "groupKindConcurrency": {
                    "TrainJob.trainer.kubeflow.org": 5,
                    "TrainingRuntime.trainer.kubeflow.org": 1,
                    "ClusterTrainingRuntime.trainer.kubeflow.org": 1,
                }
            },
            "metrics": {"secureServing": False},
        },
    ),
    "jobset": ("jobset.x-k8s.io", {"internalCertManagement": {"enable": False}}),
}
"""The group of each program's configuration, and its shipped values. Certificates are issued here,
and the benchmark reads the metrics without a token.
"""
_RUNTIME = "workers"
_COUNT_S = 2.0
"""A list of all jobs takes CPU of the API server, so it is read less often than it is asked for."""


def _make(folder: Path) -> None:
    for program, package in _PROGRAMS.items():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            go("build", "-trimpath", "-ldflags", "-s -w", "-o", made, package, module=MODULE)
            (Path(made) / program).rename(folder / program)
    for module, patterns in _FILES.items():
        kinds, webhooks = (sorted(source_of(module, MODULE).glob(each)) for each in patterns)
        name = module.split("/")[1]
        for what, paths in (("kinds", kinds), ("webhooks", webhooks)):
            text = "\n---\n".join(path.read_text() for path in paths)
            (folder / f"{name}-{what}.yaml").write_text(text)


build = BuiltFolder("kubeflow-trainer", MODULE, _make).build
"""Builds both programs, which takes minutes on two cores, and copies their definitions."""


def version() -> str:
    """Return the versions of both, such as `v2.3.0 with JobSet v0.12.0`."""
    trainer, jobset = (
        go("list", "-m", "-f", "{{.Version}}", each, module=MODULE).strip()
        for each in (TRAINER, JOBSET)
    )
    return f"{trainer} with JobSet {jobset}"


def train_job(number: int, workers: int) -> dict[str, Any]:
    """Return the manifest of one job with so many nodes, a pod each."""
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": f"job-{number:04}", "namespace": "default"},
        "spec": {"runtimeRef": {"name": _RUNTIME}, "trainer": {"numNodes": workers}},
    }


TRAIN_JOBS = JobKind(
    resource="trainjobs",
    path="/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs",
    manifest=train_job,
    agents=tuple(_PROGRAMS),
    passes='controller_runtime_reconcile_total{controller="trainjob_controller",result="success"',
    defects='controller_runtime_reconcile_panics_total{controller="trainjob_controller"',
)


class Managers:
    """Both managers as one operator."""

    def __init__(self, folder: Path, kubeconfig: Path, host: str) -> None:
        """`host` is the address at which the API server reaches their webhooks."""
        self._folder, self._kubeconfig, self._host = folder, kubeconfig, host
        self._programs = build()
        self._authority = Authority.make(folder / "authority", "ca")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ports = dict(
            zip(_PROGRAMS, zip(*[iter(free_ports(6))] * 3, strict=True), strict=True)
        )
        for name in _PROGRAMS:
            self._configure(name)

    def _configure(self, name: str) -> None:
        health, metrics, webhook = self._ports[name]
        group, own = _SHIPPED[name]
        document = {
            "apiVersion": f"config.{group}/v1alpha1",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "webhook": {"port": webhook, "host": self._host},
            "leaderElection": {"leaderElect": False},
            **own,
        }
        document["metrics"] = {**own.get("metrics", {}), "bindAddress": f"127.0.0.1:{metrics}"}
        # controller-runtime reads the certificate of webhooks below the folder of temporary files.
        certificates = self._folder / name / "k8s-webhook-server" / "serving-certs"
        certificates.mkdir(parents=True)
        self._authority.issue(name, name, hosts=(self._host,))
        for suffix in ("crt", "key"):
            issued = self._authority.folder / f"{name}.{suffix}"
            issued.rename(certificates / f"tls.{suffix}")
        (self._folder / f"{name}.yaml").write_text(yaml.safe_dump(document))

    def launch(self) -> None:
        for name in _PROGRAMS:
            environment = {
                **os.environ,
                "TMPDIR": str(self._folder / name),
                "KUBECONFIG": str(self._kubeconfig),
            }
            with self._log(name).open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        [str(self._programs / name), f"--config={self._folder / name}.yaml"],
                        stdout=log, stderr=log, env=environment,
                    )
                )  # fmt: skip

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []

    def is_ready(self) -> bool:
        healths = (health for health, _, _ in self._ports.values())
        return all(http_get(f"http://127.0.0.1:{port}/readyz")[0] == 200 for port in healths)

    def is_running(self) -> bool:
        polled = [process.poll() for process in self._processes]
        return bool(polled) and polled == [None] * len(polled)

    def last_log_lines(self) -> str:
        logs = (self._log(name) for name in _PROGRAMS)
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs if log.exists())

    def metric(self, name: str) -> float:
        _, metrics, _ = self._ports["trainer-controller-manager"]
        return sum_of_samples(http_get(f"http://127.0.0.1:{metrics}/metrics")[1], name)

    def memory_mb(self) -> float:
        return sum(resident_mb(process.pid) for process in self._processes)

    def cpu_s(self) -> float:
        return sum(cpu_of(process.pid) for process in self._processes)

    def webhooks(self) -> list[dict[str, Any]]:
        """Return both projects' webhook configurations, for the API server's way to them."""
        authority = (self._authority.folder / "ca.crt").read_bytes()
        found = []
        for name, prefix in zip(_PROGRAMS, ("kubeflow", "jobset"), strict=True):
            _, _, port = self._ports[name]
            text = (self._programs / f"{prefix}-webhooks.yaml").read_text()
            for document in filter(None, yaml.safe_load_all(text)):
                document["metadata"]["name"] = f"{prefix}-{document['kind'].lower()}"
                for webhook in document["webhooks"]:
                    path = webhook["clientConfig"]["service"]["path"]
                    webhook["clientConfig"] = {
                        "url": f"https://{self._host}:{port}{path}",
                        "caBundle": base64.b64encode(authority).decode(),
                    }
                    if "-pod" in path:  # as their kustomization does
                        label = {"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}
                        webhook["objectSelector"] = {"matchExpressions": [label]}
                found.append(document)
        return found


class ReadyNodes:
    """The nodes of all TrainJobs, by their statuses. They have no connection to the managers."""

    def __init__(self, kubectl: Kubectl, workers: int) -> None:
        self._kubectl, self._workers = kubectl, workers
        self._count, self._counted_s = 0, float("-inf")

    def at_work(self) -> int:
        if time.monotonic() - self._counted_s > _COUNT_S:
            jobs = self._kubectl.get("trainjobs")["items"]
            self._count = self._workers * sum(map(_is_ready, jobs))
            self._counted_s = time.monotonic()
        return self._count

    def described(self) -> str:
        return f"{self._count} nodes are ready"

    def refused(self) -> int:
        return 0

    def wait_for_loss(self) -> None:
        pass

    def close(self) -> None:
        pass


def _is_ready(job: dict[str, Any]) -> bool:
    states: Sequence[dict[str, Any]] = (job.get("status") or {}).get("jobsStatus") or ()
    return any(state.get("ready") for state in states)


def measure(size: Size) -> Figures:
    """Run once from nothing."""
    with work_folder() as folder, scaled_site(pods=size.jobs * size.workers) as (site, host):
        programs = build()
        files = [f"--filename={path}" for path in sorted(programs.glob("*-kinds.yaml"))]
        site.kubectl.run("apply", "--server-side", *files)
        site.kubectl.wait_until_known("trainjobs.trainer.kubeflow.org", "jobsets.jobset.x-k8s.io")
        managers = Managers(folder, site.kubeconfig, host)
        try:
            start(managers, size.within_s)
            site.kubectl.apply(*managers.webhooks())
            _add_runtime(site.kubectl)
            workers = ReadyNodes(site.kubectl, size.workers)
            return Run(size, TRAIN_JOBS, site, managers, workers).measure()
        finally:
            managers.kill()


def _add_runtime(kubectl: Kubectl) -> None:
    container = {"name": "node", "image": "dlion.test/worker:1"}
    template = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": _RUNTIME},
        "spec": {
            "mlPolicy": {"numNodes": 1},
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": template}]}},
        },
    }
    deadline_s = time.monotonic() + 60
    while True:
        try:
            kubectl.apply(runtime)
        except UnavailableError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)  # the API server does not know the webhooks at once
        else:
            return
