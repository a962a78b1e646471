"""Convert wire messages to events, and a membership to a wire message.

Messages are untrusted: `checked_size` enforces the limit of every field first.
"""

from collections.abc import Mapping, Sequence

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dlion_api.cluster_names import DATASET_INITIALIZER, MODEL_INITIALIZER
from dlion_api.errors import ContractError
from dlion_api.names import KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Membership
from dlion_api.protocol.records import record_from_json
from dlion_api.protocol.refusals import (
    MAX_CSR_BYTES,
    MAX_PROOF_BYTES,
    MAX_RECORDS_PER_REPORT,
    MAX_REPORT_BYTES,
    MAX_TOKEN_BYTES,
    PeerRefusal,
)
from dlion_api.protocol.trust import FOLLOWING, JOINING, proof_statement
from dlion_api.wire import coordination_pb2
from dlion_operator.coordinator.events import (
    AccessRequested,
    DownloadReported,
    JoinRequested,
    ReportReceived,
)
from dlion_operator.coordinator.feed import RecordBatch
from dlion_operator.kubernetes.wire_parsing import MAX_COUNTER, check_length
from dlion_operator.model.download_progress import DownloadProgress
from dlion_operator.pki.token_bindings import Bearer, Proof

ProvedRequest = (
    coordination_pb2.SignRequest | coordination_pb2.JoinRequest | coordination_pb2.FollowRequest
)


def checked_proof(request: ProvedRequest, use: str, csr_pem: bytes = b"") -> Proof:
    """Return the verified proof of a size-checked request; empty if it carries none.

    Raises: ContractError if its key cannot be read or has not signed this request.
    """
    if not request.HasField("proof"):
        return Proof()
    proof = request.proof
    try:
        key = serialization.load_der_public_key(proof.key_der)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ContractError(f"proof: its key cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ContractError(f"proof: a key of type {type(key).__name__}; allowed: EC P-256")
    statement = proof_statement(request.run, use, csr_pem, proof.count)
    try:
        key.verify(proof.signature, statement, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise ContractError("proof: its key has not signed this request") from error
    # Normalised, because the key's encoding identifies the pod.
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Proof(key.public_bytes(*form), proof.count)


_COUNTERS = ("incarnation", "known_version", "sequence", "done_bytes", "total_bytes")
_TEXTS = (
    "run", "site", "epoch", "refused_words", "exchange_address", "measuring_address", "spec_hash"
)  # fmt: skip
"""Fields of requests, besides the token and a worker's."""
TRAINER_ROLE, KEEPER_ROLE = "trainer", "keeper"
ROLES = (TRAINER_ROLE, "sidecar", KEEPER_ROLE)

INITIALIZERS = (DATASET_INITIALIZER, MODEL_INITIALIZER)

WorkerRequest = (
    coordination_pb2.SignRequest
    | coordination_pb2.JoinRequest
    | coordination_pb2.ProgressReport
    | coordination_pb2.DownloadReport
)
Request = WorkerRequest | coordination_pb2.FollowRequest


def checked_size(request: Request) -> None:
    """Check that all fields of a request are within bounds, before its token is verified.

    Raises: ContractError if a field is too long or has an unknown value.
    """
    check_length("token", request.token, MAX_TOKEN_BYTES)
    fields = request.DESCRIPTOR.fields_by_name
    for name in filter(fields.__contains__, _TEXTS):
        check_length(name, getattr(request, name))
    for name in filter(fields.__contains__, _COUNTERS):
        _counter(name, getattr(request, name))
    if not isinstance(request, coordination_pb2.ProgressReport | coordination_pb2.DownloadReport):
        longest = max(len(request.proof.key_der), len(request.proof.signature))
        if longest > MAX_PROOF_BYTES:
            raise ContractError(f"proof of {longest} bytes; allowed: {MAX_PROOF_BYTES}")
    if isinstance(request, coordination_pb2.FollowRequest):
        _checked_refusals(request)
        return
    check_length("worker.site", request.worker.site)
    check_length("worker.group", request.worker.group)
    if isinstance(request, coordination_pb2.SignRequest):
        _checked_sign(request)
    elif isinstance(request, coordination_pb2.ProgressReport):
        _checked_report(request)
    elif isinstance(request, coordination_pb2.DownloadReport):
        _checked_download(request)


def caller_of(request: Request) -> WorkerIdentity | KeeperIdentity:
    """Return the identity that the caller claims."""
    if isinstance(request, coordination_pb2.FollowRequest):
        return KeeperIdentity(SiteName(request.site))
    if isinstance(request, coordination_pb2.SignRequest) and request.role == KEEPER_ROLE:
        return KeeperIdentity(SiteName(request.worker.site))
    return worker_of(request)


def worker_of(request: WorkerRequest) -> WorkerIdentity:
    """Return the worker that the caller claims to be."""
    worker = request.worker
    return WorkerIdentity(Rank(worker.rank), SiteName(worker.site), worker.group, worker.index)


def access_event(
    request: coordination_pb2.SignRequest | coordination_pb2.FollowRequest, bearer: Bearer | None
) -> AccessRequested:
    """Convert a size-checked request.

    Raises: ContractError if the token is valid and the proof is not; so does `join_event`.
    """
    if isinstance(request, coordination_pb2.FollowRequest):
        use, csr_pem = FOLLOWING, b""
    else:
        use, csr_pem = request.role, request.csr_pem
    proof = checked_proof(request, use, csr_pem) if bearer else Proof()
    return AccessRequested(caller_of(request), use, bearer, proof)


def join_event(
    request: coordination_pb2.JoinRequest, *, stream: int, bearer: Bearer | None
) -> JoinRequested:
    return JoinRequested(
        stream=stream,
        worker=worker_of(request),
        bearer=bearer,
        proof=checked_proof(request, JOINING) if bearer else Proof(),
        incarnation=request.incarnation,
        exchange_address=request.exchange_address,
        measuring_address=request.measuring_address,
        spec_hash=request.spec_hash,
        known_version=request.known_version,
    )


def report_event(
    request: coordination_pb2.ProgressReport, *, bearer: Bearer | None, now_s: float
) -> ReportReceived:
    """Convert a size-checked request; its records are parsed only if the token is valid.

    Raises: ContractError if a record violates the protocol.
    """
    return ReportReceived(
        worker=worker_of(request),
        bearer=bearer,
        incarnation=request.incarnation,
        sequence=request.sequence,
        records=tuple(map(record_from_json, request.records_json)) if bearer else (),
        finished=request.finished,
        now_s=now_s,
    )


def download_event(
    request: coordination_pb2.DownloadReport, bearer: Bearer | None
) -> DownloadReported:
    """Convert a size-checked request."""
    pod_uid = bearer.pod_uid if bearer else ""
    progress = DownloadProgress(request.container, request.done_bytes, request.total_bytes, pod_uid)
    return DownloadReported(worker_of(request), bearer, progress)


def membership_update(
    membership: Membership,
    *,
    elapsed_s: float,
    stop_reason: str,
    site_bundles_pem: Mapping[str, bytes],
) -> coordination_pb2.MembershipUpdate:
    """Return the message of a join stream."""
    return coordination_pb2.MembershipUpdate(
        version=membership.version,
        expected_count=membership.expected_count,
        elapsed_s=elapsed_s,
        stop_reason=stop_reason,
        site_bundles_pem=dict(site_bundles_pem),
        members=[
            coordination_pb2.MemberView(
                worker=coordination_pb2.Worker(
                    rank=member.identity.rank,
                    site=member.identity.site,
                    group=member.identity.group,
                    index=member.identity.index,
                ),
                incarnation=member.incarnation,
                state=member.state.value,
                exchange_address=member.exchange_address,
                measuring_address=member.measuring_address,
                revoked=member.revoked,
            )
            for member in membership.members
        ],
    )


def _checked_refusals(request: coordination_pb2.FollowRequest) -> None:
    for kind, count in request.refusals.items():
        if kind not in set(PeerRefusal):
            raise ContractError(f"refusals: {kind!r:.80}; allowed: {', '.join(PeerRefusal)}")
        _counter(f"refusals of {kind}", count)


def _checked_sign(request: coordination_pb2.SignRequest) -> None:
    if request.role not in ROLES:
        raise ContractError(f"role {request.role!r:.80}; allowed: {', '.join(ROLES)}")
    if len(request.csr_pem) > MAX_CSR_BYTES:
        raise ContractError(f"CSR of {len(request.csr_pem)} bytes; allowed: {MAX_CSR_BYTES}")
    worker = request.worker
    if request.role == KEEPER_ROLE and (worker.rank or worker.group or worker.index):
        raise ContractError(
            f"role {KEEPER_ROLE} of rank {worker.rank}, group {worker.group!r:.80}, index"
            f" {worker.index}; allowed: a site and nothing else"
        )


def _checked_report(request: coordination_pb2.ProgressReport) -> None:
    texts = request.records_json
    if len(texts) > MAX_RECORDS_PER_REPORT or request.ByteSize() > MAX_REPORT_BYTES:
        raise ContractError(
            f"report of {len(texts)} records, {request.ByteSize()} bytes; allowed: "
            f"{MAX_RECORDS_PER_REPORT} records, {MAX_REPORT_BYTES} bytes"
        )


def _checked_download(request: coordination_pb2.DownloadReport) -> None:
    if request.container not in INITIALIZERS:
        raise ContractError(
            f"container {request.container!r:.80}; allowed: {', '.join(INITIALIZERS)}"
        )


def followed_records(
    epoch: str, batch: RecordBatch, revoked: Sequence[str], reasons: Mapping[str, str]
) -> coordination_pb2.FollowedRecords:
    """Return the message of a follow stream."""
    return coordination_pb2.FollowedRecords(
        epoch=epoch,
        first_sequence=batch.first_sequence,
        records_json=batch.texts,
        ended_reason=batch.end.reason if batch.end else "",
        succeeded=batch.end is not None and batch.end.succeeded,
        revoked=revoked,
        revocation_reasons=reasons,
    )


def _counter(name: str, value: int) -> None:
    if value > MAX_COUNTER:
        raise ContractError(f"{name} {value}; allowed: at most {MAX_COUNTER}")
