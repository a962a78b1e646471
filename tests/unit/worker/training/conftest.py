"""Jobs and small files shared by the tests of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorflow as tf

from dlion_api.spec import Job, load_job

if TYPE_CHECKING:
    from pathlib import Path

MakeJob = Callable[..., Job]


@pytest.fixture(scope="session")
def make_job() -> MakeJob:
    """Make a job with two sites of 2 + 1 workers; keywords are fields of `trainer.dataset`."""

    def make(
        *,
        trainer: dict[str, Any] | None = None,
        workers: int = 2,
        spec: dict[str, Any] | None = None,
        **dataset: Any,
    ) -> Job:
        sites = [
            {"name": "plant-a", "groups": [{"name": "small", "workers": workers}]},
            {"name": "plant-b", "groups": [{"name": "big", "workers": 1}]},
        ]
        return load_job(
            {
                "apiVersion": "dlion.dev/v1alpha1",
                "kind": "DLionJob",
                "metadata": {"name": "test"},
                "spec": {
                    "sites": sites,
                    "trainer": {
                        "program": {"builtin": "digits"},
                        "dataset": dataset or {"name": "digits"},
                        "stop": {"maxSteps": 1},
                        **(trainer or {}),
                    },
                    **(spec or {}),
                },
            }
        )

    return make


@pytest.fixture(scope="session")
def write_records() -> Callable[..., Path]:
    """Write images [N, H, W, C] and labels as a TFRecord file of PNG (lossless) or JPEG."""

    def write(path: Path, x: np.ndarray, y: np.ndarray, *, jpeg: bool = False) -> Path:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for image, label in zip(x, y, strict=True):
                encoded = (tf.io.encode_jpeg if jpeg else tf.io.encode_png)(image).numpy()
                features = {
                    "image/encoded": tf.train.Feature(
                        bytes_list=tf.train.BytesList(value=[encoded])
                    ),
                    "image/class/label": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[int(label)])
                    ),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
        return path

    return write


@pytest.fixture
def images() -> tuple[np.ndarray, np.ndarray]:
    """Forty random images 6x5x3 of four classes."""
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (40, 6, 5, 3), dtype=np.uint8)
    return x, (np.arange(40) % 4).astype(np.int32)
