"""Sources of samples: all labels at once, samples on demand.

A worker needs all labels to find its own samples, and then reads only those. That saves decoding
the other workers' images.
"""

import fcntl
import hashlib
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError
from dlion_worker.training.datasets.dataset import Fingerprint, Labels

MAX_BYTES = 16 * 2**30
"""Memory limit of any set of samples; protects against invalid headers."""

_T = TypeVar("_T")
_ArraysT = TypeVar("_ArraysT", bound=tuple[NDArray[Any], ...])


class SampleSource(Protocol):
    name: str
    labels: Labels

    def read(self, index_K: NDArray[np.int64]) -> NDArray[Any]:
        """The samples at these ascending indices, as one array [K, ...]."""


@dataclass(eq=False)
class ArraySource:
    """Samples in memory."""

    name: str
    x: NDArray[Any]
    labels: Labels

    def read(self, index_K: NDArray[np.int64]) -> NDArray[Any]:
        """A copy of the chosen samples; the whole array, uncopied, if all are chosen."""
        return self.x if len(index_K) == len(self.x) else self.x[index_K]


class JoinedSource:
    """Several sources as one, in order."""

    def __init__(self, name: str, sources: list[SampleSource]) -> None:
        self.name = name
        self._sources = sources
        self._starts = np.cumsum([0, *(len(s.labels) for s in sources)])
        self.labels = np.concatenate([s.labels for s in sources])

    def read(self, index_K: NDArray[np.int64]) -> NDArray[Any]:
        """The chosen samples. Raises: DataError where they differ in shape or type by source."""
        parts: list[NDArray[Any]] = []
        for source, start, end in zip(
            self._sources, self._starts[:-1], self._starts[1:], strict=True
        ):
            low, high = np.searchsorted(index_K, [start, end])
            if high == low:
                continue
            part = source.read(index_K[low:high] - start)
            if parts and part.shape[1:] != parts[0].shape[1:]:
                raise DataError(
                    f"{source.name}: samples of another shape (given: {list(part.shape[1:])}; "
                    f"allowed: {list(parts[0].shape[1:])}, as in the files before). "
                    "Bring all to one size"
                )
            if parts and part.dtype != parts[0].dtype:  # one scale for all would be wrong
                raise DataError(
                    f"{source.name}: samples of another type (given: {part.dtype}; allowed: "
                    f"{parts[0].dtype}, as in the files before). Save all as one type"
                )
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def data_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The file itself, or the directory's files of that kind, sorted by name.

    Raises: DataError if there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(
            f"data: no such file or directory: {path}. Paths are relative to the site's data root, "
            "which --data-root names for `dlion run` and `dlion simulate`"
        )
    files = sorted(
        p
        for p in path.iterdir()
        if p.suffix.lower() in suffixes and not p.name.startswith(".") and p.is_file()
    )
    if not files:
        raise DataError(f"{path}: no data in this directory (allowed: {', '.join(suffixes)} files)")
    return files


def check_size(count: int, shape: tuple[int, ...], source: str) -> None:
    """Raises: DataError where that many uint8 samples would exceed the limit."""
    size_bytes = count * int(np.prod(shape, dtype=np.int64))
    if size_bytes > MAX_BYTES:
        raise DataError(
            f"{source}: {count} samples of shape {list(shape)} take {size_bytes / 2**30:.1f} GiB "
            f"(allowed: {MAX_BYTES / 2**30:.0f} GiB). Use smaller images, or keepFraction"
        )


class DatasetCache:
    """What the workers of one process open together, by key, so that files are read once.

    The simulator shares one, with all workers of a job in one process. Callers must not change the
    values. Not thread-safe.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], Any] = {}

    def get(self, key: tuple[str, str], make: Callable[[], _T]) -> _T:
        """Return the value of the key (kind, name); make it if it is new."""
        if key not in self._values:
            self._values[key] = make()
        value: _T = self._values[key]
        return value

    def arrays(self, key: tuple[str, str], make: Callable[[], _ArraysT]) -> _ArraysT:
        """As `get`, for arrays that are read from the path which is the key's name."""
        return self.get(key, make)

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


class SharedDatasetCache(DatasetCache):
    """Also shares arrays with the other processes of a run on this machine, as files.

    The first process makes them while the others wait; all of them map the same memory. Where the
    data have changed meanwhile, a process that starts later makes its own.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: of this run alone, as a file that is there is taken for the right one."""
        super().__init__()
        self._folder = folder

    def arrays(self, key: tuple[str, str], make: Callable[[], _ArraysT]) -> _ArraysT:
        """As `get`, for arrays. A process that cannot write files keeps its own."""
        return self.get(key, lambda: self._shared(key, make))

    def _shared(self, key: tuple[str, str], make: Callable[[], _ArraysT]) -> _ArraysT:
        identity = repr((key, list(_fingerprints(Path(key[1])))))
        name = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        folder = self._folder / name
        try:
            file = folder.with_suffix(".lock").open("a")
        except OSError:
            return make()
        with file as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                made = make()
                if not _written(made, folder):
                    return made
        paths = sorted(folder.iterdir(), key=lambda path: int(path.stem))
        mapped = (np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
        return cast("_ArraysT", tuple(np.asarray(each) for each in mapped))


def _fingerprints(path: Path) -> Iterator[tuple[str, Fingerprint]]:
    """Fingerprints of the file at that path, or of the files in a folder and its class folders."""
    for file in chain([path], sorted(path.glob("*")), sorted(path.glob("*/*"))):
        try:
            status = file.stat()
        except OSError:  # missing, or deleted after the listing
            continue
        if stat.S_ISREG(status.st_mode):
            yield str(file), (status.st_size, status.st_mtime_ns)


def _written(arrays: tuple[NDArray[Any], ...], folder: Path) -> bool:
    """Whether the arrays are in that folder now, as 0.npy and so on; False: the disk is full."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        partial.mkdir()
        for number, array in enumerate(arrays):
            np.save(partial / f"{number}.npy", array, allow_pickle=False)
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        return False
    return True


def _whole(source: SampleSource) -> SampleSource:
    if isinstance(source, ArraySource):
        return source
    x = source.read(np.arange(len(source.labels)))
    return ArraySource(source.name, x, source.labels)
