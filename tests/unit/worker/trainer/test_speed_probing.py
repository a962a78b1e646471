"""Tests of the probe before the first step, in virtual time on a CPU with a CFS quota.

Samples per CPU second are right within a few per cent for any quota and cost, also if the quota
appears meanwhile. The probe ends within its bound plus one step, and on request. Its changes to
model and data are undone.

Left out: the sidecar's use of it (tests/unit/worker/sidecar); real training after it
(tests/local/test_same_as_one_process.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from dlion_api.protocol.measurements import SpeedProbe
from dlion_core.resource_control.capacity import CapacityEstimator
from dlion_worker.trainer.background.quota_watch import QuotaWatch
from dlion_worker.trainer.background.speed_probing import (
    FIRST_SAMPLES,
    MAX_PROBE_S,
    SpeedProber,
    preserved_state,
)
from quota_cpu import QuotaCpu

MAX_SAMPLES = 600


class Group:
    """The control group of that CPU, as the trainer reads it; its quota may appear later."""

    def __init__(self, cpu: QuotaCpu, from_s: float = 0.0) -> None:
        self.cpu, self.from_s = cpu, from_s

    def quota_cores(self) -> float | None:
        return self.cpu.quota_cores if self.cpu.now_s >= self.from_s else None

    def throttled_s(self) -> float:
        return self.cpu.throttled_s


class Trainer:
    """Steps on that CPU, each with a fixed cost, and memory allocation for larger batches."""

    def __init__(self, quota_cores: float, cost_s: float, *, from_s: float = 0.0) -> None:
        self.cpu = QuotaCpu(1.0 if from_s else quota_cores)
        self.quota_cores, self.cost_s, self.from_s = quota_cores, cost_s, from_s
        self.batches: list[int] = []

    def step(self, samples: int) -> None:
        if self.cpu.now_s >= self.from_s:
            self.cpu.quota_cores = self.quota_cores
        larger = samples > max(self.batches, default=FIRST_SAMPLES)
        self.batches.append(samples)
        self.cpu.burn(self.cost_s * samples * (2.0 if larger else 1.0))

    def probe(self, *, stop_after: int = 10**6) -> SpeedProbe | None:
        group = Group(self.cpu, self.from_s)
        return SpeedProber(
            self.step,
            max_samples=MAX_SAMPLES,
            quota=QuotaWatch(group, clock=lambda: self.cpu.now_s),  # type: ignore[arg-type]
            other_cpu_s=lambda: 0.0,
            stopped=lambda: len(self.batches) >= stop_after,
            wall_s=lambda: self.cpu.now_s,
            cpu_s=lambda: self.cpu.cpu_s,
        ).run()


@pytest.mark.parametrize("from_s", [0.0, 0.25])
@pytest.mark.parametrize("cost_s", [0.0005, 0.005, 0.03])
@pytest.mark.parametrize("quota_cores", [0.1, 0.2, 0.4, 0.8])
def test_the_probe_gives_the_capacity_at_that_quota(
    quota_cores: float, cost_s: float, from_s: float
) -> None:
    trainer = Trainer(quota_cores, cost_s, from_s=from_s)
    probe = trainer.probe()
    assert probe is not None
    assert probe.quota_cores == quota_cores
    estimator = CapacityEstimator()
    estimator.add_probe(probe)
    estimate = estimator.estimate()
    assert estimate is not None
    assert estimate.samples_per_s == pytest.approx(quota_cores / cost_s, rel=0.05)
    longest_s = 2 * max(trainer.batches) * cost_s / quota_cores
    assert trainer.cpu.now_s < MAX_PROBE_S + longest_s
    assert max(trainer.batches) == probe.largest_batch <= MAX_SAMPLES


def test_for_a_very_weak_worker_only_one_small_batch_is_measured() -> None:
    trainer = Trainer(0.02, 0.05)
    probe = trainer.probe()
    assert probe is not None
    assert trainer.batches == [FIRST_SAMPLES]
    assert probe.samples == FIRST_SAMPLES


@pytest.mark.parametrize("stop_after", [0, 1, 4])
def test_a_stop_ends_the_probe_at_once(stop_after: int) -> None:
    trainer = Trainer(0.4, 0.002)
    probe = trainer.probe(stop_after=stop_after)
    assert len(trainer.batches) == stop_after
    assert (probe is None) == (stop_after < 1)


class Model:
    """State that each step changes."""

    def __init__(self) -> None:
        self.state, self.counters = np.zeros(2, np.float32), np.zeros(1, np.int64)

    def get_state(self) -> np.ndarray:
        return self.state.copy()

    def get_counters(self) -> np.ndarray:
        return self.counters.copy()

    def set_state(self, state: np.ndarray) -> None:
        self.state = state

    def set_counters(self, counters: np.ndarray) -> None:
        self.counters = counters


class Stream:
    """A position that each batch moves."""

    def __init__(self) -> None:
        self.position = 3

    def state(self) -> dict[str, int]:
        return {"position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("fails", [False, True])
def test_model_and_data_are_restored_also_after_a_failure(fails: bool) -> None:
    model, stream = Model(), Stream()
    try:
        with preserved_state(model, stream):  # type: ignore[arg-type]
            model.state += 1
            model.counters += 1
            stream.position += 5
            if fails:
                raise RuntimeError("the step failed")
    except RuntimeError:
        assert fails
    assert model.state.tolist() == [0, 0]
    assert model.counters.tolist() == [0]
    assert stream.position == 3
