"""Test which report goes to another site next, with time as an argument.

The first report of a run is complete. Later reports hold changes only. Figures are rare. A
heartbeat fills a pause. The removal of a run is sent once.

Left out: how the other end reads it (tests/property/test_federation), streams
(tests/local/test_federation).
"""

from __future__ import annotations

from dataclasses import replace

from dlion_api.names import JobKey
from dlion_operator.federation.outbound_reports import (
    FIGURES_INTERVAL_S,
    HEARTBEAT_INTERVAL_S,
    OutboundReports,
)
from dlion_operator.federation.reports import (
    Heartbeat,
    ReportedWorkers,
    RunRemoved,
    RunReport,
    RunReported,
    SpecFingerprint,
    TrainingFigures,
)

RUN = JobKey("default", "digits", "1")
REPORT = RunReport(
    SpecFingerprint("h", {}), ReportedWorkers((), (), settled=False), TrainingFigures(), b"pem"
)


def started_stream() -> OutboundReports:
    """Return a stream that sent its first report at 0 s."""
    outbound = OutboundReports()
    complete = RunReported(RUN, REPORT.spec, REPORT.workers, REPORT.figures, REPORT.bundle_pem)
    assert outbound.pending({RUN: REPORT}, 0.0) == [complete]
    return outbound


def test_unchanged_fields_are_not_sent_again() -> None:
    outbound = started_stream()
    assert outbound.pending({RUN: REPORT}, 1.0) == []
    assert outbound.pending({RUN: REPORT}, HEARTBEAT_INTERVAL_S) == [Heartbeat()]
    assert outbound.pending({RUN: REPORT}, HEARTBEAT_INTERVAL_S + 1) == []


def test_a_change_is_sent_immediately_and_alone() -> None:
    outbound = started_stream()
    settled = replace(REPORT, workers=ReportedWorkers((), (), settled=True))
    assert outbound.pending({RUN: settled}, 1.0) == [RunReported(RUN, workers=settled.workers)]
    assert outbound.pending({RUN: settled}, 1.5) == []


def test_figures_wait_for_their_interval() -> None:
    outbound = started_stream()
    further = replace(REPORT, figures=TrainingFigures(training=True, iteration=9))
    assert outbound.pending({RUN: further}, FIGURES_INTERVAL_S - 1) == []
    sent = outbound.pending({RUN: further}, FIGURES_INTERVAL_S)
    assert sent == [RunReported(RUN, figures=further.figures)]


def test_the_end_of_a_run_is_sent_once() -> None:
    outbound = started_stream()
    assert outbound.pending({}, 1.0) == [RunRemoved(RUN)]
    assert outbound.pending({}, 2.0) == []
