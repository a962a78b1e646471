"""Tests of the comparison by a replay.

The compared figures are those of the run's own summary: time of training, time to each level,
rates, batches. An unchanged run does not differ from itself.

Left out: the command (tests/local/test_replay.py).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, StepRecord
from dlion_results.replay_comparison import RunFigures, compare_figures, replay_figures
from dlion_results.run_folder.events import read_events
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.layout import EVENTS
from dlion_results.summary.summary import Ending
from synthetic_run import Story, description, records

if TYPE_CHECKING:
    from pathlib import Path

STORY = Story(workers=2, seconds=60, killed=None)
RANKS = [Rank(0), Rank(1)]


@pytest.fixture
def run(tmp_path: Path) -> tuple[dict[str, Any], RunFigures]:
    """Summary and figures of one run, whose workers report the start of training long before its
    first step.
    """
    story_records = list(records(STORY))
    first = min(record.began_s for record in story_records if isinstance(record, StepRecord))
    began = EventRecord(first / 2, Rank(0), 1, "TrainingStarted", "")
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    with ResultFolder.create(tmp_path / "run", description(STORY), now=now) as folder:
        for record in [began, *story_records]:
            folder.append(record)
        summary = folder.finish(Ending("the test is over"))
    assert first / 2 > 0.1
    return summary, replay_figures(read_events(tmp_path / "run" / EVENTS), RANKS)


def test_figures_are_those_of_the_summary(run: tuple[dict[str, Any], RunFigures]) -> None:
    summary, figures = run
    assert figures.seconds == summary["training_s"] > 0
    levels = {entry["accuracy"]: entry["training_time_s"] for entry in summary["levels"]}
    assert figures.time_to_s == levels
    assert any(levels.values())
    assert figures.steps_per_s == summary["steps"] / 2 / summary["training_s"]
    assert figures.batch == {
        worker["rank"]: worker["samples"] / worker["steps"] for worker in summary["workers"]
    }


def test_a_run_does_not_differ_from_itself(run: tuple[dict[str, Any], RunFigures]) -> None:
    rows = compare_figures(run[1], run[1])
    assert len(rows) > 5
    assert {row.difference for row in rows if row.recorded} == {0.0}
