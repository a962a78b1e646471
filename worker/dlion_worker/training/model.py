"""A Keras model as a function of one flat vector: loss and flat gradient of a batch.

The weights are one NumPy array, `weights_D`, which TensorFlow reads directly (DLPack). Optimizer
and exchange change it in place, without copies. The gradient is a read-only view of the step's
tensor. The training thread calls it; `evaluate` with a snapshot may run in another.

Shape suffixes: B batch, D flat trained weights, S flat floating-point state.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError, ProgramError
from dlion_api.plain_text import error_text, without_escapes
from dlion_api.spec.trainer import Trainer
from dlion_core.lifecycle.reporting import EvaluationResult
from dlion_core.policies.interface import Flat, LocalFeatures
from dlion_worker.training.building import (
    as_float32,
    build_model,
    call_arguments,
    few_targets,
    scaled,
    specs,
    tensors,
    value_count,
    whole_model,
)
from dlion_worker.training.converting import load_weights
from dlion_worker.training.datasets.dataset import DataSet
from dlion_worker.training.framework import tf
from dlion_worker.training.programs.callbacks import WeightsChangedError
from dlion_worker.training.programs.compiled import CompiledMetrics, with_compiled
from dlion_worker.training.programs.program import TrainingProgram, user_code
from dlion_worker.training.scoring import Scoring, Sums
from dlion_worker.training.variables import (
    ModelVariables,
    aligned_zeros,
    all_finite,
    check_length,
    tensor_view,
)

_MIN_EVALUATED, _MAX_EVALUATED = 64, 256
"""Samples of a batch that is evaluated. A larger one takes less CPU per sample, and more memory."""
_EVALUATED_VALUES = 2**20
"""Values of such a batch, at most, if there are more than `_MIN_EVALUATED` samples."""


@dataclass(frozen=True)
class StepResult:
    """Mean loss over the batch and its gradient. `finite`: neither has NaN or infinity."""

    loss: float
    gradient_D: Flat
    finite: bool
    features: LocalFeatures | None = None


@dataclass(frozen=True)
class Snapshot:
    """Weights and state at one moment, independent of later steps."""

    weights_D: Flat
    state: tuple[Any, ...]


class FlatModel:
    """One replica: weights, state and the compiled functions over them.

    The same program and seed give the same initial weights on every worker. Dropout and other
    randomness depends on (seed, rank) and the number of steps.

    Raises: ProgramError where the program does not build or violates its protocol.
    """

    def __init__(
        self,
        program: TrainingProgram,
        *,
        input_shape: Sequence[int],
        class_count: int,
        seed: int,
        rank: int = 0,
        freeze: Sequence[str] = (),
        input_dtype: np.dtype[Any] | type[Any] = np.float32,
        scales_pixels: bool = True,
        target_shape: Sequence[int] | None = (),
        target_dtype: np.dtype[Any] | type[Any] | None = None,
    ) -> None:
        """`class_count`: 0 if the data have targets of `target_shape` (None: several).

        `target_dtype`: int32 for classes and float32 for targets, or that of records.
        `scales_pixels`: the Keras model gets uint8 samples as floats in 0..1.
        """
        self.input_shape, self.class_count = tuple(input_shape), class_count
        self._scales_pixels = scales_pixels
        form = self.input_shape, np.dtype(input_dtype), scales_pixels
        built = build_model(program, class_count, seed, *form)
        self._keras = self._saved = built.keras_model
        self.program = with_compiled(program, self._keras)
        """The program with the loss and the optimizer of `compile()`, if it has none itself."""
        dtype = np.dtype(target_dtype or (np.int32 if class_count else np.float32))
        examples = few_targets(target_shape or (), dtype)
        metrics = CompiledMetrics(self.program, self._keras, examples, built.outputs)
        self._scoring = Scoring(self.program, built, class_count, target_shape, metrics)
        self._variables = ModelVariables(self._keras, freeze)
        self.layout = self._variables.layout
        self.weights_D = aligned_zeros(self.layout.size)
        """The live weights, to be changed in place between steps."""
        self._fixed: list[Any] = []
        self._state: list[Any] = []
        self._read_keras()
        self._become_own(seed, rank)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._compile_lock = threading.Lock()
        self._keras_lock = threading.Lock()

    @classmethod
    def of_data(
        cls, program: TrainingProgram, data: DataSet, trainer: Trainer, *, rank: int = 0
    ) -> Self:
        """The manifest's model, for samples as in the data set. Raises: ProgramError."""
        model = cls(
            program,
            input_shape=data.input_shape,
            class_count=data.class_count,
            seed=trainer.seed,
            rank=rank,
            freeze=trainer.freeze,
            input_dtype=data.input_dtype,
            scales_pixels=data.scales_pixels,
            target_shape=data.target_shape,
            target_dtype=data.held_out_y.dtype,
        )
        model._saved = whole_model(data.encoder, model._keras)
        return model

    def sibling(self, *, seed: int, rank: int) -> FlatModel:
        """Another replica of the same program that shares the compiled functions.

        It starts with this one's weights and has its own statistics and random state from (seed,
        rank). Replicas may step concurrently in threads.
        """
        other = copy.copy(self)
        other.weights_D = aligned_zeros(self.layout.size)
        np.copyto(other.weights_D, self.weights_D)
        other._become_own(seed, rank)  # noqa: SLF001 - same class
        return other

    @property
    def trained_variables(self) -> Sequence[Any]:
        """The Keras variables that are trained, in the layout's order."""
        return self._variables.trained

    # ---- training

    def step(self, x_B: NDArray[Any], y_B: NDArray[Any]) -> StepResult:
        """Loss and gradient of one batch at the current weights, which do not change.

        One compiled function serves any batch size. Moving statistics and generators advance.

        Raises: ProgramError (the model or loss fails), DataError (labels without a class).
        """
        x_B, y_B = self._checked(x_B, y_B)
        function = self._function("train", x_B, y_B)
        loss, gradient_D, self._state = self._run(
            function, self._weights, self._fixed, self._state, x_B, y_B
        )
        gradient: Flat = np.asarray(gradient_D)
        value = float(loss)
        return StepResult(value, gradient, math.isfinite(value) and all_finite(gradient))

    def get_weights(self) -> Flat:
        """A copy of the weights."""
        return self.weights_D.copy()

    def set_weights(self, weights_D: Flat) -> None:
        """Set the weights. Raises: ContractError where the length differs."""
        check_length(weights_D, self.layout)
        np.copyto(self.weights_D, weights_D)

    def get_state(self, snapshot: Snapshot | None = None) -> Flat:
        """Moving statistics as one vector [S] (often empty); averaged like the weights.

        Those of now, or of a snapshot.
        """
        return self._variables.flat_state(self._state if snapshot is None else snapshot.state)

    def set_state(self, state_S: Flat) -> None:
        """Set the moving statistics. Raises: ContractError where the length differs."""
        self._state = self._variables.with_state(self._state, state_S)

    def get_counters(self) -> NDArray[np.int64]:
        """This worker's random generators and counts, only for its own checkpoint."""
        return self._variables.flat_counters(self._state)

    def set_counters(self, counters: NDArray[np.int64]) -> None:
        """Restore the result of `get_counters`."""
        self._state = self._variables.with_counters(self._state, counters)

    # ---- evaluation

    def snapshot(self) -> Snapshot:
        """Current weights (copied) and state; call between steps."""
        weights_D = aligned_zeros(self.layout.size)
        np.copyto(weights_D, self.weights_D)
        return Snapshot(weights_D, tuple(self._state))

    def snapshot_of(self, weights_D: Flat, state_S: Flat) -> Snapshot:
        """A snapshot of these weights and moving statistics (a peer's, an average).

        Raises: ContractError where a length belongs to another model.
        """
        check_length(weights_D, self.layout)
        snapshot = Snapshot(aligned_zeros(self.layout.size), ())
        np.copyto(snapshot.weights_D, weights_D)
        state = self._variables.with_state(self._state, state_S)
        return Snapshot(snapshot.weights_D, tuple(state))

    def evaluate(
        self,
        x: NDArray[Any],
        y: NDArray[Any],
        *,
        snapshot: Snapshot | None = None,
        batch_size: int | None = None,
        between_batches: Callable[[], None] = lambda: None,
    ) -> EvaluationResult:
        """Accuracy and mean loss over samples; with a snapshot, safe beside training.

        `between_batches` is called before each batch and may raise to end the evaluation.
        """
        weights = self._weights if snapshot is None else tensor_view(snapshot.weights_D)
        state = list(self._state if snapshot is None else snapshot.state)
        if batch_size is None:
            fitting = _EVALUATED_VALUES // value_count(x)
            batch_size = max(_MIN_EVALUATED, min(_MAX_EVALUATED, fitting))
        sums: Sums = ()
        metrics, loss_sum = self._scoring.metrics.initial, 0.0
        for start in range(0, len(x), batch_size):
            between_batches()
            x_B, y_B = self._checked(x[start : start + batch_size], y[start : start + batch_size])
            function = self._function("evaluate", x_B, y_B)
            loss, added, metrics = self._run(
                function, weights, self._fixed, state, metrics, x_B, y_B
            )
            loss_sum += float(loss) * len(x_B)
            sums = tuple(map(np.add, sums, added)) if sums else tuple(map(np.asarray, added))
        return self._scoring.result(sums, loss_sum / len(x), len(x), metrics)

    @contextmanager
    def readable(self) -> Iterator[Any]:
        """The Keras model with the weights and statistics of now, to be read by user code.

        Raises: WeightsChangedError afterwards if it has other ones.
        """
        with self._keras_lock:
            self._variables.write(self.weights_D, self._state)
            yield self._keras
            if not self._variables.hold(self.weights_D, self._fixed, self._state):
                raise WeightsChangedError

    # ---- files

    def save_keras(self, path: Path, *, snapshot: Snapshot | None = None) -> None:
        """Write a `.keras` file atomically, also if another worker of the site does meanwhile.

        Raises: OSError (disk full, folder missing), ProgramError (a layer cannot be saved).
        """
        snapshot = snapshot or self.snapshot()
        temporary = path.with_name(f".{path.stem}.partial-{self._rank}.keras")
        with self._keras_lock:
            self._variables.write(snapshot.weights_D, snapshot.state)
            try:
                self._saved.save(temporary)
                temporary.replace(path)
            except (TypeError, ValueError, NotImplementedError) as error:
                raise ProgramError(
                    f"program {self.program.name}: Keras cannot save the model: "
                    f"{error_text(error)}. Give custom layers a get_config()"
                ) from error
            finally:
                temporary.unlink(missing_ok=True)

    def load_keras(self, path: Path) -> None:
        """Load weights and statistics from a `.keras` file of the same architecture.

        A result folder means its first model. Reads only numbers, never code. Raises: DataError.
        """
        counters = self.get_counters()
        load_weights(self._keras, path)
        self._read_keras()
        self.set_counters(counters)

    # ---- inside

    def _become_own(self, seed: int, rank: int) -> None:
        self._rank = rank
        # A tf.Variable would cost an assignment per step: 1.2 ms of CPU for 1.1 M parameters, more
        # than the update.
        self._weights = tensor_view(self.weights_D)
        self._state = self._variables.seeded(self._state, seed, rank)

    def _read_keras(self) -> None:
        self._variables.read_weights(self.weights_D)
        self._fixed = self._variables.read_fixed()
        self._state = self._variables.read_state()

    def _checked(self, x_B: NDArray[Any], y_B: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        if x_B.shape[1:] != self.input_shape or len(x_B) != len(y_B) or len(x_B) == 0:
            raise DataError(
                f"batch: wrong shape (given: x {list(x_B.shape)}, y {list(y_B.shape)}; allowed: "
                f"x {['B', *self.input_shape]}, y with the same B, at least 1)"
            )
        return x_B, y_B.astype(np.int32, copy=False) if self.class_count else y_B

    def _function(self, kind: str, x_B: NDArray[Any], y_B: NDArray[Any]) -> Any:
        """The compiled function for these types; its batch dimension is open."""
        key = (kind, x_B.dtype, y_B.dtype, y_B.shape[1:])
        with self._compile_lock:
            if key not in self._compiled:
                is_training, states = kind == "train", [self._state]
                if not is_training:
                    states = [self._state, self._scoring.metrics.initial]
                body = self._train if is_training else self._evaluate
                with user_code(
                    self.program,
                    f"compiling its step ({kind})",
                    "Use TensorFlow or Keras operations that have a gradient",
                ):
                    self._compiled[key] = tf.function(body, autograph=False).get_concrete_function(
                        tf.TensorSpec([self.layout.size], tf.float32),
                        [tf.TensorSpec(t.shape, t.dtype) for t in self._fixed],
                        *([tf.TensorSpec(t.shape, t.dtype) for t in each] for each in states),
                        specs(x_B),
                        specs(y_B),
                    )
        return self._compiled[key]

    def _run(self, function: Any, *arguments: Any) -> Any:
        *model, x_B, y_B = arguments
        try:
            return function(*model, tensors(x_B), tensors(y_B))
        except tf.errors.ResourceExhaustedError:
            raise
        except tf.errors.OpError as error:
            message = without_escapes(str(error.message))
            raise DataError(self._scoring.rejection(y_B, message)) from error

    def _train(self, weights_D: Any, fixed: Any, state: Any, x_B: Any, y_B: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights_D)
            outputs, after, penalties = self._forward(weights_D, fixed, state, x_B, training=True)
            loss = self._scoring.mean_loss(y_B, outputs) + tf.add_n([tf.zeros([]), *penalties])
        gradient_D = tape.gradient(loss, weights_D)
        if gradient_D is None:
            raise ProgramError(
                f"program {self.program.name}: the loss does not depend on any variable that "
                "trains. Check the loss, and layers that stop gradients"
            )
        return loss, tf.convert_to_tensor(gradient_D), self._variables.hold_frozen(state, after)

    def _evaluate(
        self, weights_D: Any, fixed: Any, state: Any, metrics: Any, x_B: Any, y_B: Any
    ) -> Any:
        outputs, _, _ = self._forward(weights_D, fixed, state, x_B, training=False)
        count, scoring = tf.shape(tf.nest.flatten(x_B)[0])[0], self._scoring
        return (
            scoring.mean_loss(y_B, outputs),
            scoring.sums(y_B, outputs, count),
            scoring.metrics.updated(metrics, y_B, outputs),
        )

    def _forward(
        self, weights_D: Any, fixed: Any, state: Any, x_B: Any, *, training: bool
    ) -> tuple[Any, Any, Any]:
        """Outputs in float32, the next state, and penalties that layers add to the loss."""
        with user_code(self.program, "calling the model", "Correct the model"):
            outputs, after, penalties = self._keras.stateless_call(
                self._variables.assemble(weights_D, fixed),
                state,
                scaled(x_B) if self._scales_pixels else x_B,
                return_losses=True,
                **call_arguments(self._keras, training=training),
            )
        return as_float32(outputs), after, [tf.cast(p, tf.float32) for p in penalties]
