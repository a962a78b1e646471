"""Hostile `.keras` files, as `trainer.startFrom` reads them.

The result must be a `DataError` that names the file, or weights of the model's shape. Afterwards a
valid file is read unchanged.

Left out: altered bytes inside HDF5's own C library. The container's checksums keep them out, unless
an attacker computes them again.
"""

from __future__ import annotations

import functools
import io
import random
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from dlion_api.errors import DataError
from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs import builtin
from hostile import bending
from hostile.archives import altered_container, require_named

WEIGHTS = "model.weights.h5"


@functools.cache
def _model(seed: int = 1, class_count: int = 10) -> FlatModel:
    return FlatModel(builtin("digits"), input_shape=(8, 8, 1), class_count=class_count, seed=seed)


@functools.cache
def _valid(class_count: int = 10) -> bytes:
    """A file saved by such a model, or by a larger one."""
    model = _model(2, class_count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save_keras(path)
        return path.read_bytes()


def _altered(rng: random.Random, valid: bytes) -> bytes:
    """Alter the container, or its parts except the weights, with valid checksums."""
    what = rng.randrange(4)
    if what == 0:
        return altered_container(rng, valid)
    if what == 1:
        return bending.spliced(rng, valid, _valid(12))
    with zipfile.ZipFile(io.BytesIO(valid)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    if what == 2:
        gone = rng.choice(list(members))
        members[rng.choice((gone.upper(), f"../{gone}", "x"))] = members.pop(gone)
    else:
        name = rng.choice([name for name in members if name != WEIGHTS])
        members[name] = bending.bytes_of(rng, members[name])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def attack_keras(rng: random.Random, folder: Path) -> str | None:
    """Read one hostile file, then a valid one."""
    model, valid, path = _model(), _valid(), folder / "model.keras"
    path.write_bytes(bending.until_different(valid, lambda: _altered(rng, valid)))
    size = len(model.weights_D)
    try:
        model.load_keras(path)
        word = "taken"
    except DataError as error:
        require_named(path, error)
        word = "refused"
    assert model.weights_D.shape == (size,)
    assert model.weights_D.dtype == np.float32
    path.write_bytes(valid)
    model.load_keras(path)
    assert np.array_equal(model.weights_D, _model(2).weights_D)
    return word
