"""What is to be said next to one site: only what is new, and a heartbeat where nothing is. Pure.

One object for each stream: a new one says everything anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dlion_api.names import JobKey
from dlion_operator.federation.reports import Beat, RunReport, Said, SaidGone, Statement

HEARTBEAT_EVERY_S = 5.0
FIGURES_EVERY_S = 5.0
"""Iteration and samples per second change all the time."""


class Telling:
    """What has been said on one stream."""

    def __init__(self) -> None:
        self._told: dict[JobKey, RunReport] = {}
        self._figures_s = float("-inf")
        self._said_s = float("-inf")

    def news(self, reports: Mapping[JobKey, RunReport], now_s: float) -> list[Statement]:
        """What to say now that this is how things stand. `now_s` is any monotonic clock's."""
        with_figures = now_s - self._figures_s >= FIGURES_EVERY_S
        statements: list[Statement] = [SaidGone(run) for run in self._told if run not in reports]
        statements += self._runs(reports, with_figures)
        if with_figures:
            self._figures_s = now_s
        if not statements and now_s - self._said_s >= HEARTBEAT_EVERY_S:
            statements.append(Beat())
        if statements:
            self._said_s = now_s
        return statements

    def _runs(self, reports: Mapping[JobKey, RunReport], with_figures: bool) -> Iterator[Said]:
        told, self._told = self._told, {}
        for run, report in reports.items():
            before = told.get(run)
            if before is None:
                self._told[run] = report
                bundle_pem = report.bundle_pem or None
                yield Said(run, report.spec, report.workers, report.figures, bundle_pem)
                continue
            figures = report.figures if with_figures else before.figures
            self._told[run] = replace(report, figures=figures)
            said = Said(
                run,
                None if report.spec == before.spec else report.spec,
                None if report.workers == before.workers else report.workers,
                None if figures == before.figures else figures,
                None if report.bundle_pem == before.bundle_pem else report.bundle_pem,
            )
            if said != Said(run):
                yield said
