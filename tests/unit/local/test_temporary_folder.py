"""Test temporary folders.

A folder is removed at the end of its block. It stays if its process is killed; the next run of the
same user then removes it. A folder with a living owner stays. So do a result folder of such a name,
a link, another user's folder, and foreign files in place of the owner's.

Left out: the runs that use it (tests/local/test_interrupts.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlion_local.temporary_folder import OWNER, remove_abandoned_folders, temporary_folder
from dlion_results.run_folder.lock import FolderLock

HOLDS = """
import time
from dlion_local.temporary_folder import temporary_folder
with temporary_folder() as folder:
    (folder / "w0").mkdir()
    (folder / "w0" / "token").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a process with a temporary folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().rstrip())
        process.kill()


def abandoned(folder: Path) -> Path:
    folder.mkdir()
    (folder / OWNER).touch()
    return folder


def test_a_folder_is_removed_at_the_end_of_its_block(root: Path) -> None:
    with temporary_folder() as folder:
        assert folder.parent == root
        assert remove_abandoned_folders() == []
        (folder / "file").touch()
    assert list(root.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed(
    root: Path, holder: tuple[subprocess.Popen[str], Path]
) -> None:
    process, folder = holder
    assert remove_abandoned_folders() == [], "the owner is alive"
    assert (folder / "w0" / "token").exists()
    process.kill()
    process.wait()
    assert (folder / "w0" / "token").exists()
    assert remove_abandoned_folders() == [folder]
    assert list(root.iterdir()) == []


def test_result_folders_and_those_without_an_owner_stay(root: Path) -> None:
    (root / "dlion-mnist").mkdir()
    FolderLock(root / "dlion-mnist").release()
    (root / "dlion-empty").mkdir()
    abandoned(root / "other-tool")
    assert remove_abandoned_folders() == []
    assert len([*root.iterdir()]) == 3


def test_links_and_foreign_owners_files_stay(root: Path) -> None:
    elsewhere = abandoned(root / "elsewhere")
    (root / "dlion-link").symlink_to(elsewhere, target_is_directory=True)
    for name in ("dlion-pipe", "dlion-folder", "dlion-to-a-link"):
        (root / name).mkdir()
    os.mkfifo(root / "dlion-pipe" / OWNER)
    (root / "dlion-folder" / OWNER).mkdir()
    (root / "dlion-to-a-link" / OWNER).symlink_to(elsewhere / OWNER)
    (root / "dlion-file").touch()
    assert remove_abandoned_folders() == []
    assert (elsewhere / OWNER).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's folder")
def test_folders_of_other_users_stay(root: Path) -> None:
    os.chown(abandoned(root / "dlion-theirs"), 1234, -1)
    os.chown(abandoned(root / "dlion-planted") / OWNER, 1234, -1)
    assert remove_abandoned_folders() == []
