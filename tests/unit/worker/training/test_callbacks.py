"""Tests of Keras callbacks.

Callbacks are called as Keras calls them. An iteration is a batch, and a pass over the worker's own
samples is an epoch, also after a restart. Callbacks read the current weights. Callbacks of Keras
that only observe work. A callback that steers training is refused by name with an alternative, at
the start or when it acts. A failure has the user's line.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import ProgramError
from dlion_core.lifecycle.reporting import EvaluationResult
from dlion_worker.training import programs
from dlion_worker.training.framework import keras
from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs.callbacks import REFUSED_CALLBACKS, TrainingCallbacks

callbacks = keras.callbacks
X = np.random.default_rng(5).normal(size=(10, 4)).astype(np.float32)
Y = np.arange(10) % 3
RESULT = EvaluationResult(0.5, 0.25, (), 10, {"mae": 3.0})


class Trained:
    """A model with these callbacks; each step has five of ten samples."""

    def __init__(self, *given: Any, own_samples: int = 0, returned: Any = None) -> None:
        def build(*_: Any) -> Any:
            layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
            return keras.Sequential([keras.Input((4,)), *layers])

        program = programs.TrainingProgram(
            "mine",
            build,
            callbacks=lambda: [*given] if returned is None else returned,
            sources=(Path(__file__),),
        )
        self.own_samples = own_samples
        self.model = FlatModel(program, input_shape=(4,), class_count=3, seed=1)
        self.called = TrainingCallbacks(
            program,
            self.model.readable,
            epoch_samples=lambda: len(X),
            own_samples=lambda: self.own_samples,
        )

    def train(self, steps: int, *, samples: int = 5, loss: float | None = None) -> None:
        self.called.training_begins()
        for _ in range(steps):
            self.called.step_begins()
            result = self.model.step(X[:samples], Y[:samples])
            self.model.weights_D -= np.float32(0.1) * result.gradient_D
            self.own_samples += samples
            self.called.step_ended(self.own_samples if loss is None else loss, samples)
        self.called.training_ended(RESULT)


class CallRecorder(callbacks.Callback):
    """Record every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []


def noting(hook: str) -> Any:
    def call(self: CallRecorder, *arguments: Any) -> None:
        self.calls.append((hook, *arguments))

    return call


for each in (
    "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_train_batch_begin",
    "on_train_batch_end", "on_test_begin", "on_test_end",
):  # fmt: skip
    setattr(CallRecorder, each, noting(each))


def test_hooks_are_called_in_the_order_of_keras() -> None:
    recorder = CallRecorder()
    Trained(recorder).train(3)
    assert recorder.calls == [
        ("on_train_begin", {}),
        ("on_epoch_begin", 0, {}),
        ("on_train_batch_begin", 0, {}),
        ("on_train_batch_end", 0, {"loss": 5.0}),
        ("on_train_batch_begin", 1, {}),
        ("on_train_batch_end", 1, {"loss": 10.0}),
        ("on_epoch_end", 0, {"loss": 7.5}),
        ("on_epoch_begin", 1, {}),
        ("on_train_batch_begin", 0, {}),
        ("on_train_batch_end", 0, {"loss": 15.0}),
        ("on_test_begin", {}),
        ("on_test_end", {"loss": 0.25, "accuracy": 0.5, "mae": 3.0}),
        ("on_train_end", {"loss": 15.0}),
    ]


def test_hooks_name_their_parameters_as_they_like() -> None:
    losses = []
    Trained(
        callbacks.LambdaCallback(
            on_train_begin=lambda _: losses.append(0.0),
            on_train_batch_end=lambda _, found: losses.append(found["loss"]),
            on_epoch_end=lambda _, found: losses.append(found["loss"]),
        )
    ).train(2)
    assert losses == [0.0, 5.0, 10.0, 7.5]


def test_an_unknown_loss_is_not_in_the_logs() -> None:
    recorder = CallRecorder()
    Trained(recorder, callbacks.TerminateOnNaN()).train(2, loss=math.nan)
    assert ("on_train_batch_end", 1, {}) in recorder.calls
    assert ("on_epoch_end", 0, {}) in recorder.calls


def test_a_resumed_worker_continues_in_its_epoch() -> None:
    recorder = CallRecorder()
    trained = Trained(recorder, own_samples=35)
    trained.called.training_begins()
    trained.called.training_ended()
    assert [call[:2] for call in recorder.calls[:2]] == [
        ("on_train_begin", {}),
        ("on_epoch_begin", 3),
    ]
    assert recorder.calls[-1] == ("on_train_end", {})
    assert all(call[0] != "on_test_end" for call in recorder.calls)
    trained.train(1)
    assert ("on_epoch_end", 3, {"loss": 40.0}) in recorder.calls


def test_a_batch_may_end_several_epochs() -> None:
    recorder = CallRecorder()
    trained = Trained(recorder)
    trained.called.training_begins()
    trained.own_samples = 25
    trained.called.step_ended(1.0, 25)
    epochs = [call[:2] for call in recorder.calls if call[0].startswith("on_epoch")]
    assert epochs == [
        ("on_epoch_begin", 0),
        ("on_epoch_end", 0),
        ("on_epoch_begin", 1),
        ("on_epoch_end", 1),
        ("on_epoch_begin", 2),
    ]


def test_a_callback_reads_the_current_weights() -> None:
    """These include its moving statistics, also by the names in older programs."""
    weights: list[Any] = []

    class Reads(callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            weights.append([np.array(each) for each in self.model.get_weights()])

    trained = Trained(Reads())
    trained.train(2)
    assert len(weights) == 2
    flat = np.concatenate([np.ravel(each) for each in weights[1][:4]])
    np.testing.assert_array_equal(flat, trained.model.weights_D)
    np.testing.assert_array_equal(
        np.concatenate([np.ravel(each) for each in weights[1][4:]]), trained.model.get_state()
    )
    assert not np.array_equal(weights[0][0], weights[1][0])


def test_observing_callbacks_of_keras_work(tmp_path: Path) -> None:
    lines: list[str] = []
    history = callbacks.History()
    Trained(
        callbacks.CSVLogger(str(tmp_path / "log.csv")),
        callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: lines.append(f"{epoch} {logs}")),
        callbacks.TerminateOnNaN(),
        history,
    ).train(4)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["epoch"], float(row["loss"])) for row in rows] == [("0", 7.5), ("1", 17.5)]
    assert lines == ["0 {'loss': 7.5}", "1 {'loss': 17.5}"]
    assert history.history["loss"] == [7.5, 17.5]


class Patient(callbacks.EarlyStopping):
    """A subclass, which is treated like its base."""


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (lambda: callbacks.EarlyStopping(), r"EarlyStopping \(EarlyStopping\): trainer\.stop"),
        (lambda: Patient(), r"Patient \(EarlyStopping\): trainer\.stop ends the run"),
        (lambda: callbacks.ModelCheckpoint("x.keras"), "spec.checkpoint saves"),
        (lambda: callbacks.BackupAndRestore("x"), "a worker continues from its own"),
        (lambda: callbacks.TensorBoard(), "TensorBoard files come with each run"),
        (lambda: callbacks.ReduceLROnPlateau(), r"give optimizer\(\) a schedule"),
        (lambda: callbacks.LearningRateScheduler(lambda e: 0.1), r"give optimizer\(\) a schedule"),
        (lambda: callbacks.SwapEMAWeights(), "policies that average"),
        (lambda: callbacks.ProgbarLogger(), "shows the progress of all workers"),
        (lambda: 3, r"must return keras\.callbacks\.Callback objects \(given: int\)"),
        (
            lambda: callbacks.LambdaCallback(on_test_batch_end=lambda *_: None),
            r"on_test_batch_end\(\) is never called.*Use on_test_end",
        ),
    ],
)
def test_a_callback_that_steers_training_is_refused_by_name(given: Any, instead: str) -> None:
    with pytest.raises(ProgramError, match=instead):
        Trained(given())


def test_the_page_names_each_refused_callback() -> None:
    page = (Path(__file__).parents[4] / "docs" / "own-programs.md").read_text(encoding="utf-8")
    (section,) = page.partition("### `callbacks()`")[2].split("\n## ")[:1]
    assert [name for name in REFUSED_CALLBACKS if f"`{name}`" not in section] == []


def test_another_value_than_a_list_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"must return a list \(given: History\)"):
        Trained(returned=callbacks.History())


class Stops(callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = True


class Assigns(callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.layers[0].kernel.assign(np.zeros((4, 3)))


class Fails(callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        raise OSError("no disk today")


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Stops, r"Stops\.on_epoch_end\(\) set stop_training.*trainer\.stop ends"),
        (Assigns, r"Assigns\.on_train_batch_begin\(\) changed the model's weights"),
        (Fails, r"Fails\.on_epoch_begin\(\) failed at .*test_callbacks\.py:\d+: OSError: no disk"),
    ],
)
def test_a_fault_of_a_callback_ends_the_worker(callback: Any, message: str) -> None:
    trained = Trained(callback())
    with pytest.raises(ProgramError, match=message):
        trained.train(3)


def test_a_program_without_callbacks_costs_nothing() -> None:
    """The model is not copied into Keras' variables."""

    def fails() -> Any:
        raise AssertionError

    program = programs.TrainingProgram("mine", lambda *_: None)
    called = TrainingCallbacks(program, fails, epoch_samples=fails, own_samples=fails)
    called.training_begins()
    called.step_begins()
    called.step_ended(1.0, 8)
    called.training_ended(RESULT)
