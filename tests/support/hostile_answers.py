"""Impostors that answer where the processes of `hostile_scene` dial, and the reports about them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial

import grpc

from cluster_pods import Access
from dlion_api.errors import UnavailableError
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.artifact_client import ArtifactClient
from dlion_worker.artifact_client.paths import checkpoint_path
from dlion_worker.coordination import request_certificate
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from hostile_calls import Act
from hostile_proofs import Prove
from hostile_scene import (
    A,
    B,
    Ended,
    Proof,
    Scene,
    of_worker,
    until,
)


def dialled(prove: Prove) -> Act:
    """Plant-b's operator names an address at which an impostor answers trainer and sidecar."""

    def act(at: Scene) -> Ended:
        kinds = ("exchange", "measuring")
        before = {port: at.peer_refusals(port, "dialled", "Unproven") for port in kinds}

        def counted(port: str) -> bool:
            return at.peer_refusals(port, "dialled", "Unproven") > before[port]

        with _answering(prove(at)) as address:
            at.say(address, address)
            for port in kinds:
                until(partial(counted, port), f"the {port} side reports {prove}")
        return Ended(grpc.StatusCode.UNAVAILABLE, "Unproven")

    return act


@contextlib.contextmanager
def _answering(proof: Proof | None, port: int = 0) -> Iterator[str]:
    """A server that would serve any caller."""
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    place = f"127.0.0.1:{port}"
    if proof is None:
        port = server.add_insecure_port(place)
    else:
        credentials = grpc.ssl_server_credentials([(proof.key_pem, proof.chain_pem)])
        port = server.add_secure_port(place, credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def unknown_site(at: Scene) -> Ended:
    """Replace plant-b's bundle at plant-a by an expired one, then restore it."""
    file, reason = at.neighbour.site.bundle_file, "UnknownAuthority"
    before, content = at.peer_refusals("exchange", "dialled", reason), file.read_bytes()
    file.write_bytes(
        CertificateAuthority(B, now=datetime.now(UTC) - timedelta(days=400)).bundle_pem
    )
    until(lambda: at.peer_refusals("exchange", "dialled", reason) > before, "the trainer's report")
    file.write_bytes(content)
    until(lambda: at.operator.metric("dlion_federation_bundle_valid") == 1, "it is back")
    return Ended(grpc.StatusCode.UNAVAILABLE, reason)


def dialled_coordinator(at: Scene) -> Ended:
    """A worker asks an impostor with a valid certificate of its site for its certificate."""
    proof = of_worker(at.authorities[A], at.worker(A, 1), at.job)
    with _answering(proof) as address:
        access = Access(address, at.pods.root(f"w{at.victim.rank}"))
        try:
            request_certificate(
                access,
                job=at.job,
                worker=at.victim,
                csr_pem=WorkerKey().csr_pem(),
                role="trainer",
                wait_s=1.0,
            )
        except UnavailableError as error:
            return Ended(grpc.StatusCode.UNAVAILABLE, words=str(error))
    return Ended(grpc.StatusCode.OK)


def dialled_keeper(at: Scene) -> Ended:
    """A worker sends its checkpoint to another worker of its site."""
    proof, own = (of_worker(at.authorities[A], at.worker(A, i), at.job) for i in (1, 0))
    bundles = {A: at.authorities[A].bundle_pem}
    credentials = WorkerCredentials(WorkerKey.from_pem(own.key_pem), own.chain_pem, bundles)
    file = at.pods.folder / "checkpoint"
    file.write_bytes(b"x")
    with _answering(proof) as address:
        client = ArtifactClient(
            address, job=at.job, worker=at.victim, incarnation=1, credentials=credentials
        )
        try:
            client.put(checkpoint_path(at.victim.rank), file)
        except UnavailableError as error:
            return Ended(grpc.StatusCode.UNAVAILABLE, words=str(error))
        finally:
            client.close()
    return Ended(grpc.StatusCode.OK)


def dialled_operator(at: Scene) -> Ended:
    """Plant-a's own certificate answers at the address of plant-b's operator."""
    failures = f'dlion_federation_dial_failures_total{{peer_site="{B}"}}'
    at.neighbour.stop()
    made = at.authorities[A].operator_identity()
    before = at.operator.metric(failures)
    with _answering(Proof(made.key_pem, made.certificate_chain_pem), at.neighbour.site.port):
        until(lambda: at.operator.metric(failures) >= before + 2, "the operator's count")
        words = until(lambda: _stated_reason(at.status_of_b()), "the reason in the status", 60)
    at.neighbour.start()
    return Ended(grpc.StatusCode.UNAVAILABLE, words=words)


def _stated_reason(message: str) -> str:
    return message if "has this site's bundle" in message else ""
