"""Tests of the checkpoint of a worker that trains on features of others.

A checkpoint with more features than a model's vectors is accepted. A resumed worker has its earlier
position and next batches.

Left out: other checkpoints (test_checkpointing.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.policies.interface import AddSamples, LocalStepDone, MemberJoined
from dlion_worker.training import checkpointing
from dlion_worker.training.checkpointing import Checkpointer
from dlion_worker.training.datasets import BatchStream, DataSet
from loop_cluster import Model, Replica
from staged_machines import DECODER, SIZE, features, samples, staged_machine

SHAPE = (1, 512)
SENSORS = [Rank(2), Rank(1)]


class Trained:
    """A decoder with two sensors, and samples of its own."""

    def __init__(self, folder: Path) -> None:
        own = samples(0, 40, shape=SHAPE)
        part = own.features_B, own.labels_B
        self.stream = BatchStream(DataSet({"all": part}, *part, 5, 40), seed=1, rank=0)
        self.machine = staged_machine(DECODER, workers=3, shape=SHAPE)
        self.checkpointer = Checkpointer(
            folder / "checkpoint.npz",
            every_s=300,
            replica=Replica(Model(0, None, 0.0, lambda: None)),  # type: ignore[arg-type]
            progress=JobProgress(),
            stream=self.stream,
            machine=self.machine,
        )

    def collect(self, *batches: int) -> None:
        for batch in batches:
            for rank in SENSORS:
                arrived = features(samples(256 * batch, 768, shape=SHAPE), sender=rank)
                added, *_ = self.machine.handle(arrived)
                assert isinstance(added, AddSamples)
                self.stream.extend({added.key: (added.x_B, added.y_B)})


def test_a_resumed_decoder_has_its_features_and_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointing, "MAX_OTHER_BYTES", 2**14)
    trained = Trained(tmp_path)
    for rank in SENSORS:
        trained.machine.handle(MemberJoined(rank))
    trained.collect(0, 1, 2)
    for _ in range(20):  # into the second epoch
        trained.stream.next(100)
    gradient_D = np.zeros(SIZE, np.float32)
    trained.machine.handle(LocalStepDone(1, gradient_D, 100, 1.0))
    trained.checkpointer.save()
    again = Trained(tmp_path)
    assert again.checkpointer.load()
    assert "the data has changed" not in caplog.text
    assert again.stream.state() == trained.stream.state()
    for _ in range(20):
        for found, wanted in zip(again.stream.next(100), trained.stream.next(100), strict=True):
            np.testing.assert_array_equal(found, wanted)
