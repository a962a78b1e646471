"""Test a run whose site's operator gets another authority and another address.

This happens when its Secret is deleted, or when the chart is installed again in another namespace.
The run's ConfigMap then has both new values. A new pod of a worker reaches that operator by the
ConfigMap, and the new authority signs its certificate.

Left out: nodes (the worker has the token of its pod; in the kubelet's place the test mounts the
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


def test_a_new_pod_gets_a_certificate_of_the_new_authority(
    kubectl: Kubectl, tmp_path: Path
) -> None:
    home = kubectl.namespace
    operator = OperatorProcess(tmp_path, kubectl.kubeconfig, namespaces=(home,), namespace=home)

    def config_map() -> dict[str, str]:
        (found,) = kubectl.get("configmaps", "-l", f"dlion.dev/job-name={NAME}")["items"]
        return dict(found["data"])

    def signed(pod: str) -> x509.Certificate:
        """Request a certificate for the worker with the present ConfigMap."""
        pods = ClusterPods(tmp_path, kubectl.get("dlj", NAME), kubectl, subnet=44)
        worker = pods.job.worker(Rank(0))
        address = json.loads(config_map()["pod.json"])["coordinator_address"]
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
        before = config_map()
        first = x509.load_pem_x509_certificate(before["ca.pem"].encode())
        signed("w0").verify_directly_issued_by(first)
        operator.end()
        kubectl.run("delete", "secret", "dlion-authority")
        (port,) = free_ports(1)
        elsewhere = f"127.0.0.1:{port}"
        operator.settings = {"coordinator": {"port": port, "address": elsewhere}}
        operator.start()
        eventually(lambda: elsewhere in config_map()["pod.json"], what="its address")
        assert config_map()["ca.pem"] != before["ca.pem"]
        second = x509.load_pem_x509_certificate(config_map()["ca.pem"].encode())
        signed("w0").verify_directly_issued_by(second)
