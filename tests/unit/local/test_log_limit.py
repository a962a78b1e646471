"""Facts: a log that is too long keeps its last whole lines, in order, while its writer goes on; a
shorter one stays as it is.

Left out: whole runs, and what reads the logs meanwhile (test_restart_watcher.py).
"""

from pathlib import Path

import pytest

from dlion_local.runner.log_limit import NOTE, cut_log


def test_the_last_whole_lines_stay_and_the_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    lines = b"".join(b"line %05d\n" % number for number in range(1000))
    with path.open("ab", buffering=0) as writer:
        writer.write(lines)
        dropped = cut_log(path, max_bytes=4000, kept_bytes=2005)
        assert path.read_bytes() == NOTE + lines[-11 * 182 :]
        assert dropped == len(lines) - path.stat().st_size
        writer.write(b"more\n")
    assert path.read_bytes() == NOTE + lines[-11 * 182 :] + b"more\n"
    assert cut_log(path, max_bytes=4000, kept_bytes=2005) == 0


def test_of_a_line_without_end_its_end_stays(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.write_bytes(b"x" * 5000 + b"y" * 100)
    cut_log(path, max_bytes=4000, kept_bytes=100)
    assert path.read_bytes() == NOTE + b"y" * 100


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 5000)
    (tmp_path / "worker-0.log").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        cut_log(tmp_path / "worker-0.log", max_bytes=4000, kept_bytes=100)
    assert other.stat().st_size == 5000
