"""A program of your own for DLion: the model, and the data that each worker learns from.

DLion calls three functions of this file, of which only the first must be there:

    build_model() -> keras.Model
        Outputs are logits, one per class: no softmax at the end.
    load_data(split, site, worker_index) -> (x, y)
        NumPy arrays; y holds class numbers from 0. Called in each worker, with split "train" or
        "test", the site's name, and the worker's number within its site. What it returns
        for "train" is that worker's own data; "test" should be the same everywhere. x of type
        uint8 is taken for pixels and scaled to 0..1. Without load_data the manifest's
        `trainer.dataset` says what to train on.
    loss(y_true, y_pred)
        A scalar or a value per sample. Without it: softmax cross-entropy.
"""

from __future__ import annotations

import zlib

import keras
import numpy as np

SIZE, CLASSES = 16, 4


def build_model() -> keras.Model:
    """A small convolutional network; put your own here."""
    return keras.Sequential(
        [
            keras.layers.Input((SIZE, SIZE, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def load_data(split: str, site: str, worker_index: int) -> tuple[np.ndarray, np.ndarray]:
    """Drawn images, so that this runs as it is: stripes in one of four directions, with noise.

    Put your own here, for instance
    `np.load(f"/data/{site}/{split}.npz")` and `return file["x"], file["y"]`.
    """
    whose = "" if split == "test" else f"{site}/{worker_index}"
    chance = np.random.default_rng(zlib.crc32(f"{split}/{whose}".encode()))
    count = 400 if split == "test" else 1000
    y = chance.integers(0, CLASSES, count)
    angle = y * np.pi / CLASSES
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    along = np.cos(angle)[:, None, None] * columns + np.sin(angle)[:, None, None] * rows
    phase = chance.uniform(0, 2 * np.pi, count)[:, None, None]
    x = 0.5 + 0.4 * np.sin(along * 1.2 + phase) + chance.normal(0, 0.1, (count, SIZE, SIZE))
    return x[..., None].astype(np.float32), y.astype(np.int64)
