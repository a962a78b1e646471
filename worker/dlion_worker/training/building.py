"""Builds the program's Keras model from the seed, and its inputs from NumPy batches.

A batch of records, of several inputs or targets, is a dict of tensors.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ProgramError
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.programs.program import TrainingProgram, user_code
from dlion_worker.training.programs.shape_mismatch import input_mismatch

_SAMPLES = 16
"""Enough to distinguish probabilities from logits."""
_PIXEL_SCALES = (1 / 512, 1 / 50)
"""Between them are 1/255, 1/127.5 and what divides by a standard deviation, too."""
_TO_PIXELS = 100.0
"""A layer that multiplies by so much makes 0..255 of 0..1."""


@dataclass(frozen=True)
class BuiltModel:
    """A Keras model with a few samples and its outputs for them."""

    keras_model: Any
    samples: Any
    outputs: Any

    def outputs_with_weights(self, factor: float) -> Any:
        """The outputs if the weights were that many times as large."""
        model = self.keras_model
        outputs, _ = model.stateless_call(
            [factor * tf.convert_to_tensor(each) for each in model.trainable_variables],
            list(model.non_trainable_variables),
            self.samples,
            **call_arguments(model, training=False),
        )
        return as_float32(outputs)


def build_model(
    program: TrainingProgram,
    class_count: int,
    seed: int,
    input_shape: tuple[int, ...],
    input_dtype: np.dtype[Any],
    scales_pixels: bool,
) -> BuiltModel:
    """Build the Keras model; the same seed gives the same initial values.

    `scales_pixels`: it gets uint8 samples as `scaled` returns them. Raises: ProgramError.
    """
    samples = few_samples(input_shape, input_dtype, scales_pixels=scales_pixels)
    model = new_keras_model(program, input_shape, class_count, seed)
    if scales_pixels and input_dtype == np.uint8 and (layer := pixel_layer(model)):
        raise ProgramError(
            f"program {program.name}: the model would scale pixels that DLion has scaled to 0..1 "
            f"already, as trainer.dataset names images (given: layer {layer!r}). Remove the layer, "
            "put keras.layers.Rescaling(255) before it, or read the images in load_data()"
        )
    shape = (
        {name: list(each.shape[1:]) for name, each in samples.items()}
        if isinstance(samples, dict)
        else list(input_shape)
    )
    with user_code(
        program,
        f"calling the model on a sample of shape {shape}",
        "The model's input must have the shape of the data, without the batch dimension",
        partial(input_mismatch, samples, model),
    ):
        outputs = as_float32(model(samples, **call_arguments(model, training=False)))
    return BuiltModel(model, samples, outputs)


def new_keras_model(
    program: TrainingProgram, input_shape: tuple[int, ...], class_count: int, seed: int
) -> Any:
    """The result of `build_model()`, which no data were given to. Raises: ProgramError."""
    keras.backend.clear_session()  # layer names are numbered from zero on every worker
    keras.utils.set_random_seed(seed % 2**32)
    with user_code(program, "build_model()", "It takes nothing and returns a keras.Model"):
        model = program.build(input_shape, class_count)
    if not isinstance(model, keras.Model):
        raise ProgramError(
            f"program {program.name}: build_model() must return a keras.Model "
            f"(given: {type(model).__name__})"
        )
    return model


def call_arguments(model: Any, *, training: bool) -> dict[str, bool]:
    """Keras passes `training` to models whose `call` takes it, and to no others."""
    parameters = inspect.signature(model.call).parameters.values()
    takes = any(each.name == "training" or each.kind is each.VAR_KEYWORD for each in parameters)
    return {"training": training} if takes else {}


def as_float32(outputs: Any) -> Any:
    """Outputs in float32; probabilities keep the logits that Keras made them from."""

    def cast(each: Any) -> Any:
        if each is None:
            return None
        single = tf.cast(each, tf.float32)
        if (logits := getattr(each, "_keras_logits", None)) is not None:
            single._keras_logits = tf.cast(logits, tf.float32)  # noqa: SLF001 - read by Keras' losses
        return single

    return tf.nest.map_structure(cast, outputs)


def tensors(batch_B: NDArray[Any]) -> Any:
    if (names := batch_B.dtype.names) is None:
        return tf.convert_to_tensor(batch_B)
    return {name: tf.convert_to_tensor(np.ascontiguousarray(batch_B[name])) for name in names}


def specs(batch_B: NDArray[Any]) -> Any:
    """Types and shapes of `tensors(batch_B)`; its batch dimension is open."""
    if (names := batch_B.dtype.names) is None:
        return tf.TensorSpec([None, *batch_B.shape[1:]], tf.as_dtype(batch_B.dtype))
    return {name: specs(batch_B[name]) for name in names}


def value_count(batch_B: NDArray[Any]) -> int:
    """Values of one sample."""
    if (names := batch_B.dtype.names) is None:
        return math.prod(batch_B.shape[1:])
    return sum(value_count(batch_B[name]) for name in names)


def few_samples(shape: Sequence[int], dtype: np.dtype[Any], *, scales_pixels: bool) -> Any:
    """Random samples, as a model gets them; integers are 0 or 1, as they may be indices."""
    rng = np.random.default_rng(1)
    batch = np.zeros((_SAMPLES, *shape), dtype)
    for array in [batch[name] for name in dtype.names] if dtype.names else [batch]:
        is_float = array.dtype.kind == "f"
        highest = 255 if scales_pixels and array.dtype == np.uint8 else 1
        shape = array.shape
        array[...] = rng.normal(size=shape) if is_float else rng.integers(0, highest + 1, shape)
    return scaled(tensors(batch)) if scales_pixels else tensors(batch)


def few_targets(shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
    """Targets or class numbers for `few_samples`, all 0."""
    return tensors(np.zeros((_SAMPLES, *shape), dtype))


def scaled(inputs: Any) -> Any:
    """Pixels (uint8) as floats in 0..1; others unchanged."""

    def scale(each: Any) -> Any:
        return tf.cast(each, tf.float32) * (1.0 / 255.0) if each.dtype == tf.uint8 else each

    return tf.nest.map_structure(scale, inputs)


def pixel_layer(model: Any) -> str:
    """Name of a layer that expects values of 0..255; empty if none does."""
    found = ""
    for layer in model._flatten_layers():  # noqa: SLF001 - also of models within it
        if isinstance(layer, keras.layers.Rescaling):
            scale = float(np.max(np.abs(layer.scale)))
            if scale >= _TO_PIXELS:
                return ""
            if _PIXEL_SCALES[0] < scale < _PIXEL_SCALES[1]:
                found = layer.name
    return found


def whole_model(encoder: Any, model: Any) -> Any:
    """The model of original samples: the encoder, then the model. None: it takes them itself."""
    if encoder is None:
        return model
    return keras.Model(encoder.inputs, model(encoder.outputs[0]), name=f"encoded_{model.name}")
