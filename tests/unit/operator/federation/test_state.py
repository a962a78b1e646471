"""Test what an operator keeps of other sites, and what it sends them.

- The report of a site stays valid until the site changes it. The site may fall silent, return on a
  new stream or restart.
- Only an operator that knows all its members removes members. An older incarnation changes nothing.
  A replaced stream is refused. Each change is returned once.
- Everything is sent first, then changes, then a heartbeat.

Left out: the wire (test_messages), streams (tests/local/test_federation.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dlion_api.names import JobKey, SiteName
from dlion_api.protocol.membership import MemberState
from dlion_operator.federation.outbound_reports import OutboundReports
from dlion_operator.federation.refusals import FederationRefusalReason, StreamRefusedError
from dlion_operator.federation.reports import (
    Heartbeat,
    ReportedWorkers,
    RunRemoved,
    RunReport,
    RunReported,
    Statement,
    TrainingFigures,
)
from dlion_operator.federation.state import (
    GONE_AFTER_S,
    SILENT_AFTER_S,
    FederationState,
    SiteReachability,
)
from federated import JOB, member, report, worker

A, B = SiteName("plant-a"), SiteName("plant-b")
OTHER = JobKey("default", "other", "1")
REPORT = report(B, 1)


def federation() -> FederationState:
    state = FederationState(A, [B])
    state.open_stream(1, B, A, 0.0)
    return state


def receive(
    state: FederationState, statement: Statement, *, stream: int = 1, now_s: float = 1.0
) -> tuple[JobKey, ...] | FederationRefusalReason:
    """Return the runs that the statement changes, or why it is refused."""
    try:
        return state.receive(stream, statement, now_s)
    except StreamRefusedError as error:
        return error.reason


def whole(report: RunReport, run: JobKey = JOB) -> RunReported:
    bundle_pem = report.bundle_pem or None
    return RunReported(run, report.spec, report.workers, report.figures, bundle_pem)


def states(state: FederationState) -> dict[int, MemberState]:
    members = state.reports(JOB)[B].workers.members
    return {each.identity.rank: each.state for each in members}


def test_a_report_is_kept_and_returned_once() -> None:
    state = federation()
    assert receive(state, whole(REPORT)) == (JOB,)
    assert receive(state, whole(REPORT)) == ()
    assert state.reports(JOB) == {B: REPORT}
    assert state.reports(OTHER) == {}
    figures = TrainingFigures(True, 5, 10.0)
    assert receive(state, RunReported(JOB, figures=figures)) == (JOB,)
    assert state.reports(JOB) == {B: replace(REPORT, figures=figures)}


def test_a_stream_begins_with_a_whole_run() -> None:
    state = federation()
    refused = receive(state, RunReported(JOB, figures=TrainingFigures()))
    assert refused is FederationRefusalReason.MALFORMED
    receive(state, whole(REPORT))
    state.open_stream(2, B, A, 2.0)
    refused = receive(state, RunReported(JOB, figures=TrainingFigures()), stream=2)
    assert refused is FederationRefusalReason.MALFORMED
    assert state.reports(JOB) == {B: REPORT}


def test_a_silent_site_is_unreachable_and_its_report_stays() -> None:
    state = federation()
    receive(state, whole(REPORT), now_s=10.0)
    assert state.reachability(B, 10.0 + SILENT_AFTER_S) == SiteReachability(True, SILENT_AFTER_S)
    assert state.reachability(B, 10.1 + SILENT_AFTER_S).reachable is False
    state.forget(1)
    assert state.reports(JOB) == {B: REPORT}
    assert state.reachability(SiteName("plant-x"), 0.0) == SiteReachability(False, None)


def test_a_site_has_named_all_its_runs_after_a_time_limit() -> None:
    state = federation()
    for now_s in (0.0, GONE_AFTER_S - 1.0, GONE_AFTER_S):
        receive(state, Heartbeat(), now_s=now_s)
        assert state.reachability(B, now_s).named_all == (now_s == GONE_AFTER_S)
    state.open_stream(2, B, A, GONE_AFTER_S)
    assert not state.reachability(B, GONE_AFTER_S).named_all


def test_the_newest_stream_of_a_site_counts() -> None:
    state = federation()
    receive(state, whole(REPORT))
    state.open_stream(2, B, A, 2.0)
    refused = receive(state, Heartbeat())
    assert refused is FederationRefusalReason.REPLACED
    state.forget(1)
    assert receive(state, Heartbeat(), stream=2, now_s=3.0) == ()
    assert state.reachability(B, 3.0).heartbeat_age_s == 0.0


def test_a_caller_that_expects_another_site_is_refused() -> None:
    state = FederationState(A, [B])
    with pytest.raises(StreamRefusedError) as refused:
        state.open_stream(1, B, SiteName("plant-c"), 0.0)
    assert refused.value.reason is FederationRefusalReason.WRONG_SITE
    assert state.reachability(B, 0.0) == SiteReachability(False, None)


def test_a_removed_run_is_forgotten() -> None:
    state = federation()
    receive(state, whole(REPORT))
    assert receive(state, RunRemoved(JOB)) == (JOB,)
    assert receive(state, RunRemoved(JOB)) == ()
    assert state.reports(JOB) == {}


def test_a_run_that_a_new_stream_does_not_name_is_removed_later() -> None:
    state = federation()
    receive(state, whole(REPORT))
    receive(state, whole(REPORT, OTHER))
    state.open_stream(2, B, A, 100.0)
    receive(state, whole(REPORT, OTHER), stream=2, now_s=101.0)
    assert receive(state, Heartbeat(), stream=2, now_s=99.0 + GONE_AFTER_S) == ()
    assert state.reports(JOB)
    assert receive(state, Heartbeat(), stream=2, now_s=100.0 + GONE_AFTER_S) == (JOB,)
    assert state.reports(JOB) == {}
    assert state.reports(OTHER)


def test_the_run_is_removed_also_if_the_site_reports_without_pause() -> None:
    state = federation()
    receive(state, whole(REPORT))
    receive(state, whole(REPORT, OTHER))
    state.open_stream(2, B, A, 100.0)
    receive(state, whole(REPORT, OTHER), stream=2, now_s=101.0)
    figures = RunReported(OTHER, figures=TrainingFigures(training=True, iteration=9))
    changed = state.receive(2, figures, 100.0 + GONE_AFTER_S)
    assert changed == (OTHER, JOB)
    assert set(state.reports(OTHER)) == {B}
    assert state.reports(JOB) == {}


def test_a_restarted_operator_removes_no_worker_before_it_knows_all() -> None:
    state = federation()
    both = ReportedWorkers(
        (worker(B, 1),), (member(B, 1), member(B, 7)), True, {worker(B, 1).rank: 0.5}
    )
    receive(state, whole(replace(REPORT, workers=both)))
    state.open_stream(2, B, A, 2.0)
    restarted = ReportedWorkers((worker(B, 1),), (), settled=False)
    receive(state, whole(replace(REPORT, workers=restarted)), stream=2)
    assert states(state) == {1: MemberState.READY, 7: MemberState.READY}
    assert state.reports(JOB)[B].workers.accuracies == {1: 0.5}
    receive(state, RunReported(JOB, workers=replace(restarted, settled=True)), stream=2)
    assert states(state) == {1: MemberState.LOST, 7: MemberState.FINISHED}


def test_an_older_incarnation_changes_nothing() -> None:
    state = federation()
    receive(
        state, whole(replace(REPORT, workers=replace(REPORT.workers, members=(member(B, 1, 5),))))
    )
    old = replace(REPORT.workers, members=(member(B, 1, 4, MemberState.LOST),))
    assert receive(state, RunReported(JOB, workers=old)) == ()
    new = replace(REPORT.workers, members=(member(B, 1, 6, MemberState.LOST),))
    assert receive(state, RunReported(JOB, workers=new)) == (JOB,)
    assert states(state) == {1: MemberState.LOST}


def test_everything_is_sent_once_then_changes_then_a_heartbeat() -> None:
    reports = OutboundReports()
    assert reports.pending({JOB: REPORT}, 0.0) == [whole(REPORT)]
    assert reports.pending({JOB: REPORT}, 1.0) == []
    assert reports.pending({JOB: REPORT}, 5.0) == [Heartbeat()]
    assert reports.pending({JOB: REPORT}, 6.0) == []
    lost = replace(REPORT.workers, members=(member(B, 1, 1, MemberState.LOST),))
    assert reports.pending({JOB: replace(REPORT, workers=lost)}, 7.0) == [
        RunReported(JOB, workers=lost)
    ]
    assert reports.pending({}, 8.0) == [RunRemoved(JOB)]
    assert reports.pending({}, 9.0) == []
    assert OutboundReports().pending({}, 0.0) == [Heartbeat()]


def test_the_bundle_of_a_run_is_sent_and_kept_until_replaced() -> None:
    state, reports = federation(), OutboundReports()
    report = replace(REPORT, bundle_pem=b"one")
    (first,) = reports.pending({JOB: report}, 0.0)
    assert first == whole(report)
    assert receive(state, first) == (JOB,)
    assert state.reports(JOB) == {B: report}
    receive(state, RunReported(JOB, figures=TrainingFigures(True, 5, 10.0)))
    assert state.reports(JOB)[B].bundle_pem == b"one"
    for bundle_pem in (b"two", b""):
        report = replace(report, bundle_pem=bundle_pem)
        (news,) = reports.pending({JOB: report}, 1.0)
        assert news == RunReported(JOB, bundle_pem=bundle_pem)
        assert receive(state, news) == (JOB,)
        assert state.reports(JOB)[B].bundle_pem == bundle_pem


def test_figures_are_sent_at_most_every_five_seconds() -> None:
    reports = OutboundReports()
    sent = []
    for second in range(21):
        figures = TrainingFigures(True, second, float(second))
        sent += reports.pending({JOB: replace(REPORT, figures=figures)}, float(second))
    assert [s.figures.iteration for s in sent if isinstance(s, RunReported) and s.figures] == [
        0, 5, 10, 15, 20
    ]  # fmt: skip


def test_every_reason_of_a_refusal_is_explained() -> None:
    page = (Path(__file__).parents[4] / "docs" / "several-sites.md").read_text()
    for reason in FederationRefusalReason:
        assert f"- `{reason}`: " in page
