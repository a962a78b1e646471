"""Unpacks the keeper's tar stream into a folder: all files with verified digests, or none.

Called by `fetch`. The stream of `dlion_worker.artifact_server.pack` is untrusted: only plain
files within the folder are created, after every SHA-256 was verified.
"""

import hashlib
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

from dlion_api.errors import ContractError, DataError, UnavailableError
from dlion_worker.artifact_server.pack import CHECKSUMS, CONTENTS
from dlion_worker.initializers.archives import BoundedHeader

T = TypeVar("T")

_MAX_JSON_BYTES: Final = 16 * 1024 * 1024
_CHUNK_BYTES: Final = 1024 * 1024


def unpack(
    chunks: Iterable[bytes],
    folder: Path,
    *,
    rename: Callable[[str], str] = lambda name: name,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
    check: Callable[[Path], None] = lambda _folder: None,
) -> list[Path]:
    """Unpack the stream; replace each file atomically, and return the paths.

    `on_progress` receives the bytes so far and in total. `check` gets the folder with all files
    before the first one is replaced, and raises if they are not to be. Raises: UnavailableError if
    the stream ends early; ContractError if it is malformed or damaged; OSError; and as `check`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as staging:
        names = _receive(chunks, Path(staging), on_progress)
        check(Path(staging))
        targets = {name: folder / rename(name) for name in names}
        for target in targets.values():  # before any is replaced: else old and new files would mix
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir() and not target.is_symlink():
                raise DataError(f"{target}: is a folder, not a file. Choose another --out")
        for name, target in targets.items():
            (Path(staging) / name).replace(target)
        return [*targets.values()]


def _receive(
    chunks: Iterable[bytes], staging: Path, on_progress: Callable[[int, int], None]
) -> list[str]:
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    expected: dict[str, str] | None = None
    done = 0
    stream: Any = _Chunks(chunks)
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=BoundedHeader) as archive:
            for member in archive:
                if member.name == CONTENTS:
                    sizes = _checksums_of(archive, member, "files", int)
                elif member.name == CHECKSUMS:
                    expected = _checksums_of(archive, member, "sha256", str)
                else:
                    for count in _extract(archive, member, staging, digests):
                        done += count
                        on_progress(done, sum(sizes.values()))
    except tarfile.ReadError as error:
        raise _truncated_error(str(error)) from error
    except (tarfile.TarError, ValueError, RecursionError) as error:  # what tarfile lets through
        why = str(error).split(". Pack it ", 1)[0]  # advice for the author of an archive
        raise ContractError(
            f"the keeper's stream is malformed: {why}; nothing was changed. Restart the keeper, or "
            "report it"
        ) from error
    if expected is None:
        raise _truncated_error("no checksums at its end")
    _check(expected, digests)
    return list(digests)


def _truncated_error(why: str) -> UnavailableError:
    return UnavailableError(
        f"the keeper's stream cannot be read to its end ({why}); nothing was changed. Retry"
    )


def _extract(
    archive: tarfile.TarFile, member: tarfile.TarInfo, staging: Path, digests: dict[str, str]
) -> Iterator[int]:
    """Write one file, yield the size of each chunk, and add the digest to `digests`."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or str(path) != member.name:
        raise ContractError(
            f"the keeper sends {member.name!r}, which is not a relative path within a folder"
        )
    if member.name in digests:
        raise ContractError(f"the keeper sends {member.name!r} more than once")
    try:
        safe = tarfile.data_filter(member, os.fspath(staging))
    except tarfile.FilterError as error:
        raise ContractError(
            f"the keeper sends {member.name!r}, which is rejected: {error}"
        ) from None
    # A sparse file of a few bytes may fill the disk.
    content = archive.extractfile(safe) if safe.isreg() and not safe.issparse() else None
    if content is None:
        raise ContractError(f"the keeper sends {member.name!r}, which is not a regular file")
    target = staging / safe.name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("xb") as file:
        while chunk := content.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            yield len(chunk)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.utime(target, (safe.mtime or 0, safe.mtime or 0))
    except (OverflowError, ValueError):
        raise ContractError(
            f"the keeper sends {member.name!r} with an invalid time: {safe.mtime}"
        ) from None
    digests[member.name] = digest.hexdigest()


def _checksums_of(
    archive: tarfile.TarFile, member: tarfile.TarInfo, key: str, kind: type[T]
) -> dict[str, T]:
    """The value of each file in this index."""
    content = archive.extractfile(member) if member.isreg() else None
    try:
        document = json.loads(content.read(_MAX_JSON_BYTES)) if content else None
    except (ValueError, RecursionError):
        document = None
    values = document.get(key) if isinstance(document, dict) else None
    if not isinstance(values, dict) or not all(isinstance(v, kind) for v in values.values()):
        raise ContractError(f"the keeper sends a {member.name} that lacks {key!r} for each file")
    return values


def _check(expected: dict[str, str], digests: dict[str, str]) -> None:
    wrong = sorted(
        name for name in {*expected, *digests} if expected.get(name) != digests.get(name)
    )
    if wrong:
        raise ContractError(
            f"{', '.join(wrong[:5])}: SHA-256 differs from the keeper's; nothing was changed. Retry"
        )


class _Chunks:
    """Chunks as the file that `tarfile` reads as a stream; it accepts reads of any length."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = filter(None, chunks)

    def read(self, _size: int) -> bytes:
        """The next chunk; empty at the end."""
        return next(self._chunks, b"")
