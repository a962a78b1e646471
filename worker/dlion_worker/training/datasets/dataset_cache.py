"""Caches what the workers of one process open together, so that files are read once.

Only the simulator uses it, with all workers of a job in one process. Knows nothing of shares. Not
thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dlion_worker.training.datasets.sources import ArraySource, SampleSource

_T = TypeVar("_T")


class DatasetCache:
    """Opened sources and derived values, by key. Callers must not change the values."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], Any] = {}

    def get(self, key: tuple[str, str], make: Callable[[], _T]) -> _T:
        """Return the value of the key (kind, name); make it if it is new."""
        if key not in self._values:
            self._values[key] = make()
        value: _T = self._values[key]
        return value

    def source(
        self, path: Path, make: Callable[[], SampleSource], *, reads_all: bool
    ) -> SampleSource:
        """Return the source at that path.

        `reads_all`: all its samples will be read. From the second worker on they are kept in
        memory, so that they are decoded only once more.
        """
        key = ("source", str(path))
        is_shared = key in self._values
        source: SampleSource = self.get(key, make)
        if not (is_shared and reads_all):
            return source
        return self.get(("whole", str(path)), lambda: _whole(source))


def _whole(source: SampleSource) -> SampleSource:
    if isinstance(source, ArraySource):
        return source
    x = source.read(np.arange(len(source.labels)))
    return ArraySource(source.name, x, source.labels)
