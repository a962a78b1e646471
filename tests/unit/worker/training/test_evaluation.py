"""Tests of evaluation beside training.

An evaluation uses the weights at its start while training continues. Of waiting evaluations the
newest is done. A failure is reported, and the next one is done. Closing is quick. A sketch keeps
distances. A hash distinguishes any two sets of weights.

Left out: the slow-down of steps by an evaluation.
"""

from __future__ import annotations

import threading
from concurrent.futures import wait

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_core.lifecycle.reporting import EvaluatedSnapshot
from dlion_worker.training.evaluation import Evaluator, sketch, weights_hash
from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs import builtin
from example_counts import examples


@pytest.fixture(scope="module")
def model() -> FlatModel:
    return FlatModel(builtin("digits"), input_shape=(8, 8, 1), class_count=10, seed=1)


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (120, 8, 8, 1), dtype=np.uint8)
    return x, generator.integers(0, 10, 120).astype(np.int32)


class _Evaluations:
    """An evaluator whose results wait until the test releases them."""

    def __init__(self, model: FlatModel, samples: tuple, **options: object) -> None:
        self.results: list[EvaluatedSnapshot] = []
        self.errors: list[Exception] = []
        self.gate = threading.Event()
        self.entered = threading.Event()
        settings = {"seed": 3, "max_samples": 50, **options}
        self.evaluator = Evaluator(
            model, *samples, on_result=self._keep, on_error=self.errors.append, **settings
        )

    def _keep(self, result: EvaluatedSnapshot) -> None:
        self.results.append(result)
        self.entered.set()
        assert self.gate.wait(30)

    def wait_idle(self, timeout_s: float) -> bool:
        """Return whether its only thread has no work by then."""
        return bool(wait([self.evaluator._thread.submit(lambda: None)], timeout_s).done)


def test_results_use_the_weights_at_the_call(model: FlatModel, samples) -> None:
    runs = _Evaluations(model, samples)
    runs.gate.set()
    saved_D = model.get_weights()
    whole = runs.evaluator.evaluate_all("now")
    runs.evaluator.submit("now")
    model.weights_D[:] = 0  # training continues
    assert runs.wait_idle(30)
    model.set_weights(saved_D)
    (result,) = runs.results
    assert result.tag == "now"
    assert result.evaluation.samples == 50
    assert whole.evaluation.samples == 120
    assert result.sketch == whole.sketch
    assert result.weights_norm == pytest.approx(np.linalg.norm(saved_D))
    chosen = np.sort(np.random.default_rng([3, 7]).permutation(120)[:50])
    expected = model.evaluate(samples[0][chosen], samples[1][chosen])
    assert result.evaluation == expected
    runs.evaluator.close()


def test_only_the_newest_waiting_snapshot_is_evaluated(model: FlatModel, samples) -> None:
    runs = _Evaluations(model, samples)
    runs.evaluator.submit(1)
    assert runs.entered.wait(30)
    for tag in (2, 3, 4):
        runs.evaluator.submit(tag)
    assert not runs.wait_idle(0)
    runs.gate.set()
    assert runs.wait_idle(30)
    assert [r.tag for r in runs.results] == [1, 4]
    runs.evaluator.close()


def test_a_failed_evaluation_is_reported_and_the_next_one_works(model: FlatModel, samples) -> None:
    runs = _Evaluations(model, samples)
    runs.gate.set()
    keep, runs.evaluator._on_result = runs.evaluator._on_result, _raise
    runs.evaluator.submit(1)
    assert runs.wait_idle(30)
    runs.evaluator._on_result = keep
    runs.evaluator.submit(2)
    assert runs.wait_idle(30)
    assert [str(e) for e in runs.errors] == ["disk full"]
    assert [r.tag for r in runs.results] == [2]
    runs.evaluator.close()


def _raise(_: EvaluatedSnapshot) -> None:
    raise OSError("disk full")


def test_closing_drops_waiting_evaluations(model: FlatModel, samples) -> None:
    runs = _Evaluations(model, samples)
    runs.evaluator.submit(1)
    assert runs.entered.wait(30)
    runs.evaluator.submit(2)
    threading.Timer(0.05, runs.gate.set).start()
    runs.evaluator.close()
    assert [r.tag for r in runs.results] == [1]
    assert not runs.errors
    assert runs.evaluator.evaluate_all("end").evaluation.samples == 120


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 1000), size=st.sampled_from([1_000, 70_000]))
def test_a_sketch_keeps_distances(seed: int, size: int) -> None:
    generator = np.random.default_rng(seed)
    a, b = generator.normal(size=(2, size)).astype(np.float32)
    distance = np.linalg.norm(a - b)
    assert np.linalg.norm(sketch(a, seed) - sketch(b, seed)) == pytest.approx(distance, rel=0.25)


def test_sketches_of_one_seed_add_up() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 500)).astype(np.float32)
    np.testing.assert_allclose(sketch(a + b, 5), sketch(a, 5) + sketch(b, 5), atol=1e-4)
    assert not np.allclose(sketch(a, 5), sketch(a, 6))
    assert sketch(a, 5, width=64).shape == (64,)


def test_a_hash_shows_any_difference() -> None:
    weights_D = np.linspace(0, 1, 1000, dtype=np.float32)
    other_D = weights_D.copy()
    assert weights_hash(weights_D) == weights_hash(other_D)
    other_D[500] = np.nextafter(other_D[500], np.float32(2))
    assert weights_hash(weights_D) != weights_hash(other_D)


def test_equal_weights_are_evaluated_once(model: FlatModel, samples, monkeypatch) -> None:
    runs, calls = _Evaluations(model, samples), []
    evaluate = model.evaluate
    monkeypatch.setattr(
        model, "evaluate", lambda *parts, **named: (calls.append(1), evaluate(*parts, **named))[1]
    )
    snapshot = model.snapshot()
    own = runs.evaluator.evaluate_subset(0, snapshot=snapshot)
    peers = runs.evaluator.evaluate_subset(1, snapshot=snapshot)
    assert (own.tag, peers.tag, len(calls)) == (0, 1, 1)
    assert (peers.evaluation, peers.sketch) == (own.evaluation, own.sketch)
    assert runs.evaluator.evaluate_all(2).evaluation.samples == 120  # not that of the subset
    model.weights_D[0] += 1
    other = runs.evaluator.evaluate_subset(3, snapshot=model.snapshot())
    model.weights_D[0] -= 1
    assert len(calls) == 3
    assert other.sketch != own.sketch
    runs.evaluator.close()


def test_the_final_evaluation_can_be_ended_between_batches(model: FlatModel, samples) -> None:
    x, y = (np.tile(part, (4, *[1] * (part.ndim - 1))) for part in samples)
    runs, batches = _Evaluations(model, (x, y)), []

    def end_at_the_second() -> None:
        batches.append(1)
        if len(batches) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        runs.evaluator.evaluate_all("end", between_batches=end_at_the_second)
    assert runs.evaluator.evaluate_all("end").evaluation.samples == 480
    runs.evaluator.close()
