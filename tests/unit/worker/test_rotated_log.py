"""Tests of the rotated log.

Endless output fills two files of bounded size. A reader gets its end in whole lines, also while the
files are rotated. A full disk or a missing folder loses output without an exception.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from dlion_worker.rotated_log import MAX_LOG_BYTES, RotatedLog, last_lines, read_end

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "output" / "trainer.log"


def append(path: Path, *blocks: bytes) -> None:
    with closing(RotatedLog(path)) as log:
        for block in blocks:
            log.append(block)


def size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.parent.iterdir())


def test_short_output_is_read_completely(path: Path) -> None:
    assert read_end(path) == b""
    append(path, b"one\n", b"two without an end")
    assert read_end(path) == b"one\ntwo without an end"


@pytest.mark.parametrize("block", [13, 4096, 65536, MAX_LOG_BYTES - 1, 3 * MAX_LOG_BYTES])
def test_of_endless_output_the_last_lines_are_read(path: Path, block: int) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(80_000))
    append(path, *(lines[start : start + block] for start in range(0, len(lines), block)))
    end = read_end(path)
    assert lines.endswith(b"\n" + end)
    assert MAX_LOG_BYTES - 20 < len(end) <= MAX_LOG_BYTES
    assert size(path) <= 2 * MAX_LOG_BYTES


@pytest.mark.parametrize("content", [b"x" * MAX_LOG_BYTES, b"\xff\x00\x1b[2J" * 10**6])
def test_of_an_endless_line_the_end_is_read(path: Path, content: bytes) -> None:
    append(path, content)
    assert read_end(path) == content[-MAX_LOG_BYTES:]


def test_only_whole_lines_are_left() -> None:
    line = b"y" * 99 + b"\n"
    whole = line * (MAX_LOG_BYTES // 100)
    assert last_lines(b"b" * 60 + b"\n" + whole) == whole
    padded = b"z" * (MAX_LOG_BYTES - len(whole) - 1) + b"\n" + whole
    assert last_lines(b"a\n" + padded) == padded, "the cut is at the start of a line"


def test_a_restarted_process_continues_the_file(path: Path) -> None:
    append(path, b"first\n")
    append(path, b"second\n")
    assert read_end(path) == b"first\nsecond\n"


def test_a_reader_gets_no_line_twice_while_files_are_rotated(path: Path) -> None:
    ended = threading.Event()

    def write() -> None:
        # Each block fills most of a file, so that it is rotated as often as possible.
        append(path, *(b"%099d\n" % number * 2_500 for number in range(400)))
        ended.set()

    writing = threading.Thread(target=write)
    writing.start()
    reads = 0
    while not ended.is_set():
        numbers = [int(each) for each in read_end(path).split(b"\n")[:-1]]
        assert numbers == sorted(numbers)
        assert max(Counter(numbers).values(), default=0) <= 2_500
        reads += 1
    writing.join()
    assert reads


def test_an_unwritable_folder_loses_only_output(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("a file where the folder would be")
    with closing(RotatedLog(tmp_path / "output" / "trainer.log")) as log:
        log.append(b"lost\n")
        (tmp_path / "output").unlink()
        log.append(b"kept\n")
    assert read_end(tmp_path / "output" / "trainer.log") == b"kept\n"


def test_a_full_disk_loses_only_output(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")  # each write there ends with ENOSPC
    with closing(RotatedLog(tmp_path / "full")) as log:
        for _ in range(3):
            log.append(b"lost\n")
        (tmp_path / "full").unlink()
        log.append(b"kept\n")
    assert read_end(tmp_path / "full") == b"kept\n"
