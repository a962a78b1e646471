"""The program's Keras model, built from the seed and checked before anything depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlion_api.errors import ProgramError
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.programs.program import Program, user_code


def build_model(
    program: Program,
    input_shape: tuple[int, ...],
    class_count: int,
    seed: int,
    input_dtype: np.dtype[Any],
) -> Any:
    """The Keras model, built and checked; the same initial values for the same seed.

    Raises: ProgramError.
    """
    keras.backend.clear_session()  # layer names count from nothing, on every worker alike
    keras.utils.set_random_seed(seed % 2**32)
    with user_code(program, "build_model()", "It takes nothing and returns a keras.Model"):
        model = program.build(input_shape, class_count)
    if not isinstance(model, keras.Model):
        raise ProgramError(
            f"program {program.name}: build_model() must return a keras.Model "
            f"(given: {type(model).__name__})"
        )
    dtype = np.float32 if input_dtype == np.uint8 else input_dtype
    with user_code(
        program,
        f"calling the model on a sample of shape {list(input_shape)}",
        "The model's input must have the shape of the data, without the batch dimension",
    ):
        logits = model(tf.zeros((1, *input_shape), tf.as_dtype(dtype)), training=False)
        shape = tuple(logits.shape)
    if len(shape) < 2 or shape[-1] < class_count:
        raise ProgramError(
            f"program {program.name}: the model's output has the wrong shape (given: "
            f"{list(shape)} for one sample; allowed: one logit for each of {class_count} classes)"
        )
    _refuse_softmax(program, model)
    return model


def _refuse_softmax(program: Program, model: Any) -> None:
    """Probabilities taken for logits train slowly and badly, without any error."""
    if program.loss is not None or not model.layers:
        return
    last = model.layers[-1]
    is_softmax = getattr(last, "activation", None) is keras.activations.softmax
    if is_softmax or isinstance(last, keras.layers.Softmax):
        raise ProgramError(
            f"program {program.name}: the model ends in a softmax; its output must be logits. "
            f"Leave the activation of layer {last.name!r} out, or bring a loss of your own"
        )
