"""Tests of the size of the training set, when no worker has all data.

The sidecar reports the size. Until it does, the size is unknown: as long as the worker waits before
its first step, and for a minute after it. Then each worker counts with the amount of data of this
one. A reported size is used at once.

Left out: how sidecars learn it (tests/unit/core/resource_control/test_resource_controller.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlion_api.protocol.measurements import Directive
from dlion_api.spec import Job, load_job
from dlion_worker.trainer.background.background_tasks import MAX_TOTAL_WAIT_S, BackgroundTasks
from dlion_worker.trainer.background.sidecar_client import SidecarClient
from dlion_worker.training.datasets import BatchStream, DataSet

OWN_SAMPLES = 24


def job(dataset: dict[str, object]) -> Job:
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "cameras"},
            "spec": {
                "sites": [{"name": "plant", "groups": [{"name": "any", "workers": 2}]}],
                "trainer": {
                    "image": "dlion",
                    "program": {"builtin": "digits"},
                    "dataset": dataset,
                    "stop": {"maxEpochs": 3},
                },
            },
        }
    )


OF_ITS_OWN: dict[str, object] = {
    "path": "cameras/{rank}", "format": "npz", "evaluationPath": "held-out",
}  # fmt: skip


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarClient]:
    """A sidecar client without a sidecar; the test inserts its messages."""
    client = SidecarClient(tmp_path / "sidecar.sock")
    yield client
    client.close()


def companions(sidecar: SidecarClient, clock: Clock, dataset: dict[str, object]) -> BackgroundTasks:
    x, y = np.zeros((OWN_SAMPLES, 8, 8, 1), np.float32), np.zeros(OWN_SAMPLES, np.int32)
    data = DataSet({"own": (x, y)}, x, y, class_count=10, training_set_samples=2 * OWN_SAMPLES)
    others: dict[str, Any] = dict.fromkeys(
        ("progress", "peer_selection", "coordination", "credentials")
    )
    stream = BatchStream(data, seed=0, rank=0)
    parts: Any = SimpleNamespace(
        job=job(dataset), stream=stream, sidecar=sidecar, inbox=SimpleNamespace()
    )
    return BackgroundTasks(
        parts, None, data=data, now_s=clock, on_saved=lambda _: None, **others,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_worker_that_waits_before_its_first_step_knows_no_size(sidecar: SidecarClient) -> None:
    clock = Clock()
    known = companions(sidecar, clock, OF_ITS_OWN)
    clock.now_s += 10 * MAX_TOTAL_WAIT_S  # it joins, and pulls a state over a slow link
    assert known.training_set_samples(False) == 0
    assert known.training_set_samples(True) == 0
    clock.now_s += MAX_TOTAL_WAIT_S
    assert known.training_set_samples(True) == 0
    clock.now_s += 1.0
    assert known.training_set_samples(True) == 2 * OWN_SAMPLES
    sidecar._directive = Directive(1, 8, 16, training_set_samples=1024)
    assert known.training_set_samples(True) == 1024


def test_a_reported_size_counts_at_once(sidecar: SidecarClient) -> None:
    known = companions(sidecar, Clock(), OF_ITS_OWN)
    sidecar._directive = Directive(1, 8, 16, training_set_samples=1024)
    assert known.training_set_samples(False) == 1024
    shared_out = companions(sidecar, Clock(), {"name": "digits"})
    assert shared_out.training_set_samples(False) == 2 * OWN_SAMPLES
