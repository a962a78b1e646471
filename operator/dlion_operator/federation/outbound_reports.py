"""Choose what to send next to one site: changes, or a heartbeat if there are none. Pure.

Use one object per stream: a new stream starts with complete reports.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dlion_api.names import JobKey
from dlion_operator.federation.reports import (
    Heartbeat,
    RunRemoved,
    RunReport,
    RunReported,
    Statement,
)

HEARTBEAT_INTERVAL_S = 5.0
FIGURES_INTERVAL_S = 5.0
"""Iteration and samples per second change constantly, so they are sent at this interval."""


class OutboundReports:
    """Tracks what one stream has sent."""

    def __init__(self) -> None:
        self._reported: dict[JobKey, RunReport] = {}
        self._figures_s = float("-inf")
        self._sent_s = float("-inf")

    def pending(self, reports: Mapping[JobKey, RunReport], now_s: float) -> list[Statement]:
        """Return the statements to send for these current reports. `now_s` is a monotonic time."""
        with_figures = now_s - self._figures_s >= FIGURES_INTERVAL_S
        statements: list[Statement] = [
            RunRemoved(run) for run in self._reported if run not in reports
        ]
        statements += self._runs(reports, with_figures)
        if with_figures:
            self._figures_s = now_s
        if not statements and now_s - self._sent_s >= HEARTBEAT_INTERVAL_S:
            statements.append(Heartbeat())
        if statements:
            self._sent_s = now_s
        return statements

    def _runs(
        self, reports: Mapping[JobKey, RunReport], with_figures: bool
    ) -> Iterator[RunReported]:
        earlier, self._reported = self._reported, {}
        for run, report in reports.items():
            before = earlier.get(run)
            if before is None:
                self._reported[run] = report
                bundle_pem = report.bundle_pem or None
                revocations = report.revocations or None
                yield RunReported(
                    run, report.spec, report.workers, report.figures, bundle_pem, revocations
                )
                continue
            figures = report.figures if with_figures else before.figures
            self._reported[run] = replace(report, figures=figures)
            changes = RunReported(
                run,
                None if report.spec == before.spec else report.spec,
                None if report.workers == before.workers else report.workers,
                None if figures == before.figures else figures,
                None if report.bundle_pem == before.bundle_pem else report.bundle_pem,
                None if report.revocations == before.revocations else report.revocations,
            )
            if changes != RunReported(run):
                yield changes
