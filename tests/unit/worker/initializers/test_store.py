"""Tests of the store of downloads.

A download is complete and verified, or absent. It continues where it stopped, in the same process
or the next. Temporary failures are repeated; others end it with a remedy. Credentials are sent to
no other address. Two processes download a file once.

Left out: archives (test_archives); proxies and certificates, which belong to urllib.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlion_api.cluster_names import DOWNLOAD_CREDENTIALS
from dlion_api.errors import DataError, UnavailableError
from dlion_api.spec.initializers import Download
from dlion_worker.initializers.http_file import MAX_FAILURES, MAX_RESTARTS, HttpFile
from dlion_worker.initializers.store import DownloadStore
from file_server import ServedFile, served

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def file() -> Iterator[ServedFile]:
    with served(CONTENT) as it:
        yield it


def download(file: ServedFile, content: bytes = CONTENT) -> Download:
    return Download(url=file.url, sha256=hashlib.sha256(content).hexdigest())


def fetch(file: ServedFile, folder: Path, content: bytes = CONTENT, **more: int) -> Path:
    return DownloadStore(folder, **more).fetch(download(file, content), environment={})


def partial(file: ServedFile, folder: Path) -> Path:
    return folder / f".{download(file).sha256}.part"


def test_a_file_is_stored_by_digest_and_not_downloaded_again(
    tmp_path: Path, file: ServedFile
) -> None:
    place = fetch(file, tmp_path)
    assert (place / "data.npz").read_bytes() == CONTENT
    assert place.name == f"{download(file).sha256}-data.npz"
    assert fetch(file, tmp_path) == place
    assert len(file.requests) == 1
    assert not partial(file, tmp_path).exists()


def test_after_a_broken_connection_the_download_continues_where_it_stopped(
    tmp_path: Path, file: ServedFile
) -> None:
    file.failures = ["cut"]
    progress: list[tuple[int, int | None]] = []
    source = HttpFile(file.url, pause=lambda _s: None)
    source.save(tmp_path / "part", max_bytes=10**9, on_progress=lambda *each: progress.append(each))
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert [each.get("Range") for each in file.requests] == [None, f"bytes={len(CONTENT) // 2}-"]
    assert progress[0] == (0, len(CONTENT))
    assert progress[-1] == (len(CONTENT), len(CONTENT))


def test_the_next_process_continues_where_the_last_one_stopped(
    tmp_path: Path, file: ServedFile
) -> None:
    partial(file, tmp_path).write_bytes(CONTENT[:1000])
    fetch(file, tmp_path)
    assert [each["Range"] for each in file.requests] == ["bytes=1000-"]


@pytest.mark.parametrize("beginning", [b"another file", CONTENT + b"more", CONTENT])
def test_a_wrong_beginning_is_discarded(tmp_path: Path, file: ServedFile, beginning: bytes) -> None:
    partial(file, tmp_path).write_bytes(beginning)
    assert (fetch(file, tmp_path) / "data.npz").read_bytes() == CONTENT
    assert len(file.requests) == (1 if beginning == CONTENT else 2)


def test_a_range_that_was_not_requested_is_refused(tmp_path: Path, file: ServedFile) -> None:
    file.failures = ["cut", "shift"]
    HttpFile(file.url, pause=lambda _s: None).save(
        tmp_path / "part", max_bytes=10**9, on_progress=lambda *_: None
    )
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert len(file.requests) == 3


def test_another_name_of_the_same_file_has_its_own_folder(tmp_path: Path) -> None:
    with served(CONTENT) as first, served(CONTENT, "other.npz") as second:
        fetch(first, tmp_path)
        assert (fetch(second, tmp_path) / "other.npz").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_the_whole_file_again(
    tmp_path: Path, file: ServedFile
) -> None:
    file.has_ranges, file.failures = False, ["cut"]
    HttpFile(file.url, pause=lambda _s: None).save(
        tmp_path / "part", max_bytes=10**9, on_progress=lambda *_: None
    )
    assert (tmp_path / "part").read_bytes() == CONTENT


@pytest.mark.parametrize("ranges", ["false", "none"])
def test_a_server_that_always_starts_from_the_beginning_fails_the_download(
    tmp_path: Path, file: ServedFile, ranges: str
) -> None:
    """Each cut is a byte after the one before, or at the same place after a false range."""
    if ranges == "none":
        file.has_ranges, file.failures = False, [f"cut {100 + n}" for n in range(99)]
    else:
        file.failures = ["cut", "shift"] * 50
    waits: list[float] = []
    with pytest.raises(UnavailableError, match="retry"):
        HttpFile(file.url, pause=waits.append).save(
            tmp_path / "part", max_bytes=10**9, on_progress=lambda *_: None
        )
    assert len(file.requests) <= MAX_RESTARTS + 2


def test_after_a_reset_connection_the_download_continues_where_it_stopped(
    tmp_path: Path, file: ServedFile
) -> None:
    file.failures = ["reset"]
    HttpFile(file.url, pause=lambda _s: None).save(
        tmp_path / "part",
        max_bytes=10**9,
        on_progress=lambda done, _total: file.received.set() if done == len(CONTENT) // 2 else None,
    )
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert file.requests[1]["Range"] == f"bytes={len(CONTENT) // 2}-"


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504, 507, 509, 522, 599])
def test_a_temporary_failure_is_repeated(tmp_path: Path, file: ServedFile, code: int) -> None:
    file.failures = [code] * MAX_FAILURES
    waits: list[float] = []
    HttpFile(file.url, pause=waits.append).save(
        tmp_path / "part", max_bytes=10**9, on_progress=lambda *_: None
    )
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert len(waits) == MAX_FAILURES
    assert waits[-1] > 4 * waits[0]


def test_a_lasting_failure_ends_the_download_and_keeps_its_part(
    tmp_path: Path, file: ServedFile
) -> None:
    file.failures = ["cut", *[503] * 99]
    with pytest.raises(UnavailableError, match=r"HTTP 503 .* retry: it continues"):
        HttpFile(file.url, pause=lambda _s: None).save(
            tmp_path / "part", max_bytes=10**9, on_progress=lambda *_: None
        )
    assert len(file.requests) == MAX_FAILURES + 1
    assert (tmp_path / "part").read_bytes() == CONTENT[: len(CONTENT) // 2]


def test_a_server_that_sends_single_bytes_at_intervals_fails_the_download(
    tmp_path: Path, file: ServedFile
) -> None:
    file.failures = ["cut 1"] * 99
    times_s = itertools.count(step=29)
    source = HttpFile(file.url, pause=lambda _s: None, clock=lambda: 10 * next(times_s))
    with pytest.raises(UnavailableError, match=r"only \d+ bytes in 290 s; 9 requests failed"):
        source.save(tmp_path / "part", max_bytes=10**9, on_progress=lambda *_: None)


def test_an_unreachable_server_is_called_again(tmp_path: Path) -> None:
    with served(b"") as gone:
        pass
    waits: list[float] = []
    with pytest.raises(UnavailableError, match="refused"):
        HttpFile(gone.url, pause=waits.append).save(
            tmp_path / "part", max_bytes=1, on_progress=lambda *_: None
        )
    assert len(waits) == MAX_FAILURES


@pytest.mark.parametrize(
    ("code", "words"),
    [(404, "HTTP 404 Not Found. Correct the address"), (410, "HTTP 410"), (401, "Name a Secret"),
     (501, "HTTP 501"), (505, "HTTP 505"),
     (403, "token, or username and password")],
)  # fmt: skip
def test_a_permanent_failure_ends_the_download_at_once(
    tmp_path: Path, file: ServedFile, code: int, words: str
) -> None:
    file.failures = [code]
    with pytest.raises(DataError, match=words):
        fetch(file, tmp_path)
    assert len(file.requests) == 1


@pytest.mark.parametrize("url", ["http://a:b/c", "http://[1:2]/a", "http://a..b/c"])
def test_an_invalid_address_ends_the_download_at_once(tmp_path: Path, url: str) -> None:
    source = HttpFile(url, pause=lambda _s: pytest.fail("a retry"))
    with pytest.raises(DataError, match="Correct the address"):
        source.save(tmp_path / "part", max_bytes=1, on_progress=lambda *_: None)


def test_another_digest_ends_the_download_and_leaves_no_file(
    tmp_path: Path, file: ServedFile
) -> None:
    with pytest.raises(DataError, match=r"another SHA-256 .* Correct url or sha256"):
        fetch(file, tmp_path, b"something else")
    assert [each.name for each in tmp_path.iterdir() if not each.name.endswith(".lock")] == []


@pytest.mark.parametrize("has_length", [True, False])
def test_a_file_above_the_limit_is_refused(
    tmp_path: Path, file: ServedFile, has_length: bool
) -> None:
    if not has_length:
        partial(file, tmp_path).write_bytes(CONTENT[:-1])
    with pytest.raises(DataError, match="allowed: 1000 bytes"):
        fetch(file, tmp_path, max_bytes=1000)


def test_credentials_are_sent_only_to_the_address(tmp_path: Path, file: ServedFile) -> None:
    with served(CONTENT) as other:
        file.authorization, file.failures = "Bearer secret", ["redirect"]
        file.redirect_to = other.url
        HttpFile(file.url, "Bearer secret").save(
            tmp_path / "part", max_bytes=10**9, on_progress=lambda *_: None
        )
    assert file.requests[0]["Authorization"] == "Bearer secret"
    assert "Authorization" not in other.requests[0]


@pytest.mark.parametrize(
    ("code", "authorization", "words"),
    [(403, "", "may have expired: get a new one. Else: Name a Secret"),
     (400, "", "may have expired: get a new one. Else: Correct the address"),
     (401, "Bearer a", "Else: Correct the credentials"), (404, "", "404 [^.]*. Correct the add")],
)  # fmt: skip
def test_a_presigned_address_may_have_expired(
    tmp_path: Path, file: ServedFile, code: int, authorization: str, words: str
) -> None:
    file.failures = [code]
    with pytest.raises(DataError, match=words):
        HttpFile(f"{file.url}?signature=1", authorization).save(
            tmp_path / "part", max_bytes=1, on_progress=lambda *_: None
        )


def test_credentials_stay_within_their_origin(tmp_path: Path, file: ServedFile) -> None:
    file.authorization, file.failures = "Bearer secret", ["redirect"]
    file.redirect_to = file.url
    HttpFile(file.url, "Bearer secret").save(
        tmp_path / "part", max_bytes=10**9, on_progress=lambda *_: None
    )
    assert (tmp_path / "part").read_bytes() == CONTENT


def test_a_download_without_a_secret_gets_no_credentials(tmp_path: Path, file: ServedFile) -> None:
    environment = dict.fromkeys(DOWNLOAD_CREDENTIALS.values(), "secret")
    DownloadStore(tmp_path).fetch(download(file), environment=environment)
    assert "Authorization" not in file.requests[0]


def test_no_header_is_in_a_message(tmp_path: Path, file: ServedFile) -> None:
    with pytest.raises(DataError) as caught:
        HttpFile(file.url, "Bearer abc\nSECRET").save(
            tmp_path / "part", max_bytes=1, on_progress=lambda *_: None
        )
    assert "SECRET" not in str(caught.value)


def test_no_query_is_in_a_message(tmp_path: Path, file: ServedFile) -> None:
    file.failures = [404]
    signed = Download(url=f"{file.url}?signature=secret", sha256="0" * 64)
    with pytest.raises(DataError) as caught:
        DownloadStore(tmp_path).fetch(signed, environment={})
    assert "secret" not in str(caught.value)


def test_a_truncated_answer_without_a_length_is_repeated_once(
    tmp_path: Path, file: ServedFile
) -> None:
    file.has_length, file.failures = False, ["cut"]
    assert (fetch(file, tmp_path) / "data.npz").read_bytes() == CONTENT
    file.failures = ["cut"] * 9
    with pytest.raises(DataError, match="another SHA-256"):
        fetch(file, tmp_path / "again")
    assert len(file.requests) == 4


def test_files_are_on_disk_before_they_count(
    tmp_path: Path, file: ServedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []
    monkeypatch.setattr(
        os, "sync", lambda: found.append([p.parent.name for p in tmp_path.rglob("data.npz")])
    )
    fetch(file, tmp_path)
    (names,) = found
    assert [name.startswith(f".{download(file).sha256}.") for name in names] == [True]


def test_two_concurrent_processes_download_a_file_once(tmp_path: Path, file: ServedFile) -> None:
    threads = [threading.Thread(target=fetch, args=(file, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(file.requests) == 1


def test_parts_left_by_a_killed_process_are_removed(tmp_path: Path, file: ServedFile) -> None:
    left = tmp_path / f".{download(file).sha256}.abc"
    left.mkdir()
    (left / "data.npz").write_bytes(b"half")
    fetch(file, tmp_path)
    assert not left.exists()
