"""Proves: a result folder is never made over something else; its events are readable at any
moment, also when the disk is full or the last writer was killed; a resumed run goes on behind them.

Leaves out: a real kill of a real process (tests/local/test_results_survive_a_kill.py).
"""

from __future__ import annotations

import errno
import json
import resource
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from dlion_api.errors import SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.progress import EventRecord
from dlion_cli.failures import exit_code_of
from dlion_worker.results.environment import EnvironmentFigure, EnvironmentReport
from dlion_worker.results.events import read_events
from dlion_worker.results.folder import ResultFolder, default_folder
from dlion_worker.results.storage import AppendedFile, StorageError, write_whole
from dlion_worker.results.summary import Ending
from synthetic_run import Story, description, records

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STORY = Story(workers=2, seconds=20, killed=None)


@contextmanager
def files_no_longer_than(size_bytes: int):
    """A disk that is full once a file has that size (the system says EFBIG instead of ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def append_often(folder, event):
    for _ in range(1000):
        folder.append(event)


def test_the_default_folder_says_job_and_time():
    assert default_folder("digits", NOW) == Path("runs/digits-20260102-030405")


def test_two_runs_within_a_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        ResultFolder.create(None, description(STORY), now=NOW) as one,
        ResultFolder.create(None, description(STORY), now=NOW) as other,
    ):
        assert one.path != other.path
        assert other.path.name == "cifar10-20260102-030405-2"


@pytest.mark.parametrize("holds", ["a file", "a folder"])
def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path, holds):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").mkdir() if holds == "a folder" else (foreign / "x").write_text("y")
    before = sorted(foreign.iterdir())
    with pytest.raises(SpecError, match="not empty"):
        ResultFolder.create(foreign, description(STORY), now=NOW)
    assert sorted(foreign.iterdir()) == before


def test_an_empty_folder_is_taken(tmp_path):
    with ResultFolder.create(tmp_path, description(STORY), now=NOW) as folder:
        job = yaml.safe_load((folder.path / "job.yaml").read_text())
    assert job["metadata"]["name"] == "cifar10"
    assert job["spec"]["synchronization"]  # defaults are filled in


def test_every_record_is_in_the_file_before_the_folder_is_closed(tmp_path):
    given = list(records(STORY))
    folder = ResultFolder.create(tmp_path / "run", description(STORY), now=NOW)
    for record in given:
        folder.append(record)
    assert list(read_events(folder.path / "events.jsonl")) == given
    folder.close()


def test_resuming_goes_on_behind_the_old_events_without_their_torn_end(tmp_path):
    given = list(records(STORY))
    half = len(given) // 2
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW) as folder:
        for record in given[:half]:
            folder.append(record)
    events = tmp_path / "run" / "events.jsonl"
    with events.open("ab") as stream:
        stream.write(b'{"kind": "step", "time_')
    again = ResultFolder.create(tmp_path / "run", description(STORY), now=NOW, resume=True)
    with again as folder:
        for record in given[half:]:
            folder.append(record)
        summary = folder.finish(Ending("maxSeconds"))
    assert list(read_events(events)) == given
    assert summary["bad_line_count"] == 0
    with ResultFolder.create(tmp_path / "whole", description(STORY), now=NOW) as folder:
        for record in given:
            folder.append(record)
        assert folder.finish(Ending("maxSeconds")) == summary


def test_resuming_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no run that could go on"):
        ResultFolder.create(tmp_path, description(STORY), now=NOW, resume=True)


def test_a_full_disk_stops_at_a_whole_line_and_more_fits_once_there_is_room(tmp_path):
    event = EventRecord(1.0, Rank(0), 1, "Something", "x" * 300)
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW) as folder:
        with files_no_longer_than(20_000), pytest.raises(StorageError, match="Free some space"):
            append_often(folder, event)
        events = folder.path / "events.jsonl"
        assert events.read_bytes().endswith(b"\n")
        fitted = len(list(read_events(events)))
        assert 20 < fitted < 100
        folder.append(event)
        assert len(list(read_events(events))) == fitted + 1


def test_a_full_disk_leaves_the_old_summary_as_it_was(tmp_path):
    path = tmp_path / "summary.json"
    write_whole(path, b'{"old": true}')
    with files_no_longer_than(1000), pytest.raises(StorageError):
        write_whole(path, b"x" * 5000)
    assert json.loads(path.read_text()) == {"old": True}
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_ends_the_process_with_the_storage_code():
    full = AppendedFile(Path("/dev/full"))
    with pytest.raises(StorageError) as raised:
        full.append(b"line\n")
    full.close()
    assert raised.value.errno == errno.ENOSPC
    assert exit_code_of(raised.value) is ExitCode.STORAGE


def test_the_environment_is_kept_as_yaml_and_in_the_summary(tmp_path):
    figure = EnvironmentFigure(1, "link rate", "Mbit/s", 20.0, 19.6, peer=0)
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW) as folder:
        folder.write_environment(EnvironmentReport("hetero-sys-a", (figure,), ("a note",)))
        summary = folder.finish(Ending("maxSeconds"))
    kept = yaml.safe_load((tmp_path / "run" / "environment.yaml").read_text())
    assert kept == summary["environment"]
    assert kept["figures"][0]["measured"] == 19.6


def test_models_that_sites_saved_are_named_in_the_summary(tmp_path):
    about = {
        "model": "averaged", "accuracy": 0.97, "averaged_accuracy": 0.97, "best_replica": 1,
        "ranks": [0, 1], "sites": ["plant-a", "plant-b"], "samples": 9, "stop_reason": "maxSteps",
    }  # fmt: skip
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW) as folder:
        for site, text in (("plant-a", json.dumps(about)), ("plant-b", "{half")):
            (folder.path / "models" / site).mkdir(parents=True)
            (folder.path / "models" / site / "model.json").write_text(text)
        summary = folder.finish(Ending("maxSteps"))
    assert [model["path"] for model in summary["models"]] == ["models/plant-a/model.keras"]
    assert summary["included_sites"] == ["plant-a", "plant-b"]
    assert summary["accuracy"]["averaged_model"] == 0.97
