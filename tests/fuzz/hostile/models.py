"""Hostile `.keras` files, as `trainer.startFrom` reads them.

What must hold: `DataError` that names the file, or weights of the model's shape; a right file is
read afterwards as it was written. Left out: what HDF5's own library in C makes of altered bytes in
it, which the container's checksums keep from it unless somebody means it to have them.
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
from hostile.archives import bent_container, require_named

WEIGHTS = "model.weights.h5"


@functools.cache
def _model(seed: int = 1, class_count: int = 10) -> FlatModel:
    return FlatModel(builtin("digits"), input_shape=(8, 8, 1), class_count=class_count, seed=seed)


@functools.cache
def _right(class_count: int = 10) -> bytes:
    """A file that such a model has saved, or a larger one."""
    model = _model(2, class_count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save_keras(path)
        return path.read_bytes()


def _bent(chance: random.Random, right: bytes) -> bytes:
    """The container altered, or its parts but the weights, with right checksums."""
    what = chance.randrange(4)
    if what == 0:
        return bent_container(chance, right)
    if what == 1:
        return bending.spliced(chance, right, _right(12))
    with zipfile.ZipFile(io.BytesIO(right)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    if what == 2:
        gone = chance.choice(list(members))
        members[chance.choice((gone.upper(), f"../{gone}", "x"))] = members.pop(gone)
    else:
        name = chance.choice([name for name in members if name != WEIGHTS])
        members[name] = bending.bytes_of(chance, members[name])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def attack_keras(chance: random.Random, folder: Path) -> str | None:
    """One hostile file, then a right one."""
    model, right, path = _model(), _right(), folder / "model.keras"
    path.write_bytes(bending.until_other(right, lambda: _bent(chance, right)))
    size = len(model.weights_D)
    try:
        model.load_keras(path)
        word = "taken"
    except DataError as error:
        require_named(path, error)
        word = "refused"
    assert model.weights_D.shape == (size,)
    assert model.weights_D.dtype == np.float32
    path.write_bytes(right)
    model.load_keras(path)
    assert np.array_equal(model.weights_D, _model(2).weights_D)
    return word
