"""Test the memory that the reports of a site may take.

The estimate is at least the memory that Python uses, and not much more, for any content. A site may
use up to the limit.

Left out: how a stream over the limit ends (tests/local/test_federation.py).
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from dlion_api.bounds import MAX_GROUPS_PER_SITE, MAX_WORKERS_PER_GROUP
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.wire import federation_pb2 as wire
from dlion_operator.federation.messages import statement_of, to_wire
from dlion_operator.federation.refusals import FederationRefusalReason, StreamRefusedError
from dlion_operator.federation.reports import (
    LinksTo,
    ReportedWorkers,
    RunRemoved,
    RunReport,
    RunReported,
    SpecFingerprint,
    TrainingFigures,
)
from dlion_operator.federation.state import MAX_KEPT_BYTES, MAX_RUNS, FederationState, memory_bytes
from dlion_operator.pki.authority_bundles import MAX_RUN_BUNDLE_BYTES

A, B = SiteName("plant-a"), SiteName("plant-b")
RUN = JobKey("default", "digits", "1")


def report_of(
    run: JobKey = RUN,
    *,
    workers: int = 0,
    fields: int = 0,
    address: str = "",
    evaluated: bool = False,
) -> RunReported:
    """Return a report of a run with this many workers and fields."""
    identities = tuple(
        WorkerIdentity(
            Rank(1000 + at), B, f"group-{at // MAX_WORKERS_PER_GROUP}", at % MAX_WORKERS_PER_GROUP
        )
        for at in range(workers)
    )
    members = tuple(
        Member(each, 10**15 + each.rank, MemberState.READY, address, address) for each in identities
    )
    ranks = [each.rank for each in identities] if evaluated else []
    accuracies = {rank: rank / 10**6 for rank in ranks}
    paths = {f"exchange.parameters.number{at}": at.to_bytes(8) for at in range(fields)}
    return RunReported(
        run,
        SpecFingerprint("0" * 64, paths, frozenset(paths) if evaluated else frozenset()),
        ReportedWorkers(identities, members, True, accuracies, frozenset(ranks)),
        TrainingFigures(),
    )


def received(content: bytes) -> RunReport:
    """Return the report as this site keeps it, read from the wire."""
    statement = statement_of(wire.Statement.FromString(content), B)
    assert isinstance(statement, RunReported)
    assert statement.spec is not None
    assert statement.workers is not None
    bundle_pem = statement.bundle_pem or b""
    return RunReport(
        statement.spec, statement.workers, statement.figures or TrainingFigures(), bundle_pem
    )


SHAPES = {
    "many workers": report_of(workers=900),
    "with accuracies": report_of(workers=900, evaluated=True),
    "with addresses": report_of(workers=900, address="10.42.17.250:7440"),
    "with long addresses": report_of(workers=900, address="a-name-that-is-rather-long." * 8),
    "with wide letters": report_of(workers=900, address="\N{SNOWMAN}" * 80),
    "many fields": report_of(fields=1000),
    "with a bundle": replace(report_of(workers=3), bundle_pem=b"x" * MAX_RUN_BUNDLE_BYTES),
    "with defaults": report_of(fields=1000, evaluated=True),
    "with links": replace(
        report_of(workers=3),
        figures=TrainingFigures(
            links=tuple(LinksTo(SiteName(f"plant-{at:034}"), 9, 9, 1e6 + at) for at in range(64))
        ),
    ),
    "as most are": report_of(workers=3, fields=90, address="10.42.17.250:7440"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_matches_the_memory_in_use(shape: str) -> None:
    content = to_wire(SHAPES[shape]).SerializeToString()
    received(content)  # makes what is created once and stays
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        report = received(content)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= memory_bytes(report) <= 2 * (after - before)


def test_the_largest_site_fits() -> None:
    largest = report_of(
        workers=MAX_GROUPS_PER_SITE * MAX_WORKERS_PER_GROUP, fields=2000, address="x" * 100
    )
    state = FederationState(A, [B])
    state.open_stream(1, B, A, 0.0)
    assert state.receive(1, largest, 1.0) == (RUN,)


def test_a_site_may_have_many_small_runs_or_a_few_large_ones_kept_here() -> None:
    small = [
        report_of(JobKey("default", "digits", str(at)), workers=4, fields=100)
        for at in range(MAX_RUNS)
    ]
    assert accepted_count(small) == MAX_RUNS
    large = [
        report_of(JobKey("default", "digits", str(at)), workers=5000, address="x" * 200)
        for at in range(9)
    ]
    size = memory_bytes(received(to_wire(large[0]).SerializeToString()))
    assert 1 < accepted_count(large) == MAX_KEPT_BYTES // size < 9


def test_a_report_over_the_limit_is_refused_and_a_removed_run_frees_memory() -> None:
    state = FederationState(A, [B])
    state.open_stream(1, B, A, 0.0)
    assert state.receive(1, report_of(), 1.0) == (RUN,)
    known = state.reports(RUN)
    grown = report_of(workers=8000, address="\N{SNOWMAN}" * 2000)
    for statement in (grown, replace(grown, run=replace(RUN, run_id="2"))):
        with pytest.raises(StreamRefusedError, match="end some") as refused:
            state.receive(1, statement, 2.0)
        assert refused.value.reason is FederationRefusalReason.TOO_MUCH
    assert state.reports(RUN) == known
    half, other = report_of(workers=8000, address="\N{SNOWMAN}" * 500), replace(RUN, run_id="2")
    assert accepted_count([half, replace(half, run=other)]) == 1
    state.receive(1, half, 3.0)
    assert state.receive(1, RunRemoved(RUN), 4.0) == (RUN,)
    assert state.receive(1, replace(half, run=other), 5.0) == (other,)


def refusal_of(state: FederationState, statement: RunReported) -> FederationRefusalReason | None:
    try:
        state.receive(1, statement, 1.0)
    except StreamRefusedError as refused:
        return refused.reason
    return None


def accepted_count(statements: list[RunReported]) -> int:
    """Return how many statements are accepted before one is refused."""
    state = FederationState(A, [B])
    state.open_stream(1, B, A, 0.0)
    for taken, statement in enumerate(statements):
        if refusal := refusal_of(state, statement):
            assert refusal is FederationRefusalReason.TOO_MUCH
            return taken
    return len(statements)
