"""A Keras optimizer of the user's program, on the flat weights.

It may be any that changes each weight by that weight's own gradients, as all do but those that use
norms of layers (LAMB, Muon, Adafactor). A learning-rate schedule counts the worker's own updates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlion_api.errors import ContractError, ProgramError
from dlion_api.spec import Optimizer
from dlion_core.policies.interface import Flat, Value
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.model import FlatModel
from dlion_worker.training.optimizer import EXACT, FlatOptimizer
from dlion_worker.training.programs.program import TrainingProgram, user_code

_ADVICE = "Give a keras.optimizers.Optimizer"

_REFUSED = (
    "clipnorm",
    "global_clipnorm",
    "gradient_accumulation_steps",
    "use_ema",
)
"""Attributes of Keras optimizers that depend on layers or on more than one step."""


class KerasOptimizer:
    """A program's `optimizer()` or that of `compile()`, with the interface of `FlatOptimizer`.

    `variables`: those of the flat weights, for `exclude_from_weight_decay()`; none: refused.

    Raises: ProgramError if that fails, or is not an optimizer of single weights.
    """

    def __init__(
        self,
        program: TrainingProgram,
        spec: Optimizer,
        size: int,
        variables: Sequence[Any] = (),
    ) -> None:
        self._spec = spec
        self._size = size
        self._keras, self._schedule = _made(program, variables)
        self._program = program
        with user_code(program, program.optimizer_name, _ADVICE):
            _check_single_weights(program)
            self._weights = keras.Variable(tf.zeros([size]))
            self._keras.build([self._weights])
            self._update = tf.function(self._apply, autograph=False).get_concrete_function(
                tf.TensorSpec([size], tf.float32), tf.TensorSpec([], tf.float32)
            )
        own = (self._keras.iterations, self._keras._learning_rate)  # noqa: SLF001 - as set below
        self._rate()  # a schedule that fails does so now
        self._moments = [each for each in self._keras.variables if not any(each is o for o in own)]

    def apply(self, weights_D: Flat, gradient_D: Flat, learning_rate: float) -> float:
        """Update `weights_D` once, in place; return the learning rate.

        It is the program's, multiplied as the manifest's has been. The gradient is only read.
        """
        if weights_D.shape != (self._size,) or gradient_D.shape != (self._size,):
            raise ContractError(
                f"optimizer: wrong length (given: weights {list(weights_D.shape)}, gradient "
                f"{list(gradient_D.shape)}; allowed: [{self._size}])"
            )
        self._weights.assign(weights_D)
        rate = self._rate() * learning_rate / self._spec.learning_rate
        self._update(tf.constant(gradient_D), tf.constant(rate, tf.float32))
        np.copyto(weights_D, self._weights.numpy())
        return rate

    def state(self) -> dict[str, Value]:
        """Moments and step count, for a checkpoint."""
        moments = {str(i): np.asarray(each) for i, each in enumerate(self._moments)}
        return {"steps": self._steps, **moments}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore the result of `state`. Raises: ContractError where it is another optimizer's."""
        expected = {"steps", *map(str, range(len(self._moments)))}
        values = [np.asarray(state.get(str(i))) for i in range(len(self._moments))]
        shapes = [tuple(each.shape) for each in self._moments]
        if set(state) != expected or [value.shape for value in values] != shapes:
            raise ContractError(
                f"optimizer state: given {sorted(state)}; allowed: {sorted(expected)}, of shapes "
                f"{shapes}. It was saved by another optimizer"
            )
        self._assign(values, int(np.asarray(state["steps"])))

    def resting_D(self, weights_D: Flat) -> Flat:  # noqa: N802 - the shape's suffix
        """Where the weights would settle without gradients: unknown, so where they are."""
        return weights_D.copy()

    def flat_state(self) -> Flat:
        """Moments and step count as one vector, for a peer that adopts this state."""
        moments = [np.asarray(each, np.float32).ravel() for each in self._moments]
        return np.concatenate([*moments, np.array(divmod(self._steps, EXACT), np.float32)])

    def restore_flat(self, state_M: Flat) -> None:
        """Restore a peer's `flat_state`. Raises: ContractError where the length differs."""
        sizes = [int(np.prod(each.shape, dtype=np.int64)) for each in self._moments]
        if state_M.shape != (sum(sizes) + 2,):
            raise ContractError(
                f"optimizer state: wrong length (given: {list(state_M.shape)}; allowed: "
                f"[{sum(sizes) + 2}]). The peer runs another optimizer or model"
            )
        parts = np.split(state_M[:-2], np.cumsum(sizes)[:-1]) if sizes else []
        values = [p.reshape(each.shape) for p, each in zip(parts, self._moments, strict=True)]
        self._assign(values, max(0, int(state_M[-2])) * EXACT + max(0, int(state_M[-1])))

    @property
    def _steps(self) -> int:
        return int(self._keras.iterations.numpy())

    def _rate(self) -> float:
        with user_code(
            self._program, f"the learning rate of {self._program.optimizer_name}", _ADVICE
        ):
            if isinstance(self._schedule, keras.optimizers.schedules.LearningRateSchedule):
                return float(self._schedule(self._steps))
            return float(self._schedule() if callable(self._schedule) else self._schedule)

    def _assign(self, values: list[Any], steps: int) -> None:
        for moment, value in zip(self._moments, values, strict=True):
            moment.assign(value)
        self._keras.iterations.assign(steps)

    def _apply(self, gradient_D: Any, rate: Any) -> None:
        self._keras.learning_rate.assign(rate)
        self._keras.apply([gradient_D], [self._weights])


def _made(program: TrainingProgram, variables: Sequence[Any] | None = None) -> tuple[Any, Any]:
    """A new optimizer with a rate that can be set, and the program's rate or schedule.

    `variables`: those of the flat weights; None: all of its weights decay.
    """
    if program.optimizer is None:
        raise ProgramError(
            f"program {program.name}: trainer.optimizer.name is program, but it has no optimizer() "
            "and does not compile() its model"
        )
    with user_code(program, program.optimizer_name, _ADVICE):
        given = program.optimizer()
    what = f"program {program.name}: {program.optimizer_name}"
    if isinstance(given, keras.optimizers.LossScaleOptimizer):  # compile() makes one by itself
        raise ProgramError(
            f"{what} may not scale the loss. Use the policy mixed_bfloat16 in place of "
            "mixed_float16, without a LossScaleOptimizer"
        )
    if not isinstance(given, keras.optimizers.Optimizer):
        kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        advice = f". Return {given.__name__}(), an object of it" if isinstance(given, type) else ""
        raise ProgramError(f"{what} must be a keras.optimizers.Optimizer (given: {kind}){advice}")
    if refused := [name for name in _REFUSED if getattr(given, name, None)]:
        raise ProgramError(
            f"{what} may not use {refused[0]}: all weights are updated as one vector, "
            "at each step. Remove it"
        )
    with user_code(program, program.optimizer_name, "Give custom optimizers a get_config()"):
        rate = given._learning_rate  # noqa: SLF001 - `learning_rate` is the schedule's value
        given._learning_rate = None  # noqa: SLF001 - Keras cannot copy a function
        try:
            config = given.get_config()
        finally:
            given._learning_rate = rate  # noqa: SLF001 - the program may return it again
        made = type(given).from_config({**config, "learning_rate": 1.0})
    if variables is not None and made.weight_decay is not None:
        _exclude_from_decay(made, given, variables, what)
    return made, rate if callable(rate) else float(rate)


def _exclude_from_decay(made: Any, given: Any, variables: Sequence[Any], what: str) -> None:
    """Let `made` decay only weights of variables that `exclude_from_weight_decay()` leaves.

    Keras' own method would look at the one vector, whose name is not that of a layer's variable.
    """
    attributes = "_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"
    if not any(getattr(given, each, None) for each in attributes):
        return
    if not variables:
        raise ProgramError(
            f"{what} may not use exclude_from_weight_decay(), which a saved model does not keep. "
            "Remove it, or write a program with optimizer()"
        )
    # As Keras asks: by the backend's variable, whose name has those of its layers.
    values = [each.value for each in variables]
    listed = given._exclude_from_weight_decay  # noqa: SLF001
    if listed and listed.isdisjoint(map(given._var_key, values)):  # noqa: SLF001
        raise ProgramError(
            f"{what}: no variable of exclude_from_weight_decay(var_list) is a trained one of the "
            "model. Give var_names"
        )
    decays = [given._use_weight_decay(each) for each in values]  # noqa: SLF001
    sizes = [int(np.prod(each.shape, dtype=np.int64)) for each in variables]
    decaying_D = tf.constant(np.repeat(np.array(decays, np.float32), sizes))

    def decay(flat: Sequence[Any]) -> None:
        weights = flat[0]
        weights.assign(weights - weights * decaying_D * made.weight_decay * made.learning_rate)

    made._apply_weight_decay = decay  # noqa: SLF001 - no method of Keras takes a mask


def _check_single_weights(program: TrainingProgram) -> None:
    """Check that two matrices are updated as one vector of both is."""
    rng = np.random.default_rng(1)
    start = rng.normal(size=8).astype(np.float32)
    gradients = (rng.normal(size=(3, 8)) * np.repeat([1.0, 10.0], 4)).astype(np.float32)
    found = []
    for shape in ((1, 8), (2, 2, 2)):
        optimizer, _ = _made(program)
        optimizer.learning_rate = 0.1
        weights = [keras.Variable(part) for part in start.reshape(shape)]
        optimizer.build(weights)
        for gradient in gradients:
            optimizer.apply([tf.constant(part) for part in gradient.reshape(shape)], weights)
        found.append(np.ravel([each.numpy() for each in weights]))
    if not np.allclose(found[0], found[1], rtol=1e-4, atol=1e-6):
        raise ProgramError(
            f"program {program.name}: the optimizer uses norms or shapes of layers, and DLion "
            "updates all weights as one vector. Use another, for example keras.optimizers.AdamW"
        )


ModelOptimizer = FlatOptimizer | KerasOptimizer


def make_optimizer(model: FlatModel, spec: Optimizer) -> ModelOptimizer:
    """The optimizer that the manifest names. Raises: ProgramError."""
    if spec.name == "program":
        variables = model.trained_variables
        return KerasOptimizer(model.program, spec, model.layout.size, variables)
    return FlatOptimizer(spec, model.layout.size)
