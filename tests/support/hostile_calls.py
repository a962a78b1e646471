"""Calls to the ports of `hostile_scene`, each with one fault."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from cluster_pods import Access
from dlion_api.names import KeeperIdentity, OperatorIdentity
from dlion_api.protocol.trust import JOINING
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME
from dlion_api.wire import coordination_pb2, coordination_pb2_grpc, measuring_pb2
from dlion_api.wire import keeping_pb2 as keeping
from dlion_api.wire.exchange_pb2 import Frame, Hello
from dlion_core.links.framing import PROTOCOL
from dlion_operator.federation.messages import site_hello
from dlion_worker.artifact_client.paths import checkpoint_path
from dlion_worker.artifact_server.service import SERVICE as KEEPING
from dlion_worker.security.credential_store import make_pod_proof
from dlion_worker.security.credentials import WorkerKey
from hostile_proofs import (
    MADE_UP_POD,
    OF_WORKER,
    Prove,
    of_operator,
    rightful,
    token_of_a_made_up_pod,
)
from hostile_scene import (
    INCARNATION,
    A,
    B,
    Ended,
    Scene,
    channel,
    ended,
    until,
    wire_worker,
)
from podless_jobs import workers

CALL_S = 15.0
WATCHED_WITHIN_S = 3.0
"""The operator knows a new pod within this time."""

Act = Callable[[Scene], Ended]


# ---- exchange and measuring ----------------------------------------------------------------------


def hello(at: Scene, **changes: Any) -> bytes:
    """A hello of plant-b's worker."""
    fields = {"run": str(at.job), "rank": at.worker(B).rank, "incarnation": INCARNATION}
    message = Hello(**{**fields, "protocol": PROTOCOL, "epoch": 1, **changes})
    return Frame(hello=message).SerializeToString()


def link(
    prove: Prove = rightful, frames: Callable[[Scene], list[bytes]] = lambda at: [hello(at)]
) -> Act:
    """Open a stream to the trainer with these frames."""

    def act(at: Scene) -> Ended:
        root, name = at.authorities[A].bundle_pem, at.victim.dns_name(at.job)
        with channel(at.address_of("exchange"), root, name, prove(at)) as made:
            method = made.stream_stream("/dlion.v1alpha1.Exchange/Link")
            return _streamed(method, frames(at))

    return act


def greeted(**changes: Any) -> Callable[[Scene], list[bytes]]:
    """A hello with one fault."""
    return lambda at: [hello(at, **changes)]


def share(prove: Prove = rightful, **changes: Any) -> Act:
    """Send a capacity to the sidecar."""

    def act(at: Scene) -> Ended:
        root, name = at.authorities[A].bundle_pem, at.victim.dns_name(at.job)
        values = {"run": str(at.job), "rank": at.worker(B).rank, "source": "Rate", **changes}
        message = measuring_pb2.CapacityShare(**values).SerializeToString()
        with channel(at.address_of("measuring"), root, name, prove(at)) as made:
            method = made.unary_unary("/dlion.v1alpha1.Measuring/Share")
            return ended(lambda: method(message, timeout=CALL_S))

    return act


def _streamed(method: Callable[..., Any], messages: list[bytes]) -> Ended:
    """Return how a call with these messages ends at any server; nothing follows them."""
    with _held(messages) as requests:
        return ended(lambda: method(requests, timeout=CALL_S))


@contextlib.contextmanager
def _held(messages: list[bytes]) -> Iterator[Iterator[bytes]]:
    """Yield those messages; end with the context."""
    over = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from messages
        over.wait()

    try:
        yield requests()
    finally:
        over.set()


def acknowledged(at: Scene) -> bytes:
    """Return the trainer's first answer to plant-b's real worker."""
    root, name = at.authorities[A].bundle_pem, at.victim.dns_name(at.job)
    with (
        channel(at.address_of("exchange"), root, name, rightful(at)) as made,
        _held([hello(at)]) as requests,
    ):
        method = made.stream_stream("/dlion.v1alpha1.Exchange/Link")
        answer: bytes = next(iter(method(requests, timeout=CALL_S)))
        return answer


def plain(port: str) -> Act:
    """Connect with HTTP/2 without TLS."""

    def act(at: Scene) -> Ended:
        with channel(at.address_of(port), None, "") as made:
            return ended(lambda: made.unary_unary("/any")(b"", timeout=CALL_S))

    return act


def old_tls(port: str) -> Act:
    """Connect with TLS 1.2, without a certificate."""

    def act(at: Scene) -> Ended:
        context = _careless()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return _raw(at.address_of(port), context, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

    return act


def garbage(port: str) -> Act:
    """Send something other than HTTP/2 after a valid handshake."""

    def act(at: Scene) -> Ended:
        context, proof = _careless(), rightful(at)
        context.set_alpn_protocols(["h2"])
        file = at.pods.folder / "garbage.pem"
        file.write_bytes(proof.key_pem + proof.chain_pem)
        context.load_cert_chain(file)
        return _raw(at.address_of(port), context, b"\xff" * 4096)

    return act


def _careless() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _raw(address: str, context: ssl.SSLContext, content: bytes) -> Ended:
    """Whether the other side closes."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), CALL_S) as it:
        it.settimeout(CALL_S)
        with context.wrap_socket(it) as secured:
            secured.sendall(content)
            try:
                while secured.recv(65536):
                    pass
            except TimeoutError:
                return Ended(grpc.StatusCode.OK, words="it was never closed")
    return Ended(grpc.StatusCode.UNAVAILABLE)


# ---- coordinator ---------------------------------------------------------------------------------


def by_its_own_key(at: Scene, request: coordination_pb2.SignRequest) -> None:
    """Prove the request with the key of worker 0's pod."""
    access = Access("", at.pods.root(f"w{at.victim.rank}"))
    _prove(at, access.proof_dir, request)


def by_another_key(at: Scene, request: coordination_pb2.SignRequest) -> None:
    """Prove it with a key that was never in that pod."""
    _prove(at, _elsewhere(at), request)


def _elsewhere(at: Scene) -> Path:
    folder = at.pods.folder / "elsewhere"
    folder.mkdir(exist_ok=True)
    return folder


def for_another_request(at: Scene, request: coordination_pb2.SignRequest) -> None:
    """Use the pod's own key, but for another key's certificate."""
    by_its_own_key(at, request)
    request.csr_pem = WorkerKey().csr_pem()


def unproven(_at: Scene, _request: coordination_pb2.SignRequest) -> None:
    """Send the token alone, as workers of earlier releases did."""


def _prove(at: Scene, folder: Path, request: coordination_pb2.SignRequest) -> None:
    proof = make_pod_proof(folder, job=at.job, use=request.role, csr_pem=request.csr_pem)
    request.proof.CopyFrom(proof)


def sign(
    token: Callable[[Scene], str] = lambda at: at.token(0),
    csr: Callable[[], bytes] = lambda: WorkerKey().csr_pem(),
    *,
    run: Callable[[Scene], str] = lambda at: str(at.job),
    worker: Callable[[Scene], coordination_pb2.Worker] = lambda at: wire_worker(at.victim),
    role: str = "trainer",
    prove: Callable[[Scene, coordination_pb2.SignRequest], None] = by_its_own_key,
    times: int = 1,
) -> Act:
    """Request a certificate in the name of plant-a's worker 0; return how the last call ends."""

    def act(at: Scene) -> Ended:
        request = coordination_pb2.SignRequest(
            token=token(at), run=run(at), worker=worker(at), role=role, csr_pem=csr()
        )
        prove(at, request)
        *before, last = (
            at_coordinator(at, lambda stub: stub.Sign(request, timeout=CALL_S))
            for _ in range(times)
        )
        assert all(each.code is grpc.StatusCode.OK for each in before), before
        return last

    return act


def sign_for_a_deleted_pod(at: Scene) -> Ended:
    """Use a token of plant-a's worker 1 from before its pod was replaced."""
    worker, old = at.worker(A, 1), at.tokens.pop("1")

    def with_token(token: str) -> Ended:
        own = partial(wire_worker, worker)
        return sign(lambda _: token, worker=lambda _: own(), prove=unproven)(at)

    assert with_token(old).code is grpc.StatusCode.OK
    at.kubectl.run("delete", "pod", at.pods.pod_of(worker)["name"])
    until(lambda: len(workers(at.kubectl, at.job.name)) == 2, "another pod of the Job")
    until(lambda: with_token(at.token(1)).code is grpc.StatusCode.OK, "the operator knows the pod")
    return with_token(old)


def sign_for_a_made_up_pod(at: Scene) -> Ended:
    """Claim to be plant-a's worker 0, from another pod with the same labels."""
    token = token_of_a_made_up_pod(at)
    time.sleep(WATCHED_WITHIN_S)
    try:
        answer = sign(lambda _: token)(at)
    finally:
        at.kubectl.run("delete", "pod", MADE_UP_POD, "--grace-period=0", "--force")
    assert "is not of its Job" in at.operator.log.read_text()
    return answer


def join(**changes: Any) -> Act:
    """Join as plant-a's worker 1, which has joined."""

    def act(at: Scene) -> Ended:
        worker = at.worker(A, 1)
        fields = {"incarnation": INCARNATION, "spec_hash": at.pods.job.hash(), **changes}
        request = coordination_pb2.JoinRequest(
            token=at.token(1), run=str(at.job), worker=wire_worker(worker), **fields
        )
        return at_coordinator(at, lambda stub: stub.Join(request, timeout=CALL_S))

    return act


def join_in_its_place(at: Scene) -> Ended:
    """Join as the existing worker, with a token that its pod has not presented."""
    folder = _elsewhere(at)
    request = coordination_pb2.JoinRequest(
        token=at.pods.token_of(at.victim),
        run=str(at.job),
        worker=wire_worker(at.victim),
        incarnation=2**40,
        spec_hash=at.pods.job.hash(),
        proof=make_pod_proof(folder, job=at.job, use=JOINING),
    )
    return at_coordinator(at, lambda stub: stub.Join(request, timeout=CALL_S))


def at_coordinator(at: Scene, call: Callable[[Any], Any]) -> Ended:
    """Return how that call to the coordinator ended."""
    root = at.authorities[A].bundle_pem
    with channel(at.address_of("coordinator"), root, COORDINATOR_DNS_NAME) as made:
        stub = coordination_pb2_grpc.CoordinationStub(made)  # type: ignore[no-untyped-call]
        return ended(lambda: call(stub))


OTHER = "another"


def other_run(at: Scene) -> str:
    return str(replace(at.job, run_id=OTHER))


def other_job(at: Scene) -> str:
    return str(replace(at.job, name=OTHER))


def other_namespace(at: Scene) -> str:
    return str(replace(at.job, namespace=OTHER))


# ---- keeper --------------------------------------------------------------------------------------


def put(prove: Prove = OF_WORKER, **changes: Callable[[Scene], Any]) -> Act:
    """Send the keeper a checkpoint of plant-a's worker 0."""

    def act(at: Scene) -> Ended:
        root, name = at.authorities[A].bundle_pem, KeeperIdentity(A).dns_name(at.job)
        fields: dict[str, Any] = {
            "run": str(at.job),
            "worker": wire_worker(at.victim),
            "path": checkpoint_path(at.victim.rank),
            "total_bytes": 1,
            "incarnation": INCARNATION,
            **{key: make(at) for key, make in changes.items()},
        }
        first = keeping.PutChunk(start=keeping.PutStart(**fields)).SerializeToString()
        with channel(at.address_of("keeper"), root, name, prove(at)) as made:
            method = made.stream_unary(f"/{KEEPING}/Put")
            return _streamed(method, [first])

    return act


# ---- federation ----------------------------------------------------------------------------------


def federate(
    prove: Prove = of_operator,
    messages: Callable[[Scene], list[bytes]] = lambda _: [site_hello(B, A).SerializeToString()],
) -> Act:
    """Open a stream to plant-a's operator."""

    def act(at: Scene) -> Ended:
        root, name = at.authorities[A].bundle_pem, OperatorIdentity(A).dns_name
        with channel(at.address_of("federation"), root, name, prove(at)) as made:
            method = made.stream_stream("/dlion.v1alpha1.Federation/Report")
            return _streamed(method, messages(at))

    return act


def sends(*messages: bytes) -> Callable[[Scene], list[bytes]]:
    return lambda _: list(messages)


GREETING = site_hello(B, A).SerializeToString()
