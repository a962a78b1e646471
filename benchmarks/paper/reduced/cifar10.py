"""Two convolutions over the patches of an image: what cipher and cnn17 learn, for far less.

Patches do not overlap, and nothing is pooled (`run.py --reduced --estimate` says what a sample's
gradient costs).
"""

from __future__ import annotations

import keras

PARAMETERS = 39_178


def build_model() -> keras.Model:
    """0.16 MB in float32."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(32, 4, strides=4, activation="relu"),
            layers.Conv2D(32, 2, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
