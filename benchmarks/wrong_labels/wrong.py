"""The same digits, where 40 % of site c's training labels name the next digit."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from clean import build_model
from clean import load_data as right_data

__all__ = ["build_model", "load_data"]

WRONG_FRACTION = 0.4


def load_data(split: str, site: str, worker_index: int) -> tuple[np.ndarray, np.ndarray]:
    """A share of the labels of one site, drawn once, is wrong."""
    x, y = right_data(split, site, worker_index)
    if split == "train" and site == "c":
        chance = np.random.default_rng(1 + worker_index)
        is_wrong = chance.random(len(y)) < WRONG_FRACTION
        y = np.where(is_wrong, (y + 1) % 10, y)
    return x, y
