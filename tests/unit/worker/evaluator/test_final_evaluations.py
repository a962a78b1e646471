"""Tests of final evaluations by the evaluator.

The evaluator answers a trainer's request, although either process dies in between. Equal weights
are evaluated once, also if the models have other random numbers. A trainer evaluates itself if the
evaluator is absent or has failed, or the disk is full. It stops waiting when it must end.

Left out: real processes (tests/local/test_companions.py).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dlion_core.lifecycle.reporting import EvaluationResult
from dlion_worker.evaluator import final_evaluations
from dlion_worker.evaluator.final_evaluations import (
    FinalEvaluations,
    answer_requests,
    ask_evaluator,
    present,
)
from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs import builtin

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

from concurrent.futures import ThreadPoolExecutor

WEIGHTS_D, STATE_S = np.arange(5, dtype=np.float32), np.zeros(2, np.float32)
RESULT = EvaluationResult(accuracy=0.1 + 0.2, loss=1 / 3, class_accuracy=(0.5, 0.0), samples=7)


class Trainers:
    """Threads that send requests, each as a separate trainer."""

    def __init__(self, folder: Path) -> None:
        self._asked = FinalEvaluations(folder)
        self._threads = ThreadPoolExecutor(4)
        self.polls = threading.Semaphore(0)

    def ask(self, key: str, weights_D: np.ndarray = WEIGHTS_D) -> Future[EvaluationResult | None]:
        return self._threads.submit(
            self._asked.evaluate, key, weights_D, STATE_S, between_polls=self.polls.release
        )

    def wait_until_asked(self, times: int) -> None:
        for _ in range(times):
            assert self.polls.acquire(timeout=30)


@pytest.fixture
def trainers(tmp_path: Path) -> Trainers:
    return Trainers(tmp_path)


def test_equal_weights_are_evaluated_once_for_all_trainers(
    tmp_path: Path, trainers: Trainers
) -> None:
    evaluated: list[tuple[np.ndarray, np.ndarray]] = []

    def evaluate(*arrays: np.ndarray) -> EvaluationResult:
        evaluated.append(arrays)
        return RESULT

    with present(tmp_path):
        requests = [trainers.ask("aa"), trainers.ask("aa"), trainers.ask("bb", WEIGHTS_D + 1)]
        until_s = time.monotonic() + 30
        while not all(one.done() for one in requests) and time.monotonic() < until_s:
            answer_requests(tmp_path, evaluate)
        assert [one.result(0) for one in requests] == [RESULT] * 3
        answer_requests(tmp_path, evaluate)
    assert sorted(float(weights_D[0]) for weights_D, _ in evaluated) == [0.0, 1.0]
    np.testing.assert_array_equal(evaluated[0][1], STATE_S)
    assert not list(tmp_path.glob("*.final"))


def test_equal_weights_of_models_with_dropout_are_evaluated_once(
    tmp_path: Path, trainers: Trainers
) -> None:
    model = FlatModel(builtin("cipher"), input_shape=(4, 4, 1), class_count=2, seed=1)
    peer, evaluated = model.sibling(seed=1, rank=1), []
    assert not np.array_equal(peer.get_counters(), model.get_counters()), "random generators"

    def ask(one: FlatModel) -> EvaluationResult | None:
        check = trainers.polls.release
        return ask_evaluator(str(tmp_path), one, one.snapshot(), check=check)

    with present(tmp_path), ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, model)
        trainers.wait_until_asked(1)
        answer_requests(tmp_path, lambda *arrays: (evaluated.append(arrays), RESULT)[1])
        assert (asking.result(30), ask(peer)) == (RESULT, RESULT)
    assert len(evaluated) == 1


def test_a_new_evaluator_answers_the_requests_to_the_earlier_one(
    tmp_path: Path, trainers: Trainers
) -> None:
    def killed(*_: np.ndarray) -> EvaluationResult:
        raise KeyboardInterrupt

    with present(tmp_path):
        request = trainers.ask("aa")
        trainers.wait_until_asked(1)
        with pytest.raises(KeyboardInterrupt):
            answer_requests(tmp_path, killed)
    with present(tmp_path):
        answer_requests(tmp_path, lambda *_: RESULT)
        assert request.result(30) == RESULT


def test_a_trainer_evaluates_itself_if_the_evaluator_has_failed(
    tmp_path: Path, trainers: Trainers
) -> None:
    with present(tmp_path):
        request = trainers.ask("aa")
        trainers.wait_until_asked(1)
        answer_requests(tmp_path, lambda *_: None)
        assert request.result(30) is None


def test_a_trainer_evaluates_itself_if_the_evaluators_disk_is_full(
    tmp_path: Path, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(final_evaluations, "write_atomically", full)
    with present(tmp_path):
        request = trainers.ask("aa")
        trainers.wait_until_asked(1)
        answer_requests(tmp_path, lambda *_: RESULT)
        assert request.result(30) is None


def test_a_trainer_evaluates_itself_if_there_is_no_evaluator(
    tmp_path: Path, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_evaluations, "MAX_AWAY_S", 0.2)
    assert trainers.ask("aa").result(30) is None
    with present(tmp_path):
        pass
    assert trainers.ask("bb").result(30) is None
    with present(tmp_path):
        request = trainers.ask("cc")
        trainers.wait_until_asked(10)
        assert not request.done(), "a running evaluator is awaited"
        answer_requests(tmp_path, lambda *_: RESULT)
        assert request.result(30) == RESULT


def test_a_trainer_evaluates_itself_if_it_cannot_send_a_request(tmp_path: Path) -> None:
    evaluations = FinalEvaluations(tmp_path / "gone")
    assert evaluations.evaluate("aa", WEIGHTS_D, STATE_S, between_polls=lambda: None) is None


def test_a_wait_ends_when_the_trainer_must_end(tmp_path: Path) -> None:
    def end() -> None:
        raise InterruptedError

    with present(tmp_path), pytest.raises(InterruptedError):
        FinalEvaluations(tmp_path).evaluate("aa", WEIGHTS_D, STATE_S, between_polls=end)
