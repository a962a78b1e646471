"""Tests of the recorder.

Each record is in the folder once, in order. This holds for any repeated record and for a kill of
the keeper at any moment, also after a disk that was full. A coordinator that starts again is
followed from its first record. A gap is reported once. An invalid record is skipped and not
requested again. A summary ends the recorder, also after a restart. A folder has one keeper.

Result folders are real. A kill is a recorder that is dropped without `close`.

Left out: the stream (tests/local/test_pods).
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_api.protocol.records import record_to_json
from dlion_api.reasons import RECORDS_MISSED, EventReason
from dlion_api.spec import Job, load_job
from dlion_results.run_folder.events import read_events
from dlion_results.run_folder.storage import StorageError
from dlion_worker.artifact_server import recorder as module
from dlion_worker.artifact_server.recorder import Recorder
from local_run import job_document


def job() -> Job:
    return load_job(job_document(2))


def record(number: int) -> str:
    reason = EventReason.CHECKPOINT_SAVED
    return record_to_json(EventRecord(float(number), Rank(0), number, reason, f"number {number}"))


def numbers(folder: Path) -> list[int]:
    events = [r for r in read_events(folder / "events.jsonl") if isinstance(r, EventRecord)]
    return [r.iteration for r in events if r.reason == EventReason.CHECKPOINT_SAVED]


def dropped(folder: Path) -> list[str]:
    events = [r for r in read_events(folder / "events.jsonl") if isinstance(r, EventRecord)]
    assert not any(r.is_of_worker for r in events if r.reason == RECORDS_MISSED)
    return [r.message for r in events if r.reason == RECORDS_MISSED]


def kill(it: Recorder) -> None:
    """End the recorder as SIGKILL does: the lock is released and nothing else is written."""
    it._folder.close()
    del it
    gc.collect()


def test_a_repeated_record_is_kept_once(tmp_path: Path) -> None:
    it = Recorder(tmp_path, job())
    it.take("a", 1, [record(1), record(2), record(3)])
    it.take("a", 2, [record(2), record(3), record(4)])
    it.take("a", 1, [record(1)])
    assert it.position == ("a", 4)
    it.close()
    assert numbers(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("taken", range(6))
def test_a_killed_keeper_continues_at_its_position(tmp_path: Path, taken: int) -> None:
    it = Recorder(tmp_path, job())
    for number in range(1, taken + 1):
        it.take("a", number, [record(number)])
    kill(it)
    again = Recorder(tmp_path, job())
    assert again.position[1] == taken
    again.take("a", 1, [record(number) for number in range(1, 8)])
    again.close()
    assert numbers(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_the_summary_has_the_start_of_the_first_keeper(tmp_path: Path) -> None:
    it = Recorder(tmp_path, job())
    it.take("a", 1, [record(1)])
    kill(it)
    killed_at = datetime.now(UTC)
    again = Recorder(tmp_path, job())
    again.finish("maxSteps reached", succeeded=True)
    again.close()
    ending = json.loads((tmp_path / "summary.json").read_text())["ending"]
    assert datetime.fromisoformat(ending["started_at"]) <= killed_at


def test_a_torn_line_is_requested_again(tmp_path: Path) -> None:
    it = Recorder(tmp_path, job())
    it.take("a", 1, [record(1), record(2)])
    kill(it)
    events = tmp_path / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-5])
    again = Recorder(tmp_path, job())
    assert again.position == ("a", 1)
    again.take("a", 2, [record(2)])
    again.close()
    assert numbers(tmp_path) == [1, 2]


def test_a_new_coordinator_is_followed_from_its_first_record(tmp_path: Path) -> None:
    it = Recorder(tmp_path, job())
    it.take("a", 1, [record(1), record(2)])
    it.take("b", 1, [record(3)])
    assert it.position == ("b", 1)
    kill(it)
    again = Recorder(tmp_path, job())
    assert again.position == ("b", 1)
    again.close()
    assert numbers(tmp_path) == [1, 2, 3]
    assert dropped(tmp_path) == []


def test_a_gap_is_reported_once(tmp_path: Path) -> None:
    it = Recorder(tmp_path, job())
    it.take("a", 1, [record(1)])
    it.take("a", 5, [record(5)])
    kill(it)
    again = Recorder(tmp_path, job())
    assert again.position == ("a", 5)
    again.take("a", 5, [record(5), record(6)])
    again.close()
    assert numbers(tmp_path) == [1, 5, 6]
    assert dropped(tmp_path) == ["3 records were dropped while the keeper was unavailable"]


@pytest.mark.parametrize("bad", ["", "{", "[]", '{"kind": "unknown"}', "x" * 100_000])
def test_an_invalid_record_is_skipped(tmp_path: Path, bad: str) -> None:
    it = Recorder(tmp_path, job())
    it.take("a", 1, [record(1), bad, record(3)])
    kill(it)
    again = Recorder(tmp_path, job())
    assert again.position == ("a", 3)
    again.close()
    assert numbers(tmp_path) == [1, 3]


@contextlib.contextmanager
def no_room_for_the_position(folder: Path) -> Iterator[None]:
    """No new file can replace the position: a directory stands in its place."""
    position = folder / "keeper.json"
    kept = position.rename(folder / "kept.json")
    position.mkdir()
    yield
    position.rmdir()
    kept.rename(position)


@pytest.mark.parametrize(
    ("epoch", "first", "texts", "kept"),
    [
        ("b", 1, [record(7), record(8)], [1, 7, 8]),
        ("a", 5, [record(5), record(6)], [1, 5, 6]),
        ("a", 2, ["{", record(3)], [1, 3]),
    ],
    ids=["another epoch", "a gap", "an invalid record"],
)
def test_a_position_that_did_not_fit_is_saved_before_the_next_record(
    tmp_path: Path, epoch: str, first: int, texts: list[str], kept: list[int]
) -> None:
    it = Recorder(tmp_path, job())
    it.take("a", 1, [record(1)])
    with no_room_for_the_position(tmp_path):
        for _ in range(2):
            with pytest.raises(StorageError):
                it.take(epoch, first, texts)
    it.take(epoch, first, texts)
    kill(it)
    again = Recorder(tmp_path, job())
    again.take(epoch, first, texts)
    again.close()
    assert numbers(tmp_path) == kept
    assert len(dropped(tmp_path)) == (first == 5)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"epoch": 1}', '{"epoch":"a","sequence":[]}'])
def test_a_damaged_position_does_not_stop_it(tmp_path: Path, content: str) -> None:
    it = Recorder(tmp_path, job())
    it.take("a", 1, [record(1)])
    it.close()
    (tmp_path / "keeper.json").write_text(content)
    again = Recorder(tmp_path, job())
    again.take("b", 1, [record(2)])
    again.close()
    assert numbers(tmp_path) == [1, 2]


def test_a_summary_ends_the_recorder_also_after_a_restart(tmp_path: Path) -> None:
    it = Recorder(tmp_path, job())
    it.take("a", 1, [record(1)])
    assert not it.is_over
    it.finish("the target", succeeded=True)
    assert it.is_over
    it.close()
    again = Recorder(tmp_path, job())
    assert again.is_over
    again.close()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ending"]["stop_reason"] == "the target"
    assert summary["events"]["reasons"] == {"CheckpointSaved": 1}


def test_a_second_keeper_is_refused(tmp_path: Path) -> None:
    it = Recorder(tmp_path, job())
    with pytest.raises(UnavailableError, match="still uses this folder"):
        Recorder(tmp_path, job())
    it.close()


def test_the_position_is_saved_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_INTERVAL_S", -1.0)
    it = Recorder(tmp_path, job())
    it.take("a", 1, [record(1), record(2)])
    assert json.loads((tmp_path / "keeper.json").read_text())["sequence"] == 2
    it.close()
