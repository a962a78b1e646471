"""Tests of TensorBoard's files.

They hold the scalars of the records, with the frames and checksums that it reads. The test computes
the checksum bit by bit. Nothing loads TensorFlow for them. After a resume, points keep their
wall-clock times, and byte counts continue.
"""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event

from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.storage import StorageError
from dlion_results.run_folder.tensorboard import TensorBoardLogs
from synthetic_run import Story, description, records

STORY = Story(workers=2, seconds=30, killed=None)


def masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def events_in(path):
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc32c(body)
        yield Event.FromString(body)
        data = data[16 + length :]


@pytest.fixture
def logged(tmp_path):
    names = {worker.rank: worker.name for worker in description(STORY).workers()}
    logs = TensorBoardLogs(tmp_path, names, opened_at_s=1_000_000)
    for record in records(STORY):
        logs.add(record)
    logs.close()
    return tmp_path


def test_each_worker_has_a_file_that_begins_with_the_version(logged):
    folders = sorted(path.name for path in logged.iterdir())
    assert folders == ["plant-a.small-0", "plant-a.small-1"]
    for folder in folders:
        (path,) = (logged / folder).iterdir()
        assert next(iter(events_in(path))).file_version == "brain.Event:2"


def test_the_scalars_are_those_of_the_records(logged):
    (path,) = (logged / "plant-a.small-0").iterdir()
    found = {}
    for event in list(events_in(path))[1:]:
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    evaluations = [
        (record.iteration, record.accuracy)
        for record in records(STORY)
        if record.rank == Rank(0) and hasattr(record, "accuracy")
    ]
    assert [step for step, _ in found["held-out/accuracy"]] == [step for step, _ in evaluations]
    assert [value for _, value in found["held-out/accuracy"]] == pytest.approx(
        [value for _, value in evaluations]
    )
    assert {
        "training/loss", "training/local batch size", "training/samples per s",
        "sent bytes/to plant-a/small-1",
    } <= set(found)  # fmt: skip
    sent = [value for _, value in found["sent bytes/to plant-a/small-1"]]
    assert sent == sorted(sent)


def test_a_metric_named_as_a_scalar_of_the_evaluation_does_not_replace_it(tmp_path):
    metrics = {"loss": 3.0, "metric_loss": 4.0, "accuracy": 5.0, "auc": 6.0}
    logs = TensorBoardLogs(tmp_path, {Rank(0): "w"}, opened_at_s=0.0)
    logs.add(EvaluationRecord(1.0, Rank(0), 1, 8, 0.5, 2.0, 100, metrics=metrics))
    logs.close()
    (path,) = (tmp_path / "w").iterdir()
    *_, last = events_in(path)
    assert {value.tag: value.simple_value for value in last.summary.value} == {
        "held-out/accuracy": 0.5, "held-out/loss": 2.0, "held-out/metric_loss": 3.0,
        "held-out/metric_metric_loss": 4.0, "held-out/metric_accuracy": 5.0, "held-out/auc": 6.0,
    }  # fmt: skip


def points_of(folder, tag):
    """Wall times and values of a scalar of the first worker, over all files, oldest first."""
    return [
        (event.wall_time, value.simple_value)
        for path in sorted((folder / "tensorboard" / "plant-a.small-0").iterdir())
        for event in events_in(path)
        for value in event.summary.value
        if value.tag == tag
    ]


def test_after_a_resume_points_keep_their_times_and_counts_continue(tmp_path):
    """The run breaks 15 s after its start, resumes an hour later, and breaks again."""
    began = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    run = tmp_path / "run"
    given = list(records(STORY))
    parts = [
        (0.0, [r for r in given if r.time_s <= 15]),
        (3600.0, [r for r in given if 15 < r.time_s <= 20]),
        (7200.0, [r for r in given if r.time_s > 20]),
    ]
    expected_s = []
    before_s = 0.0
    for opened_s, part in parts:
        now = began + timedelta(seconds=opened_s)
        with ResultFolder.create(run, description(STORY), now=now, resume=opened_s > 0) as folder:
            for record in part:
                folder.append(record)
        if opened_s == 0:
            (run / "state" / "w0").mkdir(parents=True)
            np.savez(run / "state" / "w0" / "checkpoint.npz", weights=np.zeros(2))
        expected_s += [
            began.timestamp() + opened_s + r.time_s - before_s
            for r in part
            if r.rank == Rank(0) and hasattr(r, "accuracy")
        ]
        before_s = max(r.time_s for r in part)
    accuracies = points_of(run, "held-out/accuracy")
    assert [wall_s for wall_s, _ in accuracies] == pytest.approx(expected_s, abs=1e-3)
    sent = [value for _, value in points_of(run, "sent bytes/to plant-a/small-1")]
    assert sent == sorted(sent)


def test_a_file_begins_with_the_version_although_the_disk_was_full_first(tmp_path):
    logs = TensorBoardLogs(tmp_path, {Rank(0): "w"}, opened_at_s=1_000_000)
    first, second, *_ = (r for r in records(STORY) if isinstance(r, EvaluationRecord))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(StorageError):
            logs.add(replace(first, rank=Rank(0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    logs.add(replace(second, rank=Rank(0)))
    logs.close()
    (path,) = tmp_path.glob("w/*")
    assert [event.file_version for event in events_in(path)] == ["brain.Event:2", ""]


def test_writing_results_loads_no_tensorflow():
    program = (
        "import sys; import dlion_results.run_folder.folder, dlion_results.report.page;"
        "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
