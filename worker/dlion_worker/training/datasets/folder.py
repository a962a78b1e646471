"""Folders of images: one subfolder per class.

`classes.txt` (one name a line), in the folder or beside it, numbers the classes; without it, the
alphabetical order of the subfolders does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError
from dlion_worker.training.datasets.decoding import decode_all, image_fault
from dlion_worker.training.framework import tf

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp")
_BATCH = 64


class ImageSource:
    """Image files with their labels. Raises: DataError naming the file."""

    def __init__(self, name: str, files: Sequence[tuple[Path, int]]) -> None:
        self.name = name
        self._files = [path for path, _ in files]
        self.labels = np.array([label for _, label in files], np.int32)

    def read(self, index_K: NDArray[np.int64]) -> NDArray[Any]:
        chosen = [self._files[i] for i in index_K]
        paths = tf.data.Dataset.from_tensor_slices([str(p) for p in chosen])
        encoded = paths.map(tf.io.read_file).batch(_BATCH)
        return decode_all(
            encoded,
            len(chosen),
            source=self.name,
            find_fault=lambda shape: _find_fault(chosen, shape),
        )


def open_folder(path: Path, class_names: Sequence[str] | None = None) -> ImageSource:
    """All images below a folder, in alphabetical order.

    `class_names`: the class order, if known already. Raises: DataError, also for a subfolder that
    is not a class.
    """
    folders = subfolders(path)
    names = list(class_names or folders)
    files: list[tuple[Path, int]] = []
    for folder in folders:
        if folder not in names:
            raise DataError(
                f"{path / folder}: no such class (allowed: {', '.join(names)}). "
                "Add the name to classes.txt, or remove the folder"
            )
        files += [
            (file, names.index(folder))
            for file in sorted((path / folder).iterdir())
            if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
        ]
    if not files:
        raise DataError(
            f"{path}: no images found (allowed: one subfolder per class with "
            f"{', '.join(SUFFIXES)} files)"
        )
    return ImageSource(str(path), files)


def subfolders(path: Path) -> list[str]:
    """Names of the class folders, sorted."""
    if not path.is_dir():
        raise DataError(
            f"data: no such directory: {path}. Paths are relative to the site's data root"
        )
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def read_class_list(path: Path) -> list[str] | None:
    """Names in `classes.txt` in the data's directory or its parent; None without the file."""
    start = path if path.is_dir() else path.parent
    for folder in (start, start.parent):
        file = folder / "classes.txt"
        if file.is_file():
            text = file.read_text("utf-8-sig", errors="replace")
            return [name for line in text.splitlines() if (name := line.strip())]
    return None


def file_fault(path: Path, shape: tuple[int, ...]) -> str | None:
    """What is wrong with one image file; None if nothing."""
    try:
        fault = image_fault(path.read_bytes(), shape)
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    return f"{path}: {fault}. Correct the file, or remove it" if fault else None


def _find_fault(files: Sequence[Path], shape: tuple[int, ...]) -> DataError:
    for path in files:
        if fault := file_fault(path, shape):
            return DataError(fault)
    return DataError(f"{files[0].parent}: the images cannot be read")
