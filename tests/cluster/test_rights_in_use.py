"""Test that the chart grants exactly the rights that the API server's audit log shows in use.

Both modes are tested: a ClusterRole and only Roles. The operator has the chart's own account. A job
is created, its pod on a silent node released, trained to its end, run again, suspended and deleted.
No request is refused, and every right is used except those listed here with a reason. Left out:
pods that run (test_chart_on_a_node); the test stands in for their node.
"""

from __future__ import annotations

import base64
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

import cert_manager
import kueue
from audit import NEVER_REQUESTED, listed, refused, requests_of, used
from chart import CHART, NAMESPACE, RELEASE, SITE, Helm, helm_program
from dlion_api.cluster_names import JOB_LABEL
from dlion_api.names import SiteName
from dlion_operator.pki.authority import AUTHORITY_LIFE, CertificateAuthority
from given_authorities import GivenAuthority
from operator_process import Account, OperatorProcess
from podless_jobs import (
    end_workers,
    has_silent_worker,
    lose_worker,
    manifest,
    state_of,
    workers,
)
from runtime_table import runtime_document
from testbed.sites import Testbed
from trained_jobs import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl
    from testbed.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.root]

HOME = "ml"
USER = f"system:serviceaccount:{NAMESPACE}:dlion-operator"
MODES: dict[str, tuple[str, ...]] = {"cluster": (), "namespaced": (HOME,)}
TLS_VALUES = {"secretNames": ["plant-ca"], "certManager": cert_manager.built() is not None}
"""Without cert-manager's definitions (`make testbed-setup`) there is nothing to request."""
TLS_SCOPES = ("Secret", "CertManager") if TLS_VALUES["certManager"] else ("Secret",)


@pytest.fixture
def sites(testbed_possible: None) -> Iterator[list[Site]]:
    """An API server without a kubelet for each mode."""
    assert testbed_possible is None
    with Testbed.up(name=f"r{os.getpid()}", sites=len(MODES), nodes=0) as made:
        yield list(made.sites.values())


POLICY = f"{RELEASE}-{NAMESPACE}-tenancy"


@dataclass
class Life:
    """An operator with the chart's rights at one site, and the life of its jobs."""

    site: Site
    namespaces: tuple[str, ...]
    folder: Path

    @property
    def kubectl(self) -> Kubectl:
        """Return kubectl for the jobs' namespace."""
        return replace(self.site.kubectl, namespace=HOME)

    @property
    def system(self) -> Kubectl:
        """Return kubectl for the operator's namespace."""
        return replace(self.site.kubectl, namespace=NAMESPACE)

    def install(self) -> OperatorProcess:
        """The chart; the operator as a process under its account, not started."""
        for name in (NAMESPACE, HOME):
            self.site.kubectl.run("create", "namespace", name)
        program = helm_program()
        assert program is not None
        helm = Helm(program, self.folder / "helm", self.site.kubectl)
        values = {
            **SITE,
            "namespaces": list(self.namespaces),
            "tls": TLS_VALUES,
            "kueue": {"enabled": True},
        }
        kueue.install(self.site.kubectl)
        if (folder := cert_manager.built()) is not None:
            cert_manager.install(folder, self.site.kubectl)
        helm.run("install", RELEASE, str(CHART), "-n", NAMESPACE, values=values)
        eventually(lambda: self.kubectl.knows("dlj"), what="the definition served")
        self.system.wait_until_known("dlr")
        return OperatorProcess(
            self.folder,
            Account.of(self.system, "dlion-operator", self.folder / "account"),
            namespaces=self.namespaces,
            namespace=NAMESPACE,
            settings={
                "keeper": {"size": "1Gi"},
                "authority": {"ownerService": "dlion-operator"},
                "kueue": True,
                "networkPolicies": {"enabled": True},
                # It belongs to the cluster: the chart creates it if all namespaces are watched.
                "tenancy": {"admissionPolicy": "" if self.namespaces else POLICY},
            },
        )

    def begin(self, operator: OperatorProcess) -> None:
        """Create two jobs, the first by a runtime; a pod of the first is on a silent node."""
        operator.kill()
        self._age_the_authority()
        operator.start()
        self.kubectl.apply(GivenAuthority().secret())
        named = {"mode": "Secret", "secretName": "plant-ca"}
        self.system.apply(runtime_document({}))
        self.kubectl.apply(manifest("first", runtime="edge"), manifest("second", tls=named))
        if TLS_VALUES["certManager"]:
            issued = {"mode": "CertManager", "issuerName": "nobody"}
            self.kubectl.apply(manifest("third", tls=issued))
            eventually(lambda: self.kubectl.get("certificates")["items"], what="a Certificate")
        eventually(lambda: self._has_pods("first"), what="pods of the first job")
        lose_worker(self.kubectl, "first")

    def queue(self) -> None:
        """A job waits for its class, is admitted, evicted, admitted elsewhere, and suspended."""
        labels = {"kueue.x-k8s.io/queue-name": "edge", "kueue.x-k8s.io/priority-class": "urgent"}
        high = {"podTemplate": {"spec": {"priorityClassName": "high"}}}
        job = manifest("queued", **high)
        job["metadata"]["labels"] = labels
        self.kubectl.apply(
            kueue.resource_flavor("arm", {"arch": "arm"}),
            kueue.resource_flavor("x86", {"arch": "x86"}),
            {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
             "metadata": {"name": "high"}, "value": 7},
            job,
        )  # fmt: skip
        eventually(lambda: self._ready_reason("queued") == "QueueUnusable", what="no class")
        self.kubectl.run("label", "dlj", "queued", "kueue.x-k8s.io/priority-class-")
        for flavor in ("arm", "x86"):
            eventually(lambda: self._ready_reason("queued") == "Queued", what="Queued")
            eventually(lambda: kueue.workload_of(self.kubectl, "queued"), what="a Workload")
            kueue.admit(self.kubectl, "queued", flavor)
            eventually(lambda: self._has_pods("queued"), what="pods of the queued job")
            kueue.evict(self.kubectl, "queued")
            eventually(self._has_given_back, what="its quota given back")
        self.kubectl.apply({**job, "spec": {**job["spec"], "suspend": True}})
        eventually(lambda: not kueue.workload_of(self.kubectl, "queued"), what="no Workload")

    def _has_given_back(self) -> bool:
        found = kueue.workload_of(self.kubectl, "queued") or {}
        return "admission" not in found.get("status", {})

    def _ready_reason(self, name: str) -> str:
        conditions = (self.kubectl.get("dlj", name).get("status") or {}).get("conditions") or ()
        return next((each["reason"] for each in conditions if each["type"] == "Ready"), "")

    def finish(self, operator: OperatorProcess) -> None:
        """Replace the site's authority. Train the second job to its end and run it again; delete
        all once the lost pod is released.
        """
        eventually(lambda: self._has_pods("second"), what="pods of the second job")
        known_by = self._known_by()
        operator.kill()
        self._age_the_authority()
        operator.start()
        eventually(lambda: self._known_by() != known_by, what="the pods know it")
        for kind in ("deployments", "persistentvolumeclaims"):
            self._take_label_off(kind)
        end_workers(self.kubectl, "second")
        self.kubectl.wait("--for=condition=Succeeded", "dlj/second")
        named = {"mode": "Secret", "secretName": "plant-ca"}
        self.kubectl.apply(manifest("second", runId="2", tls=named))
        eventually(lambda: self._runs("second") == {"2"}, what="the second run alone")
        eventually(lambda: self._has_pods("second"), what="pods of the second run")
        self.kubectl.apply(manifest("second", runId="2", tls=named, suspend=True))
        eventually(lambda: state_of(self.kubectl, "second") == "Suspended", what="Suspended")
        eventually(self._is_released, within_s=120, what="the lost pod released")
        self.kubectl.run("delete", "dlj", "--all")
        eventually(lambda: not self.kubectl.get("leases")["items"], what="the Lease let go")

    def _age_the_authority(self) -> None:
        """Make its certificate due for renewal."""
        long_ago = datetime.now(UTC) - AUTHORITY_LIFE + timedelta(days=30)
        kept = CertificateAuthority(SiteName(SITE["site"]["name"]), now=long_ago).to_stored()
        files = {"tls.crt": kept.certificate_pem, "tls.key": kept.key_pem}
        data = {name: base64.b64encode(content).decode() for name, content in files.items()}
        patch = json.dumps({"data": data})
        self.system.run("patch", "secret", "dlion-authority", "--type=merge", "-p", patch)

    def _take_label_off(self, kind: str) -> None:
        """Wait until the operator restores it."""
        chosen = (kind, "-l", "dlion.dev/job-name=second")
        (found,) = self.kubectl.get(*chosen)["items"]
        self.kubectl.run("label", kind, found["metadata"]["name"], f"{JOB_LABEL}-")
        eventually(lambda: self.kubectl.get(*chosen)["items"], what=f"the label of {kind}")

    def _known_by(self) -> set[str]:
        """Return how the pods of the jobs identify the operator."""
        found = self.kubectl.get("configmaps", "-l", "dlion.dev/job-name=second")["items"]
        return {each["data"]["ca.pem"] for each in found}

    def _has_pods(self, name: str) -> bool:
        return len(workers(self.kubectl, name)) == 3

    def _runs(self, name: str) -> set[str]:
        """Return the runs with remaining objects."""
        kinds = "jobs,deployments,services,configmaps"
        found = self.kubectl.get(kinds, "-l", f"dlion.dev/job-name={name}")["items"]
        return {each["metadata"]["labels"]["dlion.dev/run-id"] for each in found}

    def _is_released(self) -> bool:
        return self._has_pods("first") and not has_silent_worker(self.kubectl, "first")


def live(life: Life) -> None:
    """Run from the chart's installation to the last job's end."""
    with life.install() as operator:
        life.begin(operator)
        life.queue()
        life.finish(operator)


def test_the_granted_rights_are_those_of_a_jobs_life(sites: list[Site], tmp_path: Path) -> None:
    lives = {}
    for (mode, namespaces), site in zip(MODES.items(), sites, strict=True):
        lives[mode] = Life(site, namespaces, tmp_path / mode)
        lives[mode].folder.mkdir()
    with ThreadPoolExecutor() as pool:  # most of the time is the minute until a pod is lost
        list(pool.map(live, lives.values()))
    for mode, life in lives.items():
        asked = requests_of(USER, life.site.control_plane.audit_log)
        everywhere, jobs, own = (used(asked, name) for name in ("", HOME, NAMESPACE))
        print(f"{mode}: {len(asked)} requests, {len(everywhere | jobs | own)} rights used")
        assert refused(asked) == [], mode
        of_all = () if life.namespaces else ("cluster", "AdmissionPolicy")
        granted = listed("jobs", *of_all, *TLS_SCOPES, "Kueue", "KueueClasses")
        assert everywhere | jobs == granted - NEVER_REQUESTED.keys(), mode
        assert own == listed("operator"), mode
        if life.namespaces:
            assert everywhere == listed("KueueClasses")
