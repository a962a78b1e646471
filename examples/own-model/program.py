"""A program for DLion: the model, and the training data of each worker.

DLion calls these functions. Only the first is required:

    build_model() -> keras.Model
        Its outputs are one per class: probabilities of a softmax, or logits.
    load_data(split, site, worker_index) -> (x, y)
        NumPy arrays; y contains class numbers from 0, or floats for a regression. Each worker
        calls it with split "train" or "test", the site's name, and the worker's index within its
        site. "train" returns that worker's data; "test" should be the same everywhere. The model
        gets x of type uint8 as it is: let it begin with keras.layers.Rescaling(1 / 255). Without
        load_data, the manifest's `trainer.dataset` applies.
    loss(y_true, y_pred)
        A scalar, or a value per sample. Default: cross-entropy, or mean squared error of floats.
    accuracy(y_true, y_pred)
        From 0 to 1, or a value per sample. Default: the share that the largest output meets, or
        the coefficient of determination of floats.
    optimizer()
        A Keras optimizer, for `trainer.optimizer.name: program`.
    augment(x, y)
        Changes a training batch by TensorFlow operations, such as those of tf.image.
    callbacks()
        A list of Keras callbacks that watch the training.

A compiled model has its own loss, accuracy and optimizer. load_data may return a tf.data.Dataset.
"""

from __future__ import annotations

import zlib

import keras
import numpy as np

SIZE, CLASSES = 16, 4
CLASSES_AT = {"plant-a": (0, 1), "plant-b": (2, 3)}
"""The classes that a site has; another site has all."""


def build_model() -> keras.Model:
    """A small convolutional network. Replace it with your own."""
    return keras.Sequential(
        [
            keras.layers.Input((SIZE, SIZE, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def load_data(split: str, site: str, worker_index: int) -> tuple[np.ndarray, np.ndarray]:
    """Generated images: stripes in one of four directions, with noise.

    A site has two of the directions, so that alone it names about half of the test images at most.
    Replace this with your own data, for example `np.load(f"/data/{site}/{split}.npz")` and
    `return file["x"], file["y"]`.
    """
    owner = "" if split == "test" else f"{site}/{worker_index}"
    rng = np.random.default_rng(zlib.crc32(f"{split}/{owner}".encode()))
    count = 400 if split == "test" else 1000
    classes = range(CLASSES) if split == "test" else CLASSES_AT.get(site, range(CLASSES))
    y = rng.choice(list(classes), count)
    angle = y * np.pi / CLASSES
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    along = np.cos(angle)[:, None, None] * columns + np.sin(angle)[:, None, None] * rows
    phase = rng.uniform(0, 2 * np.pi, count)[:, None, None]
    x = 0.5 + 0.4 * np.sin(along * 1.2 + phase) + rng.normal(0, 0.5, (count, SIZE, SIZE))
    return x[..., None].astype(np.float32), y.astype(np.int64)
