"""An untrained encoder of digits, for jobs of topology `staged`: random filters suffice."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def save_encoder(path: Path) -> Path:
    """Write it as a `.keras` file of 8 x 8 images and 4 x 4 x 4 features."""
    from dlion_worker.training.framework import keras

    keras.utils.set_random_seed(1)
    image = keras.Input((8, 8, 1))
    features = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    keras.Model(image, keras.layers.MaxPooling2D(2)(features)).save(path)
    return path
