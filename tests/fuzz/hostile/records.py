"""Hostile lines, files and calls between DLion's own processes.

They are the local socket, progress records, `events.jsonl`, requests to the coordinator, messages
between sidecars and certificate signing requests. They include the files that a worker saves for
its next start. The result must be `ContractError`, or a value that is unchanged after writing and
reading. A damaged saved file counts as missing. The coordinator continues to serve other workers.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import math
import random
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError, Message

from dlion_api.cluster_names import DATASET_INITIALIZER
from dlion_api.errors import ContractError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol import measurements, progress, records, sidecar_protocol
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.trust import JOINING, proof_statement
from dlion_api.wire import coordination_pb2 as wire
from dlion_api.wire import measuring_pb2
from dlion_core.topology.clusters import graph_of_groups, grouping_problem
from dlion_operator.coordinator.events import CallRefusedError, JoinRequested
from dlion_operator.coordinator.messages import (
    access_event,
    checked_size,
    download_event,
    join_event,
    membership_update,
    report_event,
)
from dlion_operator.coordinator.state import CoordinatorState
from dlion_operator.pki.authority import CertificateAuthority
from dlion_operator.pki.token_bindings import Bearer
from dlion_results.run_folder.events import read_events
from dlion_worker.coordination import client, saved_state
from dlion_worker.security.credentials import WorkerKey
from dlion_worker.sidecar import capacity_messages
from hostile import bending

JOB = JobKey("default", "digits", "1")
SITE = SiteName("plant-a")
WORKERS = tuple(WorkerIdentity(Rank(n), SITE, "small", n) for n in range(3))
MEMBERSHIP = Membership(
    3, JOB, 3, tuple(Member(w, 1, MemberState.READY, "10.0.0.1:1", "h:2") for w in WORKERS)
)
RANKS = {Rank(1): 10, Rank(2): 20}
PROOF_KEY = WorkerKey()

LOCAL: tuple[sidecar_protocol.LocalRecord, ...] = (
    measurements.SpeedProbe(8, 0.1, 0.1, 0.0, None, 8),
    measurements.StepTiming(3, 8, 0.1, 0.2, 0.1, None, 0.0),
    measurements.LinkDelivery(Rank(1), 10, 5, 0.5, 3, measurements.SentBytes(1, 2, 3, 4, 5, 6)),
    measurements.MeasuringSent(Rank(1), 200),
    measurements.CpuAllowance(2.0, 1.0, 0.0),
    measurements.Peers(MEMBERSHIP, 1000, 500, "0123456789abcdef", 3, 16, (Rank(1),)),
    measurements.MeasuringEndpoint("127.0.0.1:4000"),
    measurements.Directive(1, 8, 16, RANKS, {Rank(1): 1.5}, {Rank(1): 2e6}, "first"),
)
PROGRESS: tuple[progress.ProgressRecord, ...] = (
    progress.StepRecord(1.0, Rank(0), 1, 2, math.nan, 8, 16, 0.1, 0.1, 0.2, 0.1, 0.0, 0.0, 16),
    progress.LinkRecord(1.0, Rank(0), Rank(1), 2, 10, 9, 1, 0, None, 1e6, 0, connected=True),
    progress.EvaluationRecord(1.0, Rank(0), 2, 16, 0.5, math.inf, 100, (0.5, math.nan), (1.0,)),
    progress.DirectiveRecord(1.0, Rank(0), 2, 8, 16, RANKS, {Rank(1): 1.5}, {}, "why"),
    progress.ProcessRecord(9.0, Rank(0), 1, 2, import_s=1.5, train_s=3.0),
    progress.EventRecord(1.0, Rank(0), 2, "CheckpointSaved", "a text"),
)


def altered_json(rng: random.Random, valid: bytes) -> bytes:
    """Return a line of JSON with its values, its structure or its bytes altered."""
    match rng.randrange(8):
        case 0 | 1 | 2 | 3 | 4:
            return json.dumps(bending.value_of(rng, json.loads(valid))).encode()
        case 5:
            deep = rng.choice((b"[", b'{"a":', b'{"kind":['))
            return bending.spliced(rng, valid, deep * rng.choice((3, 2000, 100_000)))
        case 6:
            text = json.dumps(bending.value_of(rng, json.loads(valid)))
            return text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-8")))
        case _:
            return bending.bytes_of(rng, valid)


def attack_socket(rng: random.Random, folder: Path) -> str | None:
    """Parse one hostile line on the socket between trainer and sidecar."""
    valid = sidecar_protocol.encode(rng.choice(LOCAL))
    line = bending.until_different(valid, lambda: altered_json(rng, valid))
    try:
        record = sidecar_protocol.decode(line)
        again = sidecar_protocol.encode(record)
    except ContractError:
        return "refused"
    assert sidecar_protocol.decode(again) == record
    return "taken"


def attack_record(rng: random.Random, folder: Path) -> str | None:
    """Parse one hostile progress record, as in a report."""
    valid = records.record_to_json(rng.choice(PROGRESS)).encode()
    line = bending.until_different(valid, lambda: altered_json(rng, valid))
    try:
        record = records.record_from_json(line)
    except ContractError:
        return "refused"
    again = records.record_to_json(record)
    assert records.record_to_json(records.record_from_json(again)) == again
    return "taken"


def attack_events(rng: random.Random, folder: Path) -> str | None:
    """Read `events.jsonl` with one hostile line in the middle: the lines around it are read."""
    valid = [records.record_to_json(record).encode() for record in PROGRESS]
    at = rng.randrange(1, len(valid) - 1)
    wrong = bending.until_different(valid[at], lambda: altered_json(rng, valid[at]))
    path = folder / "events.jsonl"
    path.write_bytes(b"\n".join([*valid[:at], wrong.replace(b"\n", b" "), *valid[at + 1 :], b""]))
    bad: list[object] = []
    read = [records.record_to_json(record) for record in read_events(path, bad.append)]
    assert read[:at] == [line.decode() for line in valid[:at]]
    assert read[len(read) - (len(valid) - at - 1) :] == [line.decode() for line in valid[at + 1 :]]
    return "refused" if bad else "taken"


def _valid_proof(use: str, csr_pem: bytes = b"") -> wire.PodProof:
    signature = PROOF_KEY.sign(proof_statement(str(JOB), use, csr_pem, 7))
    return wire.PodProof(key_der=PROOF_KEY.public_der(), count=7, signature=signature)


def _valid_request(rng: random.Random) -> Message:
    worker = wire.Worker(rank=0, site=SITE, group="small", index=0)
    common: dict[str, Any] = {"run": str(JOB), "worker": worker, "token": "t"}
    match rng.randrange(4):
        case 0:
            csr_pem = b"-----BEGIN"
            return wire.SignRequest(csr_pem=csr_pem, role="trainer",
                                    proof=_valid_proof("trainer", csr_pem), **common)  # fmt: skip
        case 1:
            return wire.JoinRequest(incarnation=1, exchange_address="h:1", spec_hash="hash",
                                    known_version=1, proof=_valid_proof(JOINING),
                                    **common)  # fmt: skip
        case 2:
            return wire.DownloadReport(container=DATASET_INITIALIZER, done_bytes=1, total_bytes=2,
                                       **common)  # fmt: skip
        case _:
            texts = [records.record_to_json(record) for record in PROGRESS[:2]]
            return wire.ProgressReport(incarnation=1, sequence=1, records_json=texts, **common)


def _altered_message(rng: random.Random, valid: Message) -> bytes:
    if rng.random() < 0.4:
        return bending.bytes_of(rng, valid.SerializeToString())
    altered = type(valid)()
    altered.CopyFrom(valid)
    place: Any = altered
    if hasattr(altered, "worker") and rng.random() < 0.3:
        place = altered.worker
    elif hasattr(altered, "proof") and rng.random() < 0.3:
        place = altered.proof
    name = rng.choice([field.name for field in place.DESCRIPTOR.fields])
    values = (*bending.LARGE, -1.0, math.nan, math.inf, "", "x" * 300, "x" * 100_000, "\x00", b"x",
              b"\xff" * 9000, True, "sidecar")  # fmt: skip
    with contextlib.suppress(
        TypeError, ValueError, AttributeError, OverflowError
    ):  # of another type
        setattr(place, name, rng.choice(values))
    if isinstance(altered, wire.ProgressReport) and rng.random() < 0.5:
        line = altered_json(rng, records.record_to_json(rng.choice(PROGRESS)).encode())
        altered.records_json.append(line.decode("utf-8", "replace"))
    return altered.SerializeToString()


def attack_coordinator(rng: random.Random, folder: Path) -> str | None:
    """Send one hostile request; the coordinator then admits an honest worker."""
    valid = _valid_request(rng)
    content = bending.until_different(
        valid.SerializeToString(), lambda: _altered_message(rng, valid)
    )
    state = CoordinatorState(JOB, WORKERS, "hash")
    state.join(JoinRequested(1, WORKERS[0], Bearer(), 1, "h:1", "", "hash", 0))
    token_ok = rng.random() < 0.9
    bearer = Bearer("uid") if token_ok else None
    try:
        request: Any = type(valid).FromString(content)
        checked_size(request)
        if isinstance(request, wire.SignRequest):
            state.admit(access_event(request, bearer))
        elif isinstance(request, wire.JoinRequest):
            state.join(join_event(request, stream=2, bearer=bearer))
        elif isinstance(request, wire.DownloadReport):
            state.download(download_event(request, bearer))
        else:
            state.report(report_event(request, bearer=bearer, now_s=0.0))
        word = "taken"
    except (
        ContractError,
        CallRefusedError,
        DecodeError,
    ):  # the service answers both with INVALID_ARGUMENT
        word = "refused"
    assert word == "refused" or token_ok
    honest = JoinRequested(3, WORKERS[1], Bearer(), 1, "h:1", "", "hash", 0)
    state.join(honest)  # a refusal would raise
    return word


def attack_sidecar(rng: random.Random, folder: Path) -> str | None:
    """Receive one hostile message of a sidecar."""
    grouping = measurements.Grouping(1, Rank(0), ((0,), (1,)), (0, 1))
    capacity = measurements.Capacity(
        Rank(1), 10.0, 2.0, measurements.CapacitySource.UNKNOWN, 3,
        link_bytes_per_s={Rank(0): 1e6}, grouping=grouping,
    )  # fmt: skip
    valid = capacity_messages.to_wire(capacity, JOB, 1)
    content = bending.until_different(
        valid.SerializeToString(), lambda: _altered_message(rng, valid)
    )
    try:
        share = measuring_pb2.CapacityShare.FromString(content)
        capacity = capacity_messages.from_wire(share, JOB, Rank(1))
    except (ContractError, DecodeError):  # gRPC itself answers the second
        return "refused"
    assert 0 <= capacity.samples_per_s <= capacity_messages.MAX_SAMPLES_PER_S
    assert 0 <= capacity.training_set_samples <= capacity_messages.MAX_TRAINING_SET_SAMPLES
    assert all(
        0 < r <= capacity_messages.MAX_BYTES_PER_S for r in capacity.link_bytes_per_s.values()
    )
    if capacity.grouping is None or grouping_problem(capacity.grouping, (0, 1)):
        return "refused"
    graph = graph_of_groups(capacity.grouping)
    assert set(graph) == {0, 1}
    assert 1 in graph[Rank(0)]
    return "taken"


def attack_membership(rng: random.Random, folder: Path) -> str | None:
    """Receive one hostile membership from a coordinator."""
    valid = membership_update(
        MEMBERSHIP, elapsed_s=2.0, stop_reason="", site_bundles_pem={"plant-a": b"PEM"}
    )
    content = bending.until_different(
        valid.SerializeToString(), lambda: _altered_membership(rng, valid)
    )
    try:
        update = wire.MembershipUpdate.FromString(content)
        membership = client._membership(JOB, update)
    except (ContractError, DecodeError):  # gRPC itself answers the second
        return "refused"
    together = saved_state.merge_memberships(MEMBERSHIP, membership)
    assert {w.rank for w in WORKERS} <= {member.identity.rank for member in together.members}
    saved_state.save_membership(folder, saved_state.SavedMembership(together, 1.0))
    again = saved_state.load_membership(folder, JOB)
    assert again is not None
    assert again.membership == together
    return "taken"


def _altered_membership(rng: random.Random, valid: wire.MembershipUpdate) -> bytes:
    altered = wire.MembershipUpdate()
    altered.CopyFrom(valid)
    if rng.random() < 0.6:
        member = rng.choice(altered.members)
        member.state = rng.choice(("Ready", "ready", "", "x" * 9000, "Lost"))
        member.incarnation = rng.choice(bending.LARGE)
        member.worker.rank = rng.choice(bending.NUMBERS)
        return altered.SerializeToString()
    return _altered_message(rng, valid)


@functools.cache
def _authority() -> tuple[CertificateAuthority, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = request.add_extension(x509.SubjectAlternativeName([x509.DNSName("a.b")]), False)
    return CertificateAuthority(SITE), request.sign(key, hashes.SHA256()).public_bytes(
        serialization.Encoding.DER
    )


def attack_signing(rng: random.Random, folder: Path) -> str | None:
    """Send one hostile certificate signing request: it is refused, unless its own key signs it."""
    authority, valid = _authority()
    der = bending.until_different(valid, lambda: bending.bytes_of(rng, valid))
    pem = (b"-----BEGIN CERTIFICATE REQUEST-----\n" + base64.encodebytes(der)
           + b"-----END CERTIFICATE REQUEST-----\n")  # fmt: skip
    if rng.random() < 0.2:
        pem = bending.until_different(pem, lambda: bending.bytes_of(rng, pem))
    try:
        chain = authority.sign(pem, WORKERS[0], JOB)
    except ContractError:
        return "refused"
    names = x509.load_pem_x509_certificate(chain).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.UniformResourceIdentifier) == [
        WORKERS[0].spiffe_id(JOB)
    ]
    return "taken"


def attack_kept(rng: random.Random, folder: Path) -> str | None:
    """Read one damaged file of a worker's state folder: it counts as missing, or is valid."""
    if rng.random() < 0.2:
        valid = b"17\n"
        wrong = bending.until_different(valid, lambda: bending.bytes_of(rng, valid))
        (folder / saved_state.INCARNATION_FILE).write_bytes(wrong)
        return "taken" if saved_state.next_incarnation(folder, wall_clock_s=5.0) > 5 else "refused"
    saved_state.save_membership(folder, saved_state.SavedMembership(MEMBERSHIP, 12.5))
    path = folder / saved_state.MEMBERSHIP_FILE
    valid = path.read_bytes()
    path.write_bytes(bending.until_different(valid, lambda: altered_json(rng, valid)))
    found = saved_state.load_membership(folder, JOB)
    if found is None:
        return "refused"
    saved_state.merge_memberships(found.membership, dataclasses.replace(MEMBERSHIP, version=9))
    return "taken"
