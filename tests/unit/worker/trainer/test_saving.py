"""Tests of saving and resuming a worker's state, without a keeper.

With a peer's state, the samples of all workers count up to that state, and never fewer than before.
A full or missing disk is reported and does not end the worker. A damaged checkpoint is set aside,
as is one of another worker. Without a peer's state the latter ends the worker before a save.

Left out: the content of a checkpoint (test_checkpointing); uploads (tests/local/test_keeper).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dlion_api.errors import DataError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.progress import EventRecord
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import StateSnapshot
from dlion_core.policies import factory
from dlion_core.policies.interface import Layout
from dlion_worker.security.credentials import WorkerCredentials
from dlion_worker.trainer.saving import StateSaver
from dlion_worker.training.checkpointing import Checkpointer
from loop_cluster import SIZE, Model, Replica, Stream, synchronous_job

JOB, SITE = JobKey("default", "digits", "1"), SiteName("plant-a")
KEYS = (b"0" * 32, b"1" * 32)


@dataclass
class Saving:
    """A saver whose checkpoint is in that folder, and its reports."""

    folder: Path
    progress: JobProgress = field(default_factory=JobProgress)
    records: list[EventRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = WorkerConfig(
            job_document={}, rank=Rank(0), coordinator_address="", authority_pem_path="",
            token_path="", state_dir=str(self.folder), socket_path="", listen_host="",
            advertise_host="", data_root="", results_dir="", resume=True,
        )  # fmt: skip
        reporter = Reporter(
            rank=Rank(0),
            incarnation=1,
            start_monotonic_s=0.0,
            clock_s=float,
            send=self.records.extend,
        )  # type: ignore[arg-type] # only events are sent here
        self.saver = StateSaver(
            config, checkpointer=self.checkpointer, progress=self.progress, reporter=reporter
        )

    def checkpointer(self, path: Path) -> Checkpointer:
        layout = Layout(("w",), (SIZE,))
        machine = factory.build(synchronous_job(2, 100).spec, Rank(0), layout, [Rank(0), Rank(1)])
        replica = Replica(Model(0, None, 0.0, lambda: None))
        return Checkpointer(
            path, every_s=300, replica=replica, progress=self.progress, stream=Stream(),
            machine=machine,
        )  # fmt: skip

    def reasons(self) -> list[str]:
        return [record.reason for record in self.records]


@pytest.mark.parametrize(("counted", "expected"), [(100, 720), (1000, 1000)])
def test_with_a_peers_state_the_samples_of_all_workers_count(
    tmp_path: Path, counted: int, expected: int
) -> None:
    saving = Saving(tmp_path, JobProgress(iteration=2, job_samples=counted))
    snapshot = StateSnapshot(9, 8, np.ones(SIZE, np.float32).tobytes())
    saving.saver.adopt(snapshot, batch_samples=80)
    assert (saving.progress.iteration, saving.progress.job_samples) == (9, expected)
    assert saving.reasons() == [EventReason.WORKER_REJOINED]


def test_an_unwritable_disk_is_reported_and_does_not_end_the_worker(tmp_path: Path) -> None:
    saving = Saving(tmp_path / "gone" / "for good")
    saving.saver.save()
    (record,) = saving.records
    assert (record.reason, record.warning) == (EventReason.CHECKPOINT_FAILED, True)
    assert "the previous checkpoint is kept" in record.message


def test_a_checkpoint_is_resumed_and_a_damaged_one_set_aside(tmp_path: Path) -> None:
    saving = Saving(tmp_path, JobProgress(iteration=7))
    saving.saver.save()
    again = Saving(tmp_path)
    assert again.saver.resume(is_restart=False)
    assert again.progress.iteration == 7
    (tmp_path / "checkpoint.npz").write_bytes(b"PK\3\4 not a checkpoint")
    damaged = Saving(tmp_path)
    assert not damaged.saver.resume(is_restart=True)
    assert damaged.reasons() == [EventReason.CHECKPOINT_DAMAGED]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz.damaged"]
    assert damaged.saver.may_keep_own()  # it holds nothing to lose


def test_a_checkpoint_of_another_worker_is_replaced_only_after_a_peers_state_was_adopted(
    tmp_path: Path,
) -> None:
    def saving(rank: int) -> Saving:
        made, credentials = Saving(tmp_path, JobProgress(iteration=7)), WorkerCredentials.insecure()
        credentials.checkpoint_key = KEYS[rank]
        made.saver.connect(JOB, WorkerIdentity(Rank(0), SITE, "g", 0), 1, credentials)
        return made

    saving(1).saver.save()
    own, another = saving(1), saving(0)
    assert own.saver.resume(is_restart=False)
    assert own.reasons() == [EventReason.RESUMED]
    assert own.saver.may_keep_own()
    own.saver.check_start()
    assert not another.saver.resume(is_restart=False)
    (record,) = another.records
    assert (record.reason, record.warning) == (EventReason.CHECKPOINT_DAMAGED, True)
    assert "check who may write to the keeper's claim: it is set aside as" in record.message
    assert "continues from a peer's state if one has any" in record.message
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz.damaged"]
    assert not another.saver.may_keep_own()
    assert not another.saver.may_keep_own()
    (_, record) = another.records  # once
    assert "restore the key of the site's authority, and resume it" in record.message
    with pytest.raises(DataError, match=r"before the run was over: checkpoint .* is not trusted"):
        another.saver.check_start()
    snapshot = StateSnapshot(9, 8, np.ones(SIZE, np.float32).tobytes())
    another.saver.adopt(snapshot, batch_samples=80)
    assert another.saver.may_keep_own()
    another.saver.check_start()


def test_after_a_full_disk_saving_is_retried_after_a_pause_and_not_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry at each step would report tens of failures a second."""
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    saving = Saving(tmp_path / "gone" / "for good")
    checkpointer = saving.saver.checkpointer
    attempts_s = []
    for _ in range(36_000):
        now_s += 0.1
        if checkpointer.due():
            saving.saver.save()
            attempts_s.append(now_s)
    assert saving.reasons() == [EventReason.CHECKPOINT_FAILED] * len(attempts_s)
    assert 12 <= len(attempts_s) <= 36_000 * 0.1 / 100
    assert "the next attempt follows in" in saving.records[0].message
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "for good").mkdir()
    saving.saver.save()
    assert saving.reasons()[-1] == EventReason.CHECKPOINT_SAVED
    assert not checkpointer.due()
