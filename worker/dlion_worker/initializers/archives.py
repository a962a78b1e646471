"""Unpacks an archive whose contents are untrusted: plain files below a folder, and bounded.

Links, devices and encrypted files are refused: no data set needs them. Sizes are counted while
writing, as an archive's own figures may be wrong.
"""

import io
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar, Final

from dlion_api.errors import DataError

MAX_ENTRIES: Final = 2_000_000
MAX_NAME_LENGTH: Final = 1024
MAX_COMPONENT_BYTES: Final = 255
"""Maximum length of a name between slashes, as in common file systems."""
MAX_HEADER_BYTES: Final = 64 * 1024
"""Maximum size of an entry's extended header in a tar archive, which is read into memory as a
whole."""
MAX_XZ_MEMORY_BYTES: Final = 128 * 1024**2
"""Maximum memory for unpacking. `xz -9` needs 65 MiB; a file may request 4 GiB in its first
bytes."""
_XZ_SIGNATURE: Final = b"\xfd7zXZ\0"
_CHUNK_BYTES: Final = 1024 * 1024
_BLOCK_BYTES: Final = 4096
"""Size of a disk's block: each entry takes at least one."""
_EXTENDED: Final = frozenset({
    tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
})  # fmt: skip


class _TarWithoutXz(tarfile.TarFile):
    """Has no reader of LZMA, whose memory would have no limit."""

    OPEN_METH: ClassVar[Mapping[str, str]] = {
        kind: method for kind, method in tarfile.TarFile.OPEN_METH.items() if kind != "xz"
    }


class _BoundedXz(io.RawIOBase):
    """Unpacks an .xz file within a limit of memory, which `lzma.LZMAFile` does not have."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._stream = self._new_stream()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises: LZMAError; EOFError if the file ends within a stream."""
        while True:
            if self._stream.eof:
                packed = self._start_of_next_stream()
                if not packed:
                    return 0
                self._stream = self._new_stream()
            else:
                packed = self._file.read(_CHUNK_BYTES) if self._stream.needs_input else b""
                if self._stream.needs_input and not packed:
                    raise EOFError("it ends too early")
            try:
                unpacked = self._stream.decompress(packed, max_length=len(buffer))
            except lzma.LZMAError as error:
                if "Memory usage limit" not in str(error):
                    raise
                raise lzma.LZMAError(
                    f"it needs more than {MAX_XZ_MEMORY_BYTES // 1024**2} MiB of memory. Pack it "
                    "with xz -9 or less"
                ) from error
            if unpacked:
                buffer[: len(unpacked)] = unpacked
                return len(unpacked)

    def _start_of_next_stream(self) -> bytes:
        """Skip the padding after a stream, however long it is. Empty at the end of the file."""
        packed = self._stream.unused_data.lstrip(b"\0")
        while not packed and (chunk := self._file.read(_CHUNK_BYTES)):
            packed = chunk.lstrip(b"\0")
        return packed

    @staticmethod
    def _new_stream() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MAX_XZ_MEMORY_BYTES)


_Entry = tuple[str, IO[bytes] | None]
"""Name and content; None: a folder."""


class BoundedHeader(tarfile.TarInfo):
    """Refuses headers that would take much memory, packed in few bytes.

    `TarInfo` names these methods as the places to override. Errors other than TarError's own
    subclasses would end the archive without a word.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENDED:
            size = self.size
            if self.type == tarfile.XGLTYPE:  # it adds to those before it
                size += sum(len(key) + len(value) for key, value in archive.pax_headers.items())
            if size > MAX_HEADER_BYTES:
                raise tarfile.TarError(
                    f"a header has more than {MAX_HEADER_BYTES} bytes. Pack it without extended "
                    "attributes"
                )
        header: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return header

    def _proc_sparse(self, *_: object) -> tarfile.TarInfo:
        """The old format: its map has any number of blocks."""
        raise tarfile.TarError("it has a sparse file. Pack it without --sparse")

    def _proc_gnusparse_10(self, *_: object) -> None:
        """The new format, likewise."""
        self._proc_sparse()


@dataclass(frozen=True)
class Archive:
    """`name` is the file's name, for the format and for messages."""

    path: Path
    name: str

    def unpack(self, folder: Path, *, max_bytes: int) -> None:
        """Write all files below `folder`. Raises: DataError; OSError."""
        entries = self._zip() if self.name.endswith(".zip") else self._tar(max_bytes)
        count = written = 0
        try:
            for name, content in entries:
                count += 1
                if count > MAX_ENTRIES:
                    raise self._error(f"has more than {MAX_ENTRIES} entries")
                written += _BLOCK_BYTES
                target = folder / self._safe(name)
                if content is None:
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("xb") as file:
                    while chunk := content.read(_CHUNK_BYTES):
                        written += len(chunk)
                        self._require_within(max_bytes, written)
                        file.write(chunk)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise self._error("has two entries of one name") from None
        except (
            tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError,
            NotImplementedError, RuntimeError,
        ) as error:  # fmt: skip
            raise self._error(f"cannot be read: {error}") from error
        except OSError as error:
            if error.errno is not None:
                raise
            # Of gzip or bz2: the packed data are damaged.
            raise self._error(f"cannot be read: {error}") from error

    def _tar(self, max_bytes: int) -> Iterator[_Entry]:
        with self.path.open("rb") as file, self._opened_tar(file) as archive:
            for member in archive:
                if not (member.isreg() or member.isdir()):
                    raise self._error(f"has {member.name!r:.200}, which is not a file or folder")
                yield member.name, archive.extractfile(member) if member.isreg() else None
                # Else it keeps every header in memory. It is not in the types.
                archive.members = []  # type: ignore[attr-defined]
            # Checksums are behind the tar's own end, where its reader stops.
            rest, unpacked = 0, archive.fileobj
            assert unpacked is not None
            while chunk := unpacked.read(_CHUNK_BYTES):
                rest += len(chunk)
                self._require_within(max_bytes, rest)

    def _opened_tar(self, file: IO[bytes]) -> tarfile.TarFile:
        """Open the archive, whatever its compression. Raises: TarError and those of its format."""
        is_xz = file.read(len(_XZ_SIGNATURE)) == _XZ_SIGNATURE
        file.seek(0)
        if not is_xz:
            return _TarWithoutXz.open(fileobj=file, mode="r:*", tarinfo=BoundedHeader)
        unpacked = io.BufferedReader(_BoundedXz(file), _CHUNK_BYTES)
        return tarfile.open(fileobj=unpacked, mode="r|", tarinfo=BoundedHeader)

    def _zip(self) -> Iterator[_Entry]:
        with zipfile.ZipFile(self.path) as archive:
            for member in archive.infolist():
                kind = stat.S_IFMT(member.external_attr >> 16)
                if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise self._error(
                        f"has {member.filename!r:.200}, which is not a file or folder"
                    )
                if member.compress_type == zipfile.ZIP_LZMA:  # it may ask for 4 GiB
                    raise self._error(
                        f"has {member.filename!r:.200}, packed with LZMA, whose memory has no "
                        "limit. Pack it with Deflate, or as .tar.xz"
                    )
                yield member.filename, None if member.is_dir() else archive.open(member)

    def _safe(self, name: str) -> PurePosixPath:
        path = PurePosixPath(name)
        is_strange = "\0" in name or "\\" in name or len(name) > MAX_NAME_LENGTH
        is_strange |= any(len(os.fsencode(each)) > MAX_COMPONENT_BYTES for each in path.parts)
        if is_strange or path.is_absolute() or ".." in path.parts:
            raise self._error(f"has {name!r:.200}, which is not a path within a folder")
        return path

    def _require_within(self, max_bytes: int, size: int) -> None:
        if size > max_bytes:
            raise self._error(
                f"is larger than {max_bytes} bytes when unpacked. Use less data, or raise the limit"
                " (docs/data.md)"
            )

    def _error(self, what: str) -> DataError:
        return DataError(f"archive {self.name} {what}")
