"""The program of a run that `dlion.train(model, data)` has started, copied into the run's folder.

Beside it are the model, the samples of each worker and the held-out ones (`dlion.model_project`).
Nothing else imports it.
"""

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

_FOLDER = Path(__file__).resolve().parent


def build_model() -> Any:
    """The model as it was given: compiled or not, with its weights."""
    with warnings.catch_warnings():
        # The state of its optimizer is not used, and there is none before a first step.
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        return keras.models.load_model(_FOLDER / "initial.keras")


def load_data(split: str, site: str, worker_index: int) -> tuple[Any, Any]:
    """This worker's samples, or the held-out ones, which are the same for all."""
    name = "test" if split == "test" else f"{site}-{worker_index}"
    with np.load(_FOLDER / f"{name}.npz", allow_pickle=False) as arrays:
        return arrays["x"], arrays["y"]
