"""Gradients that hide each sample: clipped one by one, summed, with Gaussian noise.

The noise is added before anything else sees a gradient, so that updates, messages, checkpoints and
saved models are all computed from what is already private. Source: Abadi et al. 2016, algorithm 1;
without sampling by chance, of which nothing is claimed.

Shape suffixes: B batch, D flat trained weights.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ProgramError
from dlion_api.spec.privacy import Privacy
from dlion_api.spec.trainer import Trainer
from dlion_worker.training.datasets.dataset import DataSet
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.model import FlatModel, StepResult
from dlion_worker.training.programs.program import TrainingProgram
from dlion_worker.training.variables import all_finite

_BATCHES_ADVICE = (
    "Use GroupNormalization or LayerNormalization in place of BatchNormalization, or keep its "
    "statistics: set layer.trainable = False and freeze its variables (trainer.freeze)"
)
_HALF_BIT = 2.0**-54
_NOISE_STREAM = 5
"""Separates the noise of simulations from other random numbers of the same seed and rank."""


class PrivateModel(FlatModel):
    """A model whose `step` returns a private gradient, and no loss (NaN).

    The noise is made of the operating system's random bytes, as peers know the manifest's seed;
    that of a simulation follows the seed.
    """

    _privacy: Privacy
    _rng: np.random.Generator
    _is_repeatable = False

    def protect(self, privacy: Privacy, *, is_repeatable: bool) -> None:
        """Begin to clip and to add noise. `is_repeatable`: noise follows the seed.

        Raises: ProgramError where a sample would leave traces.
        """
        self._privacy, self._is_repeatable = privacy, is_repeatable
        self._refuse_traces()

    def step(self, x_B: NDArray[Any], y_B: NDArray[Any]) -> StepResult:
        """The mean of the samples' clipped gradients, with noise. `finite`: so are the weights.

        Raises: as `FlatModel.step`.
        """
        x_B, y_B = self._checked(x_B, y_B)
        function = self._function("train", x_B, y_B)
        sum_D, self._state = self._run(function, self._weights, self._fixed, self._state, x_B, y_B)
        gradient_D = ((self._noise() + np.asarray(sum_D)) / len(x_B)).astype(np.float32)
        is_finite = all_finite(gradient_D) and all_finite(self.weights_D)
        return StepResult(math.nan, gradient_D, is_finite)

    def _become_own(self, seed: int, rank: int) -> None:
        super()._become_own(seed, rank)
        self._rng = np.random.default_rng([seed, rank, _NOISE_STREAM])

    def _function(self, kind: str, x_B: NDArray[Any], y_B: NDArray[Any]) -> Any:
        function = super()._function(kind, x_B, y_B)
        if kind == "train" and (variables := function.variables):
            raise ProgramError(
                f"program {self.program.name}: privacy does not go with the variable "
                f"{variables[0].name}, which a step may change without noise. Use tf.constant, or "
                "add_weight() of a Keras layer, and freeze it (trainer.freeze)"
            )
        return function

    def _noise(self) -> NDArray[np.float64]:
        size, privacy = self.layout.size, self._privacy
        noise_D = self._rng.standard_normal(size) if self._is_repeatable else system_noise(size)
        noise_D *= privacy.noise_multiplier * privacy.clip_norm
        return noise_D

    def _train(self, weights_D: Any, fixed: Any, state: Any, x_B: Any, y_B: Any) -> Any:
        """The sum of the clipped gradients, and the next state, which no sample has changed.

        A sample at a time: whatever the model and the loss do with a batch, it is one sample.
        """
        train_one, clip_norm = super()._train, self._privacy.clip_norm

        def add(before: Any, sample: Any) -> Any:
            total_D, own = before
            x_1, y_1 = tf.nest.map_structure(lambda each: each[None], sample)
            _, gradient_D, after = train_one(weights_D, fixed, own, x_1, y_1)
            norm = tf.norm(gradient_D)
            clipped_D = gradient_D * (clip_norm / tf.maximum(norm, clip_norm))
            # A gradient that is not a number must not be distinguishable, either.
            return total_D + tf.where(tf.math.is_finite(norm), clipped_D, 0.0), after

        # Not tf.vectorized_map: it takes as much CPU, and knows few random operations.
        return tf.foldl(add, (x_B, y_B), initializer=(tf.zeros_like(weights_D), list(state)))

    def _refuse_traces(self) -> None:
        program = self.program
        if program.augment is not None:
            raise ProgramError(
                f"program {program.name}: privacy does not go with augment(x, y), which may mix "
                "samples. Put layers that augment into the model: they see one sample at a time"
            )
        if traces := self._variables.traces:
            raise ProgramError(
                f"program {program.name}: privacy does not go with variables that training "
                f"changes without noise (given: {', '.join(traces[:8])}). {_BATCHES_ADVICE}. "
                "Freeze other variables that stay as they are (trainer.freeze)"
            )
        learning = [
            layer.name
            for layer in self._keras._flatten_layers()  # noqa: SLF001 - `layers` are not nested
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
        if learning:  # of one sample: its outputs are the same, whatever the sample
            raise ProgramError(
                f"program {program.name}: with privacy a BatchNormalization would normalise each "
                f"sample by itself, and nothing would be learned (given: {', '.join(learning[:8])})"
                f". {_BATCHES_ADVICE}"
            )


def model_of(
    program: TrainingProgram,
    data: DataSet,
    trainer: Trainer,
    *,
    rank: int = 0,
    is_repeatable: bool = False,
) -> FlatModel:
    """The manifest's model to train, private with `trainer.privacy`.

    `is_repeatable`: the noise follows seed and rank, for a simulation. Raises: ProgramError.
    """
    if trainer.privacy is None:
        return FlatModel.of_data(program, data, trainer, rank=rank)
    model = PrivateModel.of_data(program, data, trainer, rank=rank)
    model.protect(trainer.privacy, is_repeatable=is_repeatable)
    return model


def system_noise(size: int) -> NDArray[np.float64]:
    """Standard normal numbers [size] of the operating system's cryptographic random bytes.

    Source: Box and Muller 1958.
    """
    half = -(-size // 2)
    words = np.frombuffer(os.urandom(16 * half), np.uint64)
    uniform = (words >> np.uint64(11)) * 2.0**-53 + _HALF_BIT  # within 0 and 1, never 0
    radius = np.sqrt(-2.0 * np.log(uniform[:half]))
    angle = 2.0 * np.pi * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
