"""Test the lock that runs hold while they choose a subnet.

One holder at a time. A process that waits too long gets an error with a remedy. Only the file's
owner can open it. A lock of its folder, which any user may take, has no effect.

Left out: two networks that start at once (tests/local/test_network_namespaces.py).
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from dlion_api.errors import UnavailableError
from dlion_local.emulation.network.namespaces import subnet_lock

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 0.1
LONG_S = 30.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "subnets.lock"


def test_only_its_owner_can_open_it(path: Path) -> None:
    before = os.umask(0)
    try:
        with subnet_lock(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_lock_that_is_held_for_long_is_an_error_that_names_the_file(path: Path) -> None:
    with (
        subnet_lock(path),
        pytest.raises(UnavailableError, match=r"for 0\.1 s.*`fuser -v .*subnets\.lock` names it"),
        subnet_lock(path, WAIT_S),
    ):
        pytest.fail("two hold it")
    with subnet_lock(path, WAIT_S):  # the file stays, and is free again
        assert path.exists()


def test_the_next_one_gets_it_once_it_is_free(path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with subnet_lock(path, LONG_S):
            entered.set()

    waiting = threading.Thread(target=enter)
    with subnet_lock(path):
        waiting.start()
        assert not entered.wait(WAIT_S)
    waiting.join(LONG_S)
    assert entered.is_set()


def test_a_lock_of_the_folder_delays_no_run(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with subnet_lock(path, WAIT_S):
            pass
    finally:
        os.close(folder)


@pytest.mark.parametrize("kind", ["link", "folder", "missing parent"])
def test_what_is_no_file_is_refused(path: Path, kind: str) -> None:
    elsewhere = path.with_name("elsewhere")
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "folder":
        path.mkdir()
    else:
        path = path / "below"
    with (
        pytest.raises(UnavailableError, match=r"cannot open .*lock"),
        subnet_lock(path, WAIT_S),
    ):
        pytest.fail("it was locked")
    assert not elsewhere.exists()
