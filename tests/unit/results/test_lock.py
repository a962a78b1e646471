"""Tests of the lock of a result folder.

A foreign file with the lock's name, or a link, is never written or removed, and a run in its folder
is refused. An earlier run's lock is taken over. Other processes find the holder of a lock and do
not take it from a run. Files that a client writes beside a new run do not prevent it.

Left out: which run gets the lock (test_folder.py).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.lock import RESERVED, FolderLock, lock_holder
from synthetic_run import Story, description

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STORY = Story(workers=2, seconds=20, killed=None)


def put_in_place_of_a_lock(kind, path, victim):
    """Put a foreign object at `path`; `victim` is another foreign file."""
    match kind:
        case "file":
            path.write_text("precious\n")
        case "long number":
            path.write_text("1" * 21)
        case "link":
            path.symlink_to(victim)
        case "link to a lock":
            victim.write_text("12\n")
            path.symlink_to(victim)
        case "link to nothing":
            path.symlink_to(victim.with_name("none"))
        case "hard link":
            path.hardlink_to(victim)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(path))


NO_LOCKS = ("file", "long number", "link", "link to a lock", "link to nothing", "hard link",
            "folder", "pipe", "socket")  # fmt: skip


@pytest.mark.parametrize("kind", NO_LOCKS)
def test_a_foreign_file_is_not_mistaken_for_a_lock_and_does_not_change(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
    path, victim = Path("run", "run.lock"), tmp_path / "victim"
    path.parent.mkdir()
    victim.write_text("precious\n")
    put_in_place_of_a_lock(kind, path, victim)
    before = os.lstat(path), victim.read_bytes()
    with pytest.raises(SpecError, match=r"run/run\.lock: is not the lock of a run.*Move it away"):
        FolderLock(path.parent)
    with pytest.raises(SpecError, match="not empty"):
        ResultFolder.create(path.parent, description(STORY), now=NOW)
    after = os.lstat(path), victim.read_bytes()
    assert (after[0].st_mtime_ns, after[0].st_size) == (before[0].st_mtime_ns, before[0].st_size)
    assert after[1] == before[1]
    assert [each.name for each in tmp_path.iterdir() if each.name == "none"] == []


def test_a_run_is_not_resumed_with_a_foreign_file_as_lock(tmp_path):
    path = tmp_path / "run"
    with ResultFolder.create(path, description(STORY), now=NOW) as folder:
        folder.append(EventRecord(1.0, Rank(0), 1, "Something", ""))
    (path / "run.lock").write_text("precious\n")
    with pytest.raises(SpecError, match="is not the lock of a run"):
        ResultFolder.create(path, description(STORY), now=NOW, resume=True)
    assert (path / "run.lock").read_text() == "precious\n"


@pytest.mark.parametrize("content", ["", "7\n", "712", "\0\0\0\0"])
def test_the_lock_of_an_earlier_run_is_taken_over(content, tmp_path):
    (tmp_path / "run.lock").write_text(content)
    ResultFolder.create(tmp_path, description(STORY), now=NOW).close()
    assert (tmp_path / "run.lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_replaced_by_a_foreign_file_is_not_removed(tmp_path):
    path = tmp_path / "run"
    with ResultFolder.create(path, description(STORY), now=NOW) as folder:
        (path / "run.lock").unlink()
        (path / "run.lock").write_text("precious\n")
        folder.discard()
    assert [each.name for each in path.iterdir()] == ["run.lock"]
    assert (path / "run.lock").read_text() == "precious\n"


def test_other_processes_find_the_holder_of_the_lock(tmp_path):
    assert lock_holder(tmp_path) is None
    lock = FolderLock(tmp_path)
    assert lock_holder(tmp_path) == os.getpid()
    lock.release()
    assert lock_holder(tmp_path) is None


@pytest.mark.parametrize("kind", NO_LOCKS)
def test_a_foreign_file_has_no_holder(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    put_in_place_of_a_lock(kind, Path("run", "run.lock"), victim)
    assert lock_holder(Path("run")) is None


def test_a_run_waits_for_processes_that_only_read(tmp_path):
    """Each reader holds the lock for a moment."""
    FolderLock(tmp_path).release()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            lock_holder(tmp_path)
            time.sleep(0.002)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(300):
            FolderLock(tmp_path).release()
    finally:
        stop.set()
        looking.join()


def test_a_new_run_may_find_its_command(tmp_path):
    for name in sorted(RESERVED - {"run.lock"}):
        (tmp_path / name).write_text("x")
    with ResultFolder.create(tmp_path, description(STORY), now=NOW):
        pass
    assert (tmp_path / "command.log").read_text() == "x"
