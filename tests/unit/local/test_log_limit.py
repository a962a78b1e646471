"""Test the size limit of logs.

A log over the limit keeps its last whole lines in order while its writer continues. A note states
how much all truncations have dropped. A shorter log, and one that is being read, stay unchanged.

Left out: whole runs, and readers of the logs (test_restart_watcher.py).
"""

from pathlib import Path

import pytest

from dlion_local.runner.log_limit import cut_log, read_beginning, uncut


def note(dropped: int) -> bytes:
    return b"(%d earlier bytes were dropped: the log is too long)\n" % dropped


def test_the_last_whole_lines_stay_and_the_writer_continues(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    lines = b"".join(b"line %05d\n" % number for number in range(1000))
    with path.open("ab", buffering=0) as writer:
        writer.write(lines)
        dropped = cut_log(path, max_bytes=4000, kept_bytes=2005)
        kept = note(len(lines) - 11 * 182) + lines[-11 * 182 :]
        assert path.read_bytes() == kept
        assert dropped == len(lines) - path.stat().st_size
        writer.write(b"more\n")
    assert path.read_bytes() == kept + b"more\n"
    assert cut_log(path, max_bytes=4000, kept_bytes=2005) == 0


def test_the_end_of_an_endless_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.write_bytes(b"x" * 5000 + b"y" * 100)
    cut_log(path, max_bytes=4000, kept_bytes=100)
    assert path.read_bytes() == note(5000) + b"y" * 100


def test_the_note_sums_all_truncations(tmp_path: Path) -> None:
    path, whole = tmp_path / "worker-0.log", b""
    for number in range(40):
        more = b"".join(b"line %d of %d\n" % (each, number) for each in range(60))
        whole += more
        with path.open("ab") as writer:
            writer.write(more)
        cut_log(path, max_bytes=4000, kept_bytes=2005)
        with path.open("rb") as log:
            beginning = read_beginning(log.fileno())
            log.seek(beginning.note_bytes)
            assert whole[beginning.dropped_bytes :] == log.read()
            end = log.tell()
        assert beginning.place_of(end) == len(whole)
        assert beginning.position_of(len(whole)) == end
        assert beginning.position_of(beginning.dropped_bytes - 1) == 0 or not number
    assert beginning.dropped_bytes > len(whole) / 2


def test_a_log_that_is_being_read_is_truncated_later(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.write_bytes(b"a line\n" * 1000)
    with path.open("rb") as reader:
        with uncut(reader.fileno()):
            assert cut_log(path, max_bytes=4000, kept_bytes=2005) == 0
        assert cut_log(path, max_bytes=4000, kept_bytes=2005) > 0


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 5000)
    (tmp_path / "worker-0.log").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        cut_log(tmp_path / "worker-0.log", max_bytes=4000, kept_bytes=100)
    assert other.stat().st_size == 5000
