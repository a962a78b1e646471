"""Tests of archives.

Tar and zip archives are unpacked with their folders. Other files do not change. An entry that
leaves the folder, is not a plain file, or is too large fails the download with its name and fault.
So does a damaged archive. Nothing of a refused archive stays.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import random
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from dlion_api.errors import DataError
from dlion_api.spec.initializers import Download
from dlion_worker.initializers import archives
from dlion_worker.initializers.store import DownloadStore
from file_server import served

FILES = {"a/one.npz": b"1" * 1000, "a/b/two.npz": b"22", "three": b""}


def tar(entries: dict[str, bytes], mode: str = "w", kind: bytes = tarfile.REGTYPE) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in entries.items():
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(data), "/etc/passwd"
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def zipped(entries: dict[str, bytes], mode: int = 0o100644) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            member = zipfile.ZipInfo(name)
            member.external_attr, member.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            archive.writestr(member, data)
    return content.getvalue()


def two_streams(content: bytes) -> bytes:
    """Make it like `cat a.xz b.xz`, with padding between the parts."""
    return lzma.compress(content[:700]) + b"\0" * 4 + lzma.compress(content[700:]) + b"\0" * 8


def padded_streams(content: bytes) -> bytes:
    """Two parts of which the second comes after more padding than is read at once."""
    padding = b"\0" * (2 * archives._CHUNK_BYTES)
    return lzma.compress(content[:1536]) + padding + lzma.compress(content[1536:])


def damaged_block() -> bytes:
    """A .tar.bz2 file of several blocks. One after the first is damaged."""
    packed = bytearray(bz2.compress(tar({"a": random.Random(0).randbytes(300_000)}), 1))
    packed[len(packed) * 2 // 3] ^= 0xFF
    return bytes(packed)


def wrong_checksum() -> bytes:
    """A .tar.gz file of two parts. The checksum of the first is wrong."""
    content = tar({"a": b"1" * 2000})
    first = bytearray(gzip.compress(content[:1024]))
    first[-8] ^= 0xFF
    return bytes(first) + gzip.compress(content[1024:])


def large_dictionary() -> bytes:
    """An .xz file whose first block requests a dictionary of 1 GiB."""
    packed = bytearray(tar(FILES, "w:xz"))
    size = (packed[12] + 1) * 4
    header = packed[12 : 12 + size - 4]
    header[header.index(b"\x21\x01") + 2] = 36
    packed[12 : 12 + size] = header + zlib.crc32(header).to_bytes(4, "little")
    return bytes(packed)


def encrypted() -> bytes:
    content = bytearray(zipped({"a": b"1"}))
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + place] |= 1
    return bytes(content)


def fetch(folder: Path, content: bytes, name: str, **more: int) -> Path:
    with served(content, name) as file:
        download = Download(url=file.url, sha256=hashlib.sha256(content).hexdigest())
        return DownloadStore(folder, **more).fetch(download, environment={})


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("data.tar", tar),
        ("data.tar.gz", lambda files: tar(files, "w:gz")),
        ("data.tgz", lambda files: tar(files, "w:gz")),
        ("data.tar.bz2", lambda files: tar(files, "w:bz2")),
        ("data.tar.xz", lambda files: tar(files, "w:xz")),
        ("data.tar.xz", lambda files: two_streams(tar(files))),
        ("data.tar.xz", lambda files: padded_streams(tar(files))),
        ("data.tar", lambda files: tar(files, "w:xz")),
        ("data.zip", zipped),
    ],
)
def test_an_archive_is_unpacked(
    tmp_path: Path, name: str, make: Callable[[dict[str, bytes]], bytes]
) -> None:
    place = fetch(tmp_path, make(FILES), name)
    found = {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}
    assert found == FILES
    assert [each.name for each in tmp_path.iterdir() if not each.name.startswith(".")] == [
        place.name
    ]
    assert not list(tmp_path.glob(".*.part"))


def test_an_archive_is_removed_before_its_files_count(tmp_path: Path) -> None:
    """Otherwise a process that ends in between would leave the archive permanently."""
    content = tar(FILES)
    (tmp_path / f"{hashlib.sha256(content).hexdigest()}-a.tar").write_bytes(b"in its place")
    with pytest.raises(NotADirectoryError):
        fetch(tmp_path, content, "a.tar")
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("name", ["data.npz", "model.keras"])
def test_a_zip_with_another_name_does_not_change(tmp_path: Path, name: str) -> None:
    content = zipped(FILES)
    assert (fetch(tmp_path, content, name) / name).read_bytes() == content


def long_header(kind: bytes, count: int = 1) -> bytes:
    """Extended headers of 40 KB each, then a file."""
    content = io.BytesIO()
    for each in range(count):
        record = f"40000 comment{each}=".ljust(39_999, "x").encode() + b"\n"
        header = tarfile.TarInfo("header")
        header.type, header.size = kind, len(record)
        content.write(header.tobuf() + record.ljust(40_448, b"\0"))
    return content.getvalue() + tar({"a": b"1"})


def huge_header(kind: bytes) -> bytes:
    """A header that claims 400 MB and has 16 MB."""
    header = tarfile.TarInfo("header")
    header.type, header.size = kind, 400 * 10**6
    return gzip.compress(header.tobuf() + bytes(16 * 10**6), 1)


def sparse(version: str) -> bytes:
    """A sparse file of the old or the new GNU format with an empty map."""
    if version == "old":
        return tar({"a": b""}, kind=tarfile.GNUTYPE_SPARSE)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        member.size = 512
        archive.addfile(member, io.BytesIO(b"0\n".ljust(512, b"\0")))
    return content.getvalue()


OUTSIDE, NO_FILE = "not a path within a folder", "not a file or folder"
TWICE, DAMAGED = "two entries of one name", "cannot be read"
HOSTILE: dict[str, tuple[str, bytes, str]] = {
    "a parent": ("a.tar", tar({"../evil": b"1"}), OUTSIDE),
    "the root": ("a.tar", tar({"/etc/evil": b"1"}), OUTSIDE),
    "a link": ("a.tar", tar({"a": b""}, kind=tarfile.SYMTYPE), NO_FILE),
    "a hard link": ("a.tar", tar({"a": b""}, kind=tarfile.LNKTYPE), NO_FILE),
    "a pipe": ("a.tar", tar({"a": b""}, kind=tarfile.FIFOTYPE), NO_FILE),
    "a device": ("a.tar", tar({"a": b""}, kind=tarfile.CHRTYPE), NO_FILE),
    "a name twice": ("a.tar", tar({"a": b"1", "./a": b"2"}), TWICE),
    "a file as a folder": ("a.tar", tar({"a": b"1", "a/b": b"2"}), TWICE),
    "a long part of a name": ("a.tar", tar({"a/" + "b" * 256: b"1"}), OUTSIDE),
    "a long part in bytes": ("a.zip", zipped({"\u00e9" * 128: b"1"}), OUTSIDE),
    "many global headers": ("a.tar", long_header(tarfile.XGLTYPE, 2), "more than 65536 bytes"),
    "a sparse file": ("a.tar", sparse("old"), "sparse"),
    "a new sparse file": ("a.tar", sparse("new"), "sparse"),
    "no archive": ("a.tar", b"no archive", DAMAGED),
    "half an archive": ("a.tar", tar(FILES)[:700], DAMAGED),
    "half of a packed one": ("a.tar.gz", tar(FILES, "w:gz")[:60], DAMAGED),
    "a damaged bz2": ("a.tar.bz2", damaged_block(), DAMAGED),
    "a wrong checksum": ("a.tar.gz", wrong_checksum(), DAMAGED),
    "a packed one without its end": ("a.tar.gz", tar(FILES, "w:gz")[:-10], DAMAGED),
    "a wrong checksum at the end": ("a.tar.gz", tar(FILES, "w:gz")[:-8] + bytes(8), DAMAGED),
    "an xz without its end": ("a.tar.xz", tar(FILES, "w:xz")[:-10], DAMAGED),
    "half of an xz": ("a.tar.xz", tar(FILES, "w:xz")[:120], DAMAGED),
    "an xz of another format": ("a.tar.xz", lzma.compress(tar(FILES), lzma.FORMAT_ALONE), DAMAGED),
    "a large dictionary": ("a.tar.xz", large_dictionary(), "more than 128 MiB of memory"),
    "a parent in an xz": ("a.tar.xz", tar({"../evil": b"1"}, "w:xz"), OUTSIDE),
    "a parent in a zip": ("a.zip", zipped({"../evil": b"1"}), OUTSIDE),
    "backslashes": ("a.zip", zipped({"a\\..\\evil": b"1"}), OUTSIDE),
    "a link in a zip": ("a.zip", zipped({"a": b"/etc/passwd"}, 0o120777), NO_FILE),
    "a password": ("a.zip", encrypted(), DAMAGED),
    "half a zip": ("a.zip", zipped(FILES)[:80], DAMAGED),
    "nothing": ("a.zip", b"", DAMAGED),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_no_files(tmp_path: Path, case: str) -> None:
    name, content, words = HOSTILE[case]
    folder = tmp_path / "downloads"
    with pytest.raises(DataError, match=words):
        fetch(folder, content, name)
    assert not [each for each in folder.iterdir() if each.is_dir()]
    assert [each.name for each in tmp_path.iterdir()] == ["downloads"]


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)
def test_a_huge_header_is_refused_before_it_is_in_memory(tmp_path: Path, kind: bytes) -> None:
    content = huge_header(kind)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="a header has more than 65536 bytes"):
            fetch(tmp_path, content, "a.tar.gz", max_bytes=10**6)
        assert tracemalloc.get_traced_memory()[1] < 8 * 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_headers_within_the_limit_are_read(tmp_path: Path, kind: bytes) -> None:
    assert (fetch(tmp_path, long_header(kind), "a.tar") / "a").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.zip", zipped({"a": bytes(10**6)})),
        ("a.tar.gz", tar({"a": bytes(10**6)}, "w:gz")),
        ("a.tar.xz", tar({"a": bytes(10**6)}, "w:xz")),
    ],
    ids=["zip", "tar", "xz"],
)
def test_an_archive_that_unpacks_to_too_many_bytes_is_refused(
    tmp_path: Path, name: str, content: bytes
) -> None:
    with pytest.raises(DataError, match="when unpacked"):
        fetch(tmp_path, content, name, max_bytes=10**5)


def test_an_archive_of_too_many_entries_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_ENTRIES", 2)
    with pytest.raises(DataError, match="more than 2 entries"):
        fetch(tmp_path, tar(FILES), "a.tar")


def test_a_zip_whose_memory_has_no_limit_is_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npz", b"1" * 1000)
    with pytest.raises(DataError, match=r"'a.npz', packed with LZMA.* Pack it with Deflate"):
        fetch(tmp_path, content.getvalue(), "data.zip")
