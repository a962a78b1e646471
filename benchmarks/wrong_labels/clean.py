"""Hand-written digits for three sites of two workers, all labels right."""

from __future__ import annotations

import keras
import numpy as np
from sklearn.datasets import load_digits

SITES, WORKERS_EACH, HELD_OUT = ("a", "b", "c"), 2, 360


def build_model() -> keras.Model:
    """Some 28 k parameters, as the built-in model for digits."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def load_data(split: str, site: str, worker_index: int) -> tuple[np.ndarray, np.ndarray]:
    """An equal share for every worker, drawn once."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    if split == "test":
        mine = order[:HELD_OUT]
    else:
        place = WORKERS_EACH * SITES.index(site) + worker_index
        mine = order[HELD_OUT + place :: WORKERS_EACH * len(SITES)]
    x = np.round(digits.images[mine] * (255 / 16)).astype(np.uint8)[..., None]
    return x, digits.target[mine]
