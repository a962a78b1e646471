"""A site's operator has another authority and another address while a run of the site goes on, as
when its Secret is deleted, or the chart is installed anew in another namespace.

Proves: the run's ConfigMap tells of both; a worker that starts anew then, in a new pod, reaches
that operator by what stands there, and is signed for by the new authority.
Left out: nodes (the worker has the token of its pod; in a kubelet's place the test mounts the
ConfigMap); several sites, which need the new bundle.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from cryptography import x509

from cluster_pods import Access, ClusterPods
from dlion_api.names import Rank
from dlion_worker.coordination import request_certificate
from dlion_worker.security.credentials import WorkerKey
from local_run import job_document
from operator_process import OperatorProcess, free_ports
from podless_jobs import workers
from trained_jobs import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NAME = "test"


def test_a_new_pod_is_signed_for_by_an_operator_with_another_authority_and_address(
    kubectl: Kubectl, tmp_path: Path
) -> None:
    home = kubectl.namespace
    operator = OperatorProcess(tmp_path, kubectl.kubeconfig, namespaces=(home,), namespace=home)

    def told() -> dict[str, str]:
        (found,) = kubectl.get("configmaps", "-l", f"dlion.dev/job-name={NAME}")["items"]
        return dict(found["data"])

    def signed(pod: str) -> x509.Certificate:
        """For the worker, with what the ConfigMap says now."""
        pods = ClusterPods(tmp_path, kubectl.get("dlj", NAME), kubectl, subnet=44)
        worker = pods.job.worker(Rank(0))
        address = json.loads(told()["pod.json"])["coordinator_address"]
        given = request_certificate(
            Access(address, pods.prepare(pod, worker)),
            job=pods.job.key,
            worker=worker,
            csr_pem=WorkerKey().csr_pem(),
            role="trainer",
            wait_s=30.0,
        )
        return x509.load_pem_x509_certificate(given.chain_pem)

    with operator:
        kubectl.apply(job_document(1))
        eventually(lambda: workers(kubectl, NAME), what="the worker's pod")
        before = told()
        first = x509.load_pem_x509_certificate(before["ca.pem"].encode())
        signed("w0").verify_directly_issued_by(first)
        operator.end()
        kubectl.run("delete", "secret", "dlion-authority")
        (port,) = free_ports(1)
        elsewhere = f"127.0.0.1:{port}"
        operator.settings = {"coordinator": {"port": port, "address": elsewhere}}
        operator.start()
        eventually(lambda: elsewhere in told()["pod.json"], what="its address")
        assert told()["ca.pem"] != before["ca.pem"]
        second = x509.load_pem_x509_certificate(told()["ca.pem"].encode())
        signed("w0").verify_directly_issued_by(second)
