"""Tests of the lines between trainer and sidecar.

Every kind of record is unchanged after its line. Other lines are refused.

Left out: sockets (tests/local); random records (tests/property).
"""

from __future__ import annotations

import json

import pytest

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.measurements import (
    CpuAllowance,
    Directive,
    LinkDelivery,
    MeasuringEndpoint,
    MeasuringSent,
    Peers,
    SentBytes,
    StepTiming,
    TrainerAlive,
)
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.sidecar_protocol import MAX_LINE_BYTES, LocalRecord, decode, encode

MEMBER = Member(
    WorkerIdentity(Rank(3), SiteName("plant-b"), "gpu", 0), 2, MemberState.LOST, "a:1", "a:2"
)
RECORDS: list[LocalRecord] = [
    StepTiming(1, 48, 0.3, 0.4, 0.5),
    StepTiming(1, 48, 0.3, 0.4, 0.5, compute_cpu_s=0.2, waited_s=0.1),
    LinkDelivery(Rank(1), 10, 5, 0.5, 3),
    CpuAllowance(None, 1.5, 0.0),
    CpuAllowance(0.2, 1.5, 0.5),
    Peers(Membership(7, JobKey("default", "digits", "1"), 4, (MEMBER,)), 1500),
    MeasuringEndpoint("10.0.0.1:4000"),
    Directive(3, 48, 192, {Rank(1): 5}, {Rank(0): 1.5}, {Rank(1): 2.5}, "why: \u2264 5 %\n"),
    TrainerAlive(),
    LinkDelivery(Rank(1), 10, 5, 0.5, 3, SentBytes(1, 2, 3, 4, 5, 6)),
    MeasuringSent(Rank(1), 200),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_unchanged_after_its_line(record: LocalRecord) -> None:
    line = encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == record
    assert decode(line.rstrip()) == record


def changed(record: LocalRecord, **fields: object) -> bytes:
    return json.dumps({**json.loads(encode(record)), **fields}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"7",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"kind": "Nobody"}',
        b'{"kind": ["StepTiming"]}',
        b'{"kind": "StepTiming"}',
        b'{"kind": "MeasuringEndpoint", "address": "' + b"a" * 5000 + b'"}',
        b" " * (MAX_LINE_BYTES + 1),
        changed(RECORDS[0], iteration=-1),
        changed(RECORDS[0], iteration=1.5),
        changed(RECORDS[0], iteration=True),
        changed(RECORDS[0], iteration=2**70),
        changed(RECORDS[0], compute_s=float("nan")),
        changed(RECORDS[0], compute_s=float("inf")),
        changed(RECORDS[0], compute_s="0.3"),
        changed(RECORDS[0], compute_s=None),
        changed(RECORDS[0], surprise=1),
        changed(RECORDS[5], membership=[]),
        changed(RECORDS[7], budget_bytes={"-1": 5}),
        changed(RECORDS[7], budget_bytes={"01": 5}),
        changed(RECORDS[7], budget_bytes={"1": -5}),
        changed(RECORDS[7], budget_bytes=[5]),
        changed(RECORDS[7], reason=5),
        changed(RECORDS[9], sent={"gradient_bytes": -1}),
        changed(RECORDS[9], sent=7),
        changed(RECORDS[10], peer="1"),
        encode(RECORDS[5]).replace(b'"Lost"', b'"Asleep"'),
    ],
    ids=lambda line: line[:40],
)
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(ContractError):
        decode(line)


def test_a_number_that_is_not_finite_is_not_sent() -> None:
    with pytest.raises(ContractError, match="finite"):
        encode(StepTiming(1, 1, float("nan"), 0.0, 0.0))


def test_a_line_too_long_is_not_sent() -> None:
    with pytest.raises(ContractError, match="bytes"):
        encode(Directive(1, 1, 1, reason="x" * MAX_LINE_BYTES))
