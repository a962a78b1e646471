"""What many workers of one process open together: files are read once, not once for each.

Made by the simulator, which has all workers of a job in one process; a trainer has one worker and
needs none. Knows nothing of shares. Not for use by several threads at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dlion_worker.training.datasets.sources import ArraySource, Source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_T = TypeVar("_T")


class OpenedOnce:
    """What has been opened or worked out, by what it is. Nobody may change what it hands out."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Any] = {}

    def get(self, key: tuple[str, str], make: Callable[[], _T]) -> _T:
        """What is known under the key, which says what it is and of what; made if it is new."""
        if key not in self._known:
            self._known[key] = make()
        value: _T = self._known[key]
        return value

    def source(self, path: Path, make: Callable[[], Source], *, reads_all: bool) -> Source:
        """The source at that path. `reads_all`: all its samples will be read, so that from the
        second worker on they are taken from memory instead of being decoded a second time."""
        key = ("source", str(path))
        is_shared = key in self._known
        source: Source = self.get(key, make)
        if not (is_shared and reads_all):
            return source
        return self.get(("whole", str(path)), lambda: _whole(source))


def _whole(source: Source) -> Source:
    if isinstance(source, ArraySource):
        return source
    x = source.read(np.arange(len(source.labels)))
    return ArraySource(source.name, x, source.labels)
