"""Wire messages made into events, and a membership into a wire message.

Owns the limits of every field: what arrives is untrusted. Called by the gRPC skin alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.errors import ContractError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.records import record_from_json
from dlion_api.refusals import (
    MAX_CSR_BYTES,
    MAX_RECORDS_PER_REPORT,
    MAX_REPORT_BYTES,
    MAX_TEXT_BYTES,
    MAX_TOKEN_BYTES,
)
from dlion_api.wire import coordination_pb2
from dlion_operator.coordinator.events import JoinAsked, ReportArrived, SignAsked

if TYPE_CHECKING:
    from dlion_api.membership import Membership

MAX_COUNTER = 2**53
"""Of incarnations, versions and sequences: room to count on for ever, exact in JSON too."""
ROLES = ("trainer", "sidecar")

Request = (
    coordination_pb2.SignRequest | coordination_pb2.JoinRequest | coordination_pb2.ProgressReport
)


def checked_size(request: Request) -> None:
    """Passes a request whose common fields are within bounds.

    Raises:
        ContractError: a field is longer than the protocol allows.
    """
    _short("token", request.token, MAX_TOKEN_BYTES)
    _short("run", request.run)
    _short("worker.site", request.worker.site)
    _short("worker.group", request.worker.group)


def worker_of(request: Request) -> WorkerIdentity:
    """Who the caller says it is."""
    worker = request.worker
    return WorkerIdentity(Rank(worker.rank), SiteName(worker.site), worker.group, worker.index)


def sign_event(request: coordination_pb2.SignRequest, *, token_ok: bool) -> SignAsked:
    """That request as an event. Raises ContractError where it breaks the protocol."""
    if request.role not in ROLES:
        raise ContractError(f"role {request.role!r:.80}; allowed: {', '.join(ROLES)}")
    if len(request.csr_pem) > MAX_CSR_BYTES:
        raise ContractError(f"CSR of {len(request.csr_pem)} bytes; allowed: {MAX_CSR_BYTES}")
    return SignAsked(request.run, worker_of(request), token_ok)


def join_event(request: coordination_pb2.JoinRequest, *, stream: int, token_ok: bool) -> JoinAsked:
    """That request as an event. Raises ContractError where it breaks the protocol."""
    _short("exchange_address", request.exchange_address)
    _short("measuring_address", request.measuring_address)
    _short("spec_hash", request.spec_hash)
    _counter("incarnation", request.incarnation)
    _counter("known_version", request.known_version)
    return JoinAsked(
        stream=stream,
        run=request.run,
        worker=worker_of(request),
        token_ok=token_ok,
        incarnation=request.incarnation,
        exchange_address=request.exchange_address,
        measuring_address=request.measuring_address,
        spec_hash=request.spec_hash,
        known_version=request.known_version,
    )


def report_event(
    request: coordination_pb2.ProgressReport, *, token_ok: bool, now_s: float
) -> ReportArrived:
    """That request as an event, its records parsed only where the token held.

    Raises:
        ContractError: it breaks the protocol, or one of its records does.
    """
    _counter("incarnation", request.incarnation)
    _counter("sequence", request.sequence)
    texts = request.records_json
    if len(texts) > MAX_RECORDS_PER_REPORT or request.ByteSize() > MAX_REPORT_BYTES:
        raise ContractError(
            f"report of {len(texts)} records, {request.ByteSize()} bytes; allowed: "
            f"{MAX_RECORDS_PER_REPORT} records, {MAX_REPORT_BYTES} bytes"
        )
    return ReportArrived(
        run=request.run,
        worker=worker_of(request),
        token_ok=token_ok,
        incarnation=request.incarnation,
        sequence=request.sequence,
        records=tuple(record_from_json(text) for text in texts) if token_ok else (),
        finished=request.finished,
        now_s=now_s,
    )


def membership_update(
    membership: Membership, *, elapsed_s: float, stop_reason: str
) -> coordination_pb2.MembershipUpdate:
    """What a join stream carries."""
    return coordination_pb2.MembershipUpdate(
        version=membership.version,
        expected_count=membership.expected_count,
        elapsed_s=elapsed_s,
        stop_reason=stop_reason,
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
            )
            for member in membership.members
        ],
    )


def _short(name: str, text: str, limit: int = MAX_TEXT_BYTES) -> None:
    if len(text.encode()) > limit:
        raise ContractError(f"{name} of {len(text)} characters; allowed: {limit} bytes")


def _counter(name: str, value: int) -> None:
    if value > MAX_COUNTER:
        raise ContractError(f"{name} {value}; allowed: at most {MAX_COUNTER}")
