"""Why a model, its loss and its data do not fit, in the program's terms. Pure.

Keras and TensorFlow name shapes of whole batches and places in their own code. The sentences here
come before their text, where that is about shapes.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_ABOUT_SHAPES: Final = re.compile(r"\b(shapes?|rank|ndim|incompatible)\b", re.IGNORECASE)


def is_about_shapes(error: BaseException, text: str) -> bool:
    """Whether an error with that text is one of Keras or TensorFlow that names shapes.

    >>> text = "Arguments `target` and `output` must have the same rank (ndim)"
    >>> is_about_shapes(ValueError(text), text), is_about_shapes(NameError("rank"), "rank")
    (True, False)
    """
    # By its name, as programs are checked without TensorFlow, too.
    is_of_values = isinstance(error, ValueError) or type(error).__name__ == "InvalidArgumentError"
    return is_of_values and _ABOUT_SHAPES.search(text) is not None


def sample_shapes(batch: Any) -> str:
    """The shapes of one sample in a batch of tensors, which may be a dict, a list or None."""
    if isinstance(batch, Mapping):
        return (
            "{" + ", ".join(f"{name}: {sample_shapes(each)}" for name, each in batch.items()) + "}"
        )
    if isinstance(batch, list | tuple):
        return "[" + ", ".join(map(sample_shapes, batch)) + "]"
    return "None" if batch is None else str(list(batch.shape[1:]))


def loss_mismatch(targets: Any, outputs: Any) -> str:
    """What to correct where a loss or metric raises an error about shapes.

    `targets` and `outputs` are tensors of a batch, or dicts or lists of them.
    """
    shapes = f"y has {_typed_shapes(targets)}, and the model returns {sample_shapes(outputs)}"
    if not (hasattr(targets, "shape") and hasattr(outputs, "shape")):
        return f"{shapes}, for one sample. Give each output targets of its own shape"
    target, output = [*targets.shape[1:]], [*outputs.shape[1:]]
    remedy = _remedy(target, output, are_numbers="int" in _dtype_name(targets))
    return ". ".join(part for part in (f"{shapes}, for one sample", remedy) if part)


def input_mismatch(samples: Any, model: Any) -> str:
    """What to correct where a model raises an error about the shape of its input."""
    try:
        taken = f", and the model takes {_without_batch(model.input_shape)}"
    except (AttributeError, ValueError):  # of a model that takes its shape from the first call
        taken = ""
    return (
        f"x has the shape {sample_shapes(samples)} for one sample{taken}. Give keras.Input() the "
        "shape of the data, without the batch dimension, or reshape the data in load_data()"
    )


def _remedy(
    target: Sequence[int | None], output: Sequence[int | None], *, are_numbers: bool
) -> str:
    """`are_numbers`: the targets are integers, and so may be class numbers. Empty: unknown."""
    if target == output:
        if not target or target[-1] == 1:
            return ""
        return (
            "If the rows of y are one-hot, use CategoricalCrossentropy. A sparse loss or metric "
            "takes class numbers: return argmax(y, axis=-1), as integers"
        )
    if are_numbers and target == output[:-1]:
        return (
            "If y are class numbers, use SparseCategoricalCrossentropy (for one output of two "
            "classes BinaryCrossentropy), and a sparse metric. Others take one-hot "
            f"rows: return keras.utils.to_categorical(y, {output[-1]})"
        )
    if len(target) == len(output) and target[:-1] == output[:-1]:
        return f"Give the last layer {target[-1]} outputs, or return {output[-1]} values in y"
    return f"Let the model return {list(target)}, or return y of shape {list(output)}"


def _typed_shapes(targets: Any) -> str:
    if isinstance(targets, Mapping):
        return (
            "{" + ", ".join(f"{key}: {_typed_shapes(each)}" for key, each in targets.items()) + "}"
        )
    if isinstance(targets, list | tuple):
        return "[" + ", ".join(map(_typed_shapes, targets)) + "]"
    kind = _dtype_name(targets)
    return f"shape {sample_shapes(targets)} of {kind}" if len(targets.shape) > 1 else f"one {kind}"


def _dtype_name(tensor: Any) -> str:
    return str(getattr(tensor.dtype, "name", tensor.dtype))


def _without_batch(shape: Any) -> str:
    """Keras' shapes: one tuple, or a dict or list of them."""
    if isinstance(shape, Mapping):
        return str({name: _without_batch(each) for name, each in shape.items()}).replace("'", "")
    if isinstance(shape, list):
        return "[" + ", ".join(map(_without_batch, shape)) + "]"
    return str(list(shape[1:]))
