"""Calls the Keras callbacks that a program's `callbacks()` returns.

They watch the training of one worker: they may read the model, and must not steer it. What steers
training in Keras has a field of the manifest here, since all workers must do the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dlion_api.errors import ProgramError
from dlion_core.lifecycle.reporting import EvaluationResult
from dlion_worker.training.framework import keras
from dlion_worker.training.programs.program import TrainingProgram, user_code

REFUSED_CALLBACKS = {
    "EarlyStopping": "trainer.stop ends the run of all workers",
    "ModelCheckpoint": "spec.checkpoint saves checkpoints, and each site keeps its best model",
    "OrbaxCheckpoint": "spec.checkpoint saves checkpoints, and each site keeps its best model",
    "BackupAndRestore": "spec.checkpoint saves checkpoints, and a worker continues from its own",
    "TensorBoard": "TensorBoard files come with each run",
    "ReduceLROnPlateau": "give optimizer() a schedule (trainer.optimizer.name: program)",
    "LearningRateScheduler": "give optimizer() a schedule (trainer.optimizer.name: program)",
    "SwapEMAWeights": "policies that average the workers' weights are in docs/policies.md",
    "ProgbarLogger": "`dlion run` shows the progress of all workers",
}
"""Callbacks of Keras that are refused, each with what to use."""

_TRAIN_BATCH = ("on_train_batch_begin", "on_train_batch_end")
_ALIASES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
_HOOKS = (
    "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", *_TRAIN_BATCH,
    "on_test_begin", "on_test_end",
)  # fmt: skip
_NEVER_CALLED = ("on_test_batch_begin", "on_test_batch_end")

_ADVICE = "Correct the callback, or remove it from callbacks()"


class TrainingCallbacks:
    """The callbacks of one process of a worker; none if the program has no `callbacks()`.

    A batch is one iteration, and an epoch a pass over this worker's own samples. All methods raise
    ProgramError: a callback failed, changed weights, or asked to stop.
    """

    def __init__(
        self,
        program: TrainingProgram,
        readable: Callable[[], AbstractContextManager[Any]],
        *,
        epoch_samples: Callable[[], int],
        own_samples: Callable[[], int],
    ) -> None:
        """`readable` gives the Keras model with the weights of now, and raises ProgramError if they
        have changed meanwhile. `epoch_samples`: of this worker, now; `own_samples`: that it has
        trained on."""
        self._program, self._readable = program, readable
        self._epoch_samples, self._own_samples = epoch_samples, own_samples
        self._epoch = self._batch = self._epoch_end = 0
        self._loss_sum, self._counted = 0.0, 0
        self._callbacks = new_callbacks(program)
        self._called = {
            hook: [each for each in self._callbacks if _has_own(each, hook)] for hook in _HOOKS
        }
        if self._callbacks:
            with readable() as model:
                model.stop_training = False
                for each in self._callbacks:
                    with user_code(program, f"{type(each).__name__}.set_model()", _ADVICE):
                        each.set_params({"verbose": 0, "epochs": None, "steps": None})
                        each.set_model(model)

    def training_begins(self) -> None:
        if self._callbacks:
            samples = max(1, self._epoch_samples())
            self._epoch = self._own_samples() // samples
            self._call("on_train_begin")
            self._begin_epoch(self._epoch * samples)

    def step_begins(self) -> None:
        if self._called["on_train_batch_begin"]:
            self._call("on_train_batch_begin", self._batch)

    def step_ended(self, loss: float, samples: int) -> None:
        """After the update of a local batch of `samples`, whose mean loss this is.

        NaN: it is not known, as with `trainer.privacy`.
        """
        if not self._callbacks:
            return
        logs = {}
        if not math.isnan(loss):
            logs["loss"] = loss
            self._loss_sum += loss * samples
            self._counted += samples
        self._call("on_train_batch_end", self._batch, logs=logs)
        self._batch += 1
        while self._own_samples() >= self._epoch_end:
            self._call("on_epoch_end", self._epoch, logs=self._epoch_logs())
            self._epoch += 1
            self._begin_epoch(self._epoch_end)

    def training_ended(self, found: EvaluationResult | None = None) -> None:
        """At the end of this process's training. `found`: for this replica, on all held-out
        samples, if the run is over."""
        if found is not None:
            figures = {"loss": found.loss, "accuracy": found.accuracy, **found.metrics}
            self._call("on_test_begin")
            self._call("on_test_end", logs=figures)
        self._call("on_train_end", logs=self._epoch_logs())

    def _begin_epoch(self, begins_at: int) -> None:
        self._epoch_end = begins_at + max(1, self._epoch_samples())
        self._batch, self._loss_sum, self._counted = 0, 0.0, 0
        self._call("on_epoch_begin", self._epoch)

    def _epoch_logs(self) -> dict[str, float]:
        return {"loss": self._loss_sum / self._counted} if self._counted else {}

    def _call(self, hook: str, *arguments: int, logs: Mapping[str, float] | None = None) -> None:
        for each in self._called[hook]:
            name = f"{type(each).__name__}.{hook}()"
            with user_code(self._program, name, _ADVICE):
                try:
                    with self._readable() as model:
                        getattr(each, hook)(*arguments, dict(logs or {}))
                        is_stopping = model.stop_training
                        model.stop_training = False
                except WeightsChangedError as error:
                    raise ProgramError(f"program {self._program.name}: {name} {error}") from error
            if is_stopping:
                raise ProgramError(
                    f"program {self._program.name}: {name} set stop_training, which would stop one "
                    f"worker of several. {REFUSED_CALLBACKS['EarlyStopping']}"
                )


class WeightsChangedError(Exception):
    """User code that may only read the model has changed its weights."""

    def __init__(self) -> None:
        super().__init__(
            "changed the model's weights, which the workers exchange. Callbacks may only read "
            "them. What changes updates belongs in optimizer(), constraints in loss(y_true, y_pred)"
        )


def new_callbacks(program: TrainingProgram) -> Sequence[Any]:
    """What `callbacks()` returns; none without it. Raises: ProgramError where it is refused."""
    if program.callbacks is None:
        return ()
    with user_code(program, "callbacks()", "It takes nothing and returns a list of callbacks"):
        given = program.callbacks()
    what = f"program {program.name}: callbacks()"
    if not isinstance(given, list | tuple):
        raise ProgramError(f"{what} must return a list (given: {type(given).__name__})")
    for each in given:
        if not isinstance(each, keras.callbacks.Callback):
            raise ProgramError(
                f"{what} must return keras.callbacks.Callback objects (given: "
                f"{type(each).__name__})"
            )
        for name, instead in REFUSED_CALLBACKS.items():
            kind = getattr(keras.callbacks, name, None)  # other versions of Keras may lack one
            if kind is not None and isinstance(each, kind):
                raise ProgramError(f"{what} may not have {type(each).__name__} ({name}): {instead}")
        if unused := [hook for hook in _NEVER_CALLED if _has_own(each, hook)]:
            raise ProgramError(
                f"{what}: {type(each).__name__}.{unused[0]}() is never called, as evaluations run "
                "beside training. Use on_test_end()"
            )
    return given


def _has_own(callback: Any, hook: str) -> bool:
    """Whether the callback does something there, by its class or by itself."""
    names = [hook, *([_ALIASES[hook]] if hook in _ALIASES else [])]
    return any(
        name in vars(callback)
        or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name)
        for name in names
    )
