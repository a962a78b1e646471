"""Test what `dlion run` keeps of the records for the result of a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from dlion_api.protocol.progress import StepRecord
from dlion_cli.local_runs.local_training import LocalRecordSink
from dlion_cli.views.live_view import LiveView
from dlion_results.run_folder.folder import ResultFolder
from synthetic_run import Story, description, records

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STORY = Story(workers=2, seconds=30, killed=None)


def test_the_iteration_is_that_of_workers_that_train(tmp_path: Path) -> None:
    """Sensors of topology `staged` make steps of their own."""
    run = description(STORY)
    exchange = replace(run.spec.exchange, topology="staged")
    job = replace(run, spec=replace(run.spec, exchange=exchange))
    steps = [each for each in records(STORY) if isinstance(each, StepRecord)]
    with ResultFolder.create(tmp_path / "run", job, now=NOW) as folder:
        sink = LocalRecordSink(folder, LiveView(job, Console(quiet=True)))
        for step in steps:
            if step.rank == 1 or step.iteration <= 7:
                sink.take(step)
    assert sink.iteration == 7
