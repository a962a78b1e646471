"""Facts: tar and zip archives are unpacked with their folders; other files stay as they are; what
would leave the folder, is no plain file, or is too much, ends it with the name and what is wrong;
a damaged archive too; of a refused archive nothing stays.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
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


@pytest.mark.parametrize("name", ["data.npz", "model.keras"])
def test_a_zip_by_another_name_stays_as_it_is(tmp_path: Path, name: str) -> None:
    content = zipped(FILES)
    assert (fetch(tmp_path, content, name) / name).read_bytes() == content


OUTSIDE, NO_FILE = "no path within a folder", "no file or folder"
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
    "no archive": ("a.tar", b"no archive", DAMAGED),
    "half an archive": ("a.tar", tar(FILES)[:700], DAMAGED),
    "half of a packed one": ("a.tar.gz", tar(FILES, "w:gz")[:60], DAMAGED),
    "a parent in a zip": ("a.zip", zipped({"../evil": b"1"}), OUTSIDE),
    "backslashes": ("a.zip", zipped({"a\\..\\evil": b"1"}), OUTSIDE),
    "a link in a zip": ("a.zip", zipped({"a": b"/etc/passwd"}, 0o120777), NO_FILE),
    "a password": ("a.zip", encrypted(), DAMAGED),
    "half a zip": ("a.zip", zipped(FILES)[:80], DAMAGED),
    "nothing": ("a.zip", b"", DAMAGED),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    name, content, words = HOSTILE[case]
    folder = tmp_path / "downloads"
    with pytest.raises(DataError, match=words):
        fetch(folder, content, name)
    assert not [each for each in folder.iterdir() if each.is_dir()]
    assert [each.name for each in tmp_path.iterdir()] == ["downloads"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.zip", zipped({"a": bytes(10**6)})), ("a.tar.gz", tar({"a": bytes(10**6)}, "w:gz"))],
    ids=["zip", "tar"],
)
def test_an_archive_that_unpacks_to_too_much_is_refused(
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
