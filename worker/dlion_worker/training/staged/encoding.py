"""A data set in the form of a frozen encoder's outputs (`trainer.encoder`).

The program's model, the *decoder*, takes these features as its samples. Saved models take the
original samples again (`training.model`).
"""

from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError, ProgramError
from dlion_api.plain_text import error_text
from dlion_core.policies.staged.feature_batch import MAX_CLASSES, MAX_FEATURES, MAX_MAGNITUDE
from dlion_worker.training.building import pixel_layer, scaled, tensors
from dlion_worker.training.converting import load_keras_file
from dlion_worker.training.datasets.dataset import DataSet

_AT_ONCE = 256
"""Samples that the encoder gets at once."""


def encoded(data: DataSet, path: Path, *, max_values: int | None = None) -> DataSet:
    """The features of all samples, with the encoder. `max_values`: of all training samples of a
    worker that sends them; None: it does not.

    Raises: DataError (no such encoder, it does not take these samples, or there are too many),
    ProgramError (data without classes, or samples that change in each epoch).
    """
    if data.augment is not None:
        raise ProgramError(
            "augment(x, y) changes samples in each epoch, and an encoder's features stay. Leave "
            "out augment or trainer.encoder"
        )
    if not 0 < data.class_count <= MAX_CLASSES:
        raise ProgramError(
            f"trainer.encoder: the data have no classes, or too many (given: {data.class_count}; "
            f"allowed: 1 to {MAX_CLASSES}). Train without an encoder"
        )
    encoder = _loaded(path, path.stat().st_mtime_ns if path.is_file() else 0)
    is_scaled = data.scales_pixels and data.input_dtype == np.uint8
    if is_scaled and (layer := pixel_layer(encoder)):
        raise DataError(
            f"trainer.encoder: {path} would scale pixels that DLion has scaled to 0..1 already "
            f"(given: layer {layer!r}). Save the encoder without the layer, or with "
            "keras.layers.Rescaling(255) before it"
        )
    features = partial(_features, encoder, path=path, is_scaled=is_scaled)
    held_out = features(data.held_out_x)
    _check_values(data.samples, prod(held_out.shape[1:]), max_values)
    parts = {key: (features(x), y) for key, (x, y) in data.parts.items()}
    return replace(data, parts=parts, held_out_x=held_out, encoder=encoder)


@lru_cache(maxsize=1)
def _loaded(path: Path, _modified_ns: int) -> Any:
    """The encoder, which all workers of this process share."""
    if not path.is_file():
        raise DataError(f"trainer.encoder: no such file: {path}. Name a .keras file")
    encoder = load_keras_file(path)
    encoder.trainable = False
    return encoder


def _check_values(samples: int, values: int, max_values: int | None) -> None:
    if max_values is None or samples * values <= max_values:
        return
    raise DataError(
        f"trainer.encoder: {samples:,} samples of {values:,} values each are too many for the "
        f"worker that trains (allowed: {max_values // values:,} of each worker that sends them). "
        "Set trainer.dataset.keepFraction, or use an encoder with fewer outputs"
    )


def _features(encoder: Any, x: NDArray[Any], *, path: Path, is_scaled: bool) -> NDArray[np.float32]:
    if not len(x):  # for the shape: layers do not agree on that of no samples
        one = np.zeros((1, *x.shape[1:]), x.dtype)
        return _features(encoder, one, path=path, is_scaled=is_scaled)[:0]
    try:
        slices = (tensors(x[at : at + _AT_ONCE]) for at in range(0, len(x), _AT_ONCE))
        batches = [
            np.asarray(encoder(scaled(each) if is_scaled else each, training=False), np.float32)
            for each in slices
        ]
    except Exception as error:  # Keras raises any type
        raise DataError(
            f"trainer.encoder: {path} does not take samples of shape {list(x.shape[1:])}: "
            f"{error_text(error).splitlines()[0]}. Name an encoder trained on such data"
        ) from error
    features = np.concatenate(batches)
    size = prod(features.shape[1:])
    if features.ndim < 2 or len(features) != len(x) or not 0 < size <= MAX_FEATURES:
        raise DataError(
            f"trainer.encoder: {path} has outputs of a wrong shape (given: "
            f"{list(features.shape)}; allowed: [N, ...] with 1 to {MAX_FEATURES} values of each "
            "of the N samples). Add a layer that pools them"
        )
    if not (np.abs(features) <= MAX_MAGNITUDE).all():
        raise DataError(
            f"trainer.encoder: {path} has outputs beyond +-{MAX_MAGNITUDE:g}. Add a layer that "
            "normalizes them"
        )
    return features
