"""Builds the program's Keras model from the seed, and validates it."""

from typing import Any

import numpy as np

from dlion_api.errors import ProgramError
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.programs.program import TrainingProgram, user_code


def build_model(
    program: TrainingProgram,
    input_shape: tuple[int, ...],
    class_count: int,
    seed: int,
    input_dtype: np.dtype[Any],
) -> Any:
    """Build and validate the Keras model; the same seed gives the same initial values.

    Raises: ProgramError.
    """
    keras.backend.clear_session()  # layer names are numbered from zero on every worker
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
    _reject_softmax(program, model)
    return model


def _reject_softmax(program: TrainingProgram, model: Any) -> None:
    """Reject probabilities in place of logits: they train slowly and badly without an error."""
    if program.loss is not None or not model.layers:
        return
    last = model.layers[-1]
    is_softmax = getattr(last, "activation", None) is keras.activations.softmax
    if is_softmax or isinstance(last, keras.layers.Softmax):
        raise ProgramError(
            f"program {program.name}: the model ends in a softmax; its output must be logits. "
            f"Remove the activation of layer {last.name!r}, or define your own loss"
        )
