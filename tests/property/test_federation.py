"""Statements between sites: any bytes, the wire, and any timeline.

Any bytes become a statement or a ContractError. Statements survive the wire. Over any timeline of
reports, losses, restarts and streams, the other end finally knows the real state and names no
member that was never reported. Two sites agree on whether they agree.

Left out: examples with their reasons (tests/unit/operator/federation).
"""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.wire import federation_pb2 as wire
from dlion_operator.federation.drift import agree, differences
from dlion_operator.federation.messages import sites_of, statement_of, to_wire
from dlion_operator.federation.outbound_reports import OutboundReports
from dlion_operator.federation.reports import (
    Heartbeat,
    LinksTo,
    ReportedWorkers,
    RunRemoved,
    RunReport,
    RunReported,
    SpecFingerprint,
    TrainingFigures,
)
from dlion_operator.federation.state import FederationState

A, B = SiteName("plant-a"), SiteName("plant-b")
RUNS = [JobKey("default", "digits", "1"), JobKey("ns", "other", "run-2")]
WORKERS = [WorkerIdentity(Rank(n), B, "small", n) for n in range(3)]

TEXT = st.text(max_size=40)
MEMBERS = st.builds(
    Member,
    st.sampled_from(WORKERS),
    st.integers(0, 2**53),
    st.sampled_from(list(MemberState)),
    TEXT,
    TEXT,
)
SITE_WORKERS = st.builds(
    ReportedWorkers,
    st.lists(st.sampled_from(WORKERS), unique=True).map(tuple),
    st.lists(MEMBERS, unique_by=lambda each: each.identity, max_size=3).map(tuple),
    st.booleans(),
    left=st.frozensets(st.sampled_from([worker.rank for worker in WORKERS])),
)
PATHS = st.sampled_from(["a.b", "c", "d[e]"])


@st.composite
def prints(draw: st.DrawFn) -> SpecFingerprint:
    """Fingerprints of any release, which may not know all fields."""
    fields = draw(st.dictionaries(PATHS, st.binary(min_size=8, max_size=8), max_size=3))
    defaults = draw(st.frozensets(PATHS)) & fields.keys()
    return SpecFingerprint(draw(st.binary(min_size=32, max_size=32)).hex(), fields, defaults)


PRINTS = prints()
LINKS = st.builds(
    LinksTo, st.sampled_from((A, B)), st.integers(0, 999), st.integers(0, 999), st.floats(0, 1e9)
)
FIGURES = st.builds(
    TrainingFigures,
    st.booleans(),
    st.integers(0, 2**53),
    st.floats(0, 1e9),
    st.lists(LINKS, max_size=2, unique_by=lambda links: links.site).map(tuple),
)
REPORTS = st.builds(RunReport, PRINTS, SITE_WORKERS, FIGURES)
RUN = st.sampled_from(RUNS)
STATEMENTS = st.one_of(
    st.just(Heartbeat()),
    st.builds(RunRemoved, RUN),
    st.builds(RunReported, RUN, st.none() | PRINTS, st.none() | SITE_WORKERS, st.none() | FIGURES),
)


@given(st.binary(max_size=300))
def test_any_bytes_become_a_statement_or_are_refused(content: bytes) -> None:
    try:
        message = wire.Statement.FromString(content)
        if message.HasField("hello"):
            sites_of(message.hello)
        else:
            statement_of(message, B)
    except (ContractError, DecodeError):
        return


@given(STATEMENTS, st.data())
def test_a_damaged_statement_is_refused_or_is_another(
    statement: RunReported | RunRemoved | Heartbeat, data: st.DataObject
) -> None:
    content = bytearray(to_wire(statement).SerializeToString())
    for at in data.draw(st.lists(st.integers(0, max(0, len(content) - 1)), max_size=4)):
        if content:
            content[at] ^= data.draw(st.integers(1, 255))
    try:
        statement_of(wire.Statement.FromString(bytes(content)), B)
    except (ContractError, DecodeError):
        return


@given(STATEMENTS)
def test_a_statement_survives_the_wire(statement: RunReported | RunRemoved | Heartbeat) -> None:
    content = to_wire(statement).SerializeToString()
    assert statement_of(wire.Statement.FromString(content), B) == statement


STEPS = st.lists(
    st.tuples(st.sampled_from(["report", "gone", "restart", "wait"]), RUN, REPORTS), max_size=20
)


@given(STEPS)
def test_the_other_end_finally_knows_the_real_state(
    steps: list[tuple[str, JobKey, RunReport]],
) -> None:
    state, reports, stream, now_s = FederationState(A, [B]), OutboundReports(), 1, 0.0
    state.open_stream(stream, B, A, now_s)
    truth: dict[JobKey, RunReport] = {}
    ever: dict[JobKey, set[WorkerIdentity]] = {run: set() for run in RUNS}

    def deliver() -> None:
        for statement in reports.pending(truth, now_s):
            state.receive(stream, statement, now_s)  # it would raise if it were refused

    for what, run, report in steps:
        now_s += 20.0
        if what == "report":
            truth[run] = report
            ever[run] |= {each.identity for each in report.workers.members}
        elif what == "gone":
            truth.pop(run, None)
        elif what == "restart":  # its operator restarts, on a new stream
            reports, stream = OutboundReports(), stream + 1
            state.open_stream(stream, B, A, now_s)
        deliver()
    for run, report in truth.items():  # in the end all reports have arrived
        truth[run] = replace(report, workers=replace(report.workers, settled=True))
    for _ in range(20):
        now_s += 5.0
        deliver()
    for run in RUNS:
        known = state.reports(run).get(B)
        assert (known is not None) == (run in truth)
        if known is None:
            continue
        assert known.spec == truth[run].spec
        assert known.figures == truth[run].figures
        assert known.workers.wanted == truth[run].workers.wanted
        assert known.workers.left == truth[run].workers.left
        assert {each.identity for each in known.workers.members} <= ever[run]
        reported = {each.identity for each in truth[run].workers.members}
        for member in known.workers.members:
            assert member.state is not MemberState.READY or member.identity in reported


@given(PRINTS, PRINTS)
def test_two_sites_agree_on_whether_they_agree(
    one: SpecFingerprint, other: SpecFingerprint
) -> None:
    assert agree(one, other) == agree(other, one)
    assert agree(one, replace(one, spec_hash=other.spec_hash))
    named = differences({A: one, B: other})
    assert bool(named) == (not agree(one, other))
    assert named == differences({B: other, A: one})


@given(PRINTS, st.frozensets(PATHS))
def test_a_release_with_fewer_fields_agrees_if_none_of_them_is_set(
    newer: SpecFingerprint, unknown: frozenset[str]
) -> None:
    fields = {path: value for path, value in newer.fields.items() if path not in unknown}
    older = SpecFingerprint("0" * 64, fields, newer.defaults - unknown)
    assert agree(newer, older) == (unknown & newer.fields.keys() <= newer.defaults)
