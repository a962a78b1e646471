"""Short clips [frames, channels, height, width] and a network of 3-D convolutions over them.

The protocol is that of examples/own-model/program.py: `build_model` and `load_data`.
"""

from __future__ import annotations

import zlib

import keras
import numpy as np

FRAMES, CHANNELS, SIZE = 6, 1, 12
STEPS = ((0, 1), (0, -1), (1, 0), (-1, 0))
"""Rows and columns that a spot moves per frame: right, left, down, up. One class each."""


def build_model() -> keras.Model:
    """Convolutions over time, height and width; CPUs require the channels last."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((FRAMES, CHANNELS, SIZE, SIZE)),
            layers.Permute((1, 3, 4, 2)),
            layers.Conv3D(8, 3, activation="relu"),
            layers.Conv3D(16, 3, activation="relu"),
            layers.GlobalMaxPooling3D(),
            layers.Dense(len(STEPS)),
        ]
    )


def load_data(split: str, site: str, worker_index: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate clips of a bright spot that moves by a pixel per frame over noise; use your own
    here.
    """
    whose = "" if split == "test" else f"{site}/{worker_index}"
    chance = np.random.default_rng(zlib.crc32(f"{split}/{whose}".encode()))
    count = 200 if split == "test" else 600
    y = chance.integers(0, len(STEPS), count)
    x = chance.normal(0, 0.2, (count, FRAMES, CHANNELS, SIZE, SIZE)).astype(np.float32)
    place = chance.integers(0, SIZE, (count, 2))
    for frame in range(FRAMES):
        row, column = ((place + frame * np.array(STEPS)[y]) % SIZE).T
        x[np.arange(count), frame, 0, row, column] += 2.0
    return x, y
