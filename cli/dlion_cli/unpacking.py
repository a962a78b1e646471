"""The keeper's tar stream as files of a folder: all of them whole and proved, or none of them.

Called by `fetch`. What `dlion_worker.keeper.pack` writes is read here, and distrusted: no name
leads out of the folder, nothing but plain files is made, and every SHA-256 is checked before the
first file takes its place.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlion_api.errors import ContractError, DataError, UnavailableError
from dlion_worker.keeper.pack import CHECKSUMS, CONTENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")

_MOST_JSON_BYTES: Final = 16 * 1024 * 1024
_PIECE_BYTES: Final = 1024 * 1024


def unpack(
    chunks: Iterable[bytes],
    folder: Path,
    *,
    rename: Callable[[str], str] = lambda name: name,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Path]:
    """Takes the stream's files into the folder, each replaced in one step; their paths.

    `on_progress` hears bytes so far and in all. Raises: UnavailableError where the stream ends too
    soon, ContractError where it is not what the keeper sends, or damaged; OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as staging:
        names = _into(chunks, Path(staging), on_progress)
        made = []
        for name in names:
            target = folder / rename(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir() and not target.is_symlink():
                raise DataError(
                    f"{target}: is a folder where a file is to be. Choose another --out"
                )
            (Path(staging) / name).replace(target)
            made.append(target)
        return made


def _into(
    chunks: Iterable[bytes], staging: Path, on_progress: Callable[[int, int], None]
) -> list[str]:
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    said: dict[str, str] | None = None
    done = 0
    stream = io.BufferedReader(_Chunks(iter(chunks)), _PIECE_BYTES)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if member.name == CONTENTS:
                    sizes = _said(archive, member, "files", int)
                elif member.name == CHECKSUMS:
                    said = _said(archive, member, "sha256", str)
                else:
                    for count in _extract(archive, member, staging, digests):
                        done += count
                        on_progress(done, sum(sizes.values()))
    except tarfile.ReadError as error:
        raise _cut_off(str(error)) from error
    if said is None:
        raise _cut_off("no checksums at its end")
    _check(said, digests)
    return list(digests)


def _cut_off(why: str) -> UnavailableError:
    return UnavailableError(
        f"the keeper's stream cannot be read to its end ({why}); nothing was changed. Try again"
    )


def _extract(
    archive: tarfile.TarFile, member: tarfile.TarInfo, staging: Path, digests: dict[str, str]
) -> Iterator[int]:
    """Writes one file and yields how many bytes at a time; its digest is in `digests` then."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or str(path) != member.name:
        raise ContractError(f"the keeper sends {member.name!r}, which is no path within a folder")
    if member.name in digests:
        raise ContractError(f"the keeper sends {member.name!r} twice")
    try:
        safe = tarfile.data_filter(member, os.fspath(staging))
    except tarfile.FilterError as error:
        raise ContractError(
            f"the keeper sends {member.name!r}, which is refused: {error}"
        ) from None
    content = archive.extractfile(safe) if safe.isreg() else None
    if content is None:
        raise ContractError(f"the keeper sends {member.name!r}, which is no plain file")
    target = staging / safe.name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("xb") as file:
        while piece := content.read(_PIECE_BYTES):
            file.write(piece)
            digest.update(piece)
            yield len(piece)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.utime(target, (safe.mtime or 0, safe.mtime or 0))
    except (OverflowError, ValueError):
        raise ContractError(
            f"the keeper sends {member.name!r} of no time that there is: {safe.mtime}"
        ) from None
    digests[member.name] = digest.hexdigest()


def _said(
    archive: tarfile.TarFile, member: tarfile.TarInfo, key: str, kind: type[T]
) -> dict[str, T]:
    """What the keeper says of each file."""
    content = archive.extractfile(member) if member.isreg() else None
    try:
        document = json.loads(content.read(_MOST_JSON_BYTES)) if content else None
    except (ValueError, RecursionError):
        document = None
    values = document.get(key) if isinstance(document, dict) else None
    if not isinstance(values, dict) or not all(isinstance(v, kind) for v in values.values()):
        raise ContractError(
            f"the keeper sends a {member.name} that does not say {key!r} of each file"
        )
    return values


def _check(said: dict[str, str], digests: dict[str, str]) -> None:
    wrong = sorted(name for name in {*said, *digests} if said.get(name) != digests.get(name))
    if wrong:
        raise ContractError(
            f"{', '.join(wrong[:5])}: SHA-256 differs from what the keeper sent; nothing was "
            "changed. Try again"
        )


class _Chunks(io.RawIOBase):
    """Chunks as a file that can be read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fills the buffer with the next bytes; 0 at the end."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
