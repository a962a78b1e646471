"""Test workers of a job that names an authority in a Secret, with a real API server without nodes.

Nothing starts before the Secret exists. Then its authority signs for a worker, and after a change
of the Secret and a restart of the operator the other one. Without the Secret the status reports
that. Slow test: two real workers train over links, and with a keeper. One is in a new pod with a
certificate of the second authority, the other has one of the first. Without the Secret they
continue.

With cert-manager's own controllers, the job's Certificate is issued and the operator signs with it.
Before that the status has the reason of the delay, and the Certificate is deleted with the job.

Left out: pods (the workers are processes with the pods' own tokens), requirements of an authority
(tests/unit/operator), several sites (tests/local/test_federated_runs).
"""

from __future__ import annotations

import json
import signal
import socket
import ssl
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

import cert_manager
from cert_manager import CertManager
from cluster_pods import Access, ClusterPods
from dlion_api.cluster_names import AUTHORITIES_ANNOTATION, EXCHANGE_PORT
from dlion_api.names import Rank
from dlion_worker.coordination import request_certificate
from dlion_worker.security.credentials import WorkerKey
from given_authorities import GivenAuthority
from local_run import blobs_in_a_cluster, job_document
from operator_process import OperatorProcess
from podless_jobs import children, workers
from trained_jobs import eventually

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME = "test"
TLS = {"mode": "Secret", "secretName": "plant-ca"}


def ready(kubectl: Kubectl) -> dict[str, Any]:
    """Return the condition Ready; empty if there is none."""
    status = kubectl.get("dlj", NAME).get("status") or {}
    found = [each for each in status.get("conditions") or () if each["type"] == "Ready"]
    return found[0] if found else {}


def shown_at(host: str) -> x509.Certificate | None:
    """Return the certificate of a worker for its peers; None: it accepts no calls now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, EXCHANGE_PORT), timeout=5) as plain,
            context.wrap_socket(plain) as secured,
        ):
            shown = secured.getpeercert(binary_form=True)
    except OSError:
        return None
    return x509.load_der_x509_certificate(shown) if shown else None


def is_by(certificate: x509.Certificate | None, given: GivenAuthority) -> bool:
    """Report whether that authority has signed it."""
    if certificate is None:
        return False
    try:
        certificate.verify_directly_issued_by(given.certificate)
    except (InvalidSignature, ValueError):
        return False
    return True


def kept(kubectl: Kubectl) -> bytes:
    """Return the authorities that verify this site's workers, as their Job stores them."""
    (job,) = kubectl.get("jobs")["items"]
    text = (job["metadata"].get("annotations") or {}).get(AUTHORITIES_ANNOTATION, "{}")
    return str(json.loads(text).get("plant-a", "")).encode()


def signed(
    kubectl: Kubectl, operator: OperatorProcess, folder: Path, *, subnet: int
) -> x509.Certificate:
    """Return the certificate that the operator gives the first worker's pod."""
    pods = ClusterPods(folder, kubectl.get("dlj", NAME), kubectl, subnet=subnet)
    worker = pods.job.worker(Rank(0))
    given = request_certificate(
        Access(operator.coordinator_address, pods.prepare("w0", worker)),
        job=pods.job.key,
        worker=worker,
        csr_pem=WorkerKey().csr_pem(),
        role="trainer",
        wait_s=30.0,
    )
    return x509.load_pem_x509_certificate(given.chain_pem)


@pytest.fixture(scope="session")
def cert_manager_folder() -> Path:
    """The build of cert-manager."""
    folder = cert_manager.built()
    if folder is None:
        pytest.skip("cert-manager is not built yet: run `make testbed-setup`")
    return folder


def test_cert_manager_issues_the_authority_of_a_job(
    kubectl: Kubectl, tmp_path: Path, cert_manager_folder: Path
) -> None:
    issued = {"mode": "CertManager", "issuerName": "example-pki"}
    issuer = {
        "apiVersion": "cert-manager.io/v1",
        "kind": "Issuer",
        "metadata": {"name": "example-pki"},
        "spec": {"selfSigned": {}},
    }

    def has_message(words: str) -> bool:
        condition = ready(kubectl)
        return condition.get("reason") == "NoAuthority" and words in condition.get("message", "")

    home = kubectl.namespace
    with OperatorProcess(
        tmp_path, kubectl.kubeconfig, namespaces=(home,), namespace=home
    ) as operator:
        kubectl.apply(job_document(1, tls=issued))
        eventually(lambda: has_message("is cert-manager installed?"), what="NoAuthority")
        cert_manager.install(cert_manager_folder, kubectl)
        eventually(lambda: has_message("is not issued by cert-manager yet"), what="a Certificate")
        with CertManager(cert_manager_folder, kubectl, tmp_path / "cert-manager.log") as manager:
            words = (
                "is not issued by cert-manager yet: Issuing certificate as Secret does not exist"
            )
            eventually(lambda: has_message(words), what=words)
            assert children(kubectl) == []
            kubectl.apply(issuer)
            eventually(lambda: workers(kubectl, NAME), what="the worker's pod")
            manager.check()
            secret = kubectl.get("secret", f"{NAME}-authority")
            certificate = x509.load_pem_x509_certificate(b64decode(secret["data"]["tls.crt"]))
            signed(kubectl, operator, tmp_path, subnet=42).verify_directly_issued_by(certificate)
            kubectl.run("delete", "dlj", NAME, "--wait=true")
            eventually(lambda: not kubectl.get("certificates")["items"], what="no Certificate")


def test_the_authority_of_a_job_signs_for_its_workers(kubectl: Kubectl, tmp_path: Path) -> None:
    first, second = GivenAuthority("first"), GivenAuthority("second")
    home = kubectl.namespace
    operator = OperatorProcess(tmp_path, kubectl.kubeconfig, namespaces=(home,), namespace=home)
    with operator:
        kubectl.apply(job_document(1, tls=TLS))
        eventually(lambda: ready(kubectl).get("reason") == "NoAuthority", what="NoAuthority")
        assert children(kubectl) == []

        kubectl.apply(first.secret())
        eventually(lambda: workers(kubectl, NAME), what="the worker's pod")
        assert is_by(signed(kubectl, operator, tmp_path, subnet=45), first)
        eventually(lambda: kept(kubectl) == first.own_pem, what="the authority on the Job")

        kubectl.apply(second.secret())
        operator.kill()
        operator.start()
        both = second.own_pem + first.own_pem
        eventually(lambda: kept(kubectl) == both, what="both on the Job")
        assert is_by(signed(kubectl, operator, tmp_path, subnet=45), second)

        kubectl.run("delete", "secret", "plant-ca")
        operator.kill()
        operator.start()
        words = "no certificate can be signed: Secret"
        eventually(lambda: words in str(ready(kubectl).get("message")), what=words)


@pytest.mark.slow
def test_workers_train_with_the_authority_of_their_job(kubectl: Kubectl, tmp_path: Path) -> None:
    first, second = GivenAuthority("first"), GivenAuthority("second")
    config_map, program = blobs_in_a_cluster(nap_s=0.1)
    endless = {"program": program, "stop": {"maxSteps": 10**6}}
    home = kubectl.namespace
    operator = OperatorProcess(tmp_path, kubectl.kubeconfig, namespaces=(home,), namespace=home)
    with operator:
        kubectl.apply(config_map, job_document(2, tls=TLS, trainer=endless))
        eventually(lambda: ready(kubectl).get("reason") == "NoAuthority", what="NoAuthority")
        assert children(kubectl) == []

        kubectl.apply(first.secret())
        eventually(lambda: len(workers(kubectl, NAME)) == 2, what="the workers' pods")
        keepers = "app.kubernetes.io/component=keeper"
        eventually(lambda: kubectl.get("pods", "-l", keepers)["items"], what="the keeper's pod")
        pods = ClusterPods(tmp_path, kubectl.get("dlj", NAME), kubectl, subnet=41)
        try:
            pods.start_keeper()
            for rank in (0, 1):
                pods.start_worker(rank)
            pods.wait_until(pods.all_train, "training")
            assert all(is_by(shown_at(pods.address(1 + rank)), first) for rank in (0, 1))
            eventually(lambda: kept(kubectl) == first.own_pem, what="the authority on the Job")

            kubectl.apply(second.secret())
            operator.kill()
            operator.start()
            both = second.own_pem + first.own_pem
            eventually(lambda: kept(kubectl) == both, what="both on the Job")
            pods.wait_until(lambda: pods.steps(1), "records at the keeper")
            incarnations = {step.incarnation for step in pods.steps(1)}
            pods.end("trainer-1", "sidecar-1", number=signal.SIGKILL)
            pods.lose_worker(1)
            pods.start_worker(1)
            pods.wait_until(lambda: is_by(shown_at(pods.address(2)), second), "the second signs")
            assert is_by(shown_at(pods.address(1)), first)
            # Not by the status: it may not report the loss yet.
            pods.wait_until(
                lambda: {step.incarnation for step in pods.steps(1)} - incarnations,
                "training again",
            )
            pods.wait_until(
                lambda: pods.log("sidecar-1").count("serving other sidecars") == 2,
                "a certificate of its sidecar",
            )

            kubectl.run("delete", "secret", "plant-ca")
            operator.kill()
            operator.start()
            words = "no certificate can be signed: Secret"
            eventually(lambda: words in str(ready(kubectl).get("message")), what=words)
            pods.wait_until(pods.all_train, "training on")
        finally:
            pods.close()
