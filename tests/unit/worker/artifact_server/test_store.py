"""Test how much space the keeper's files may take.

Left out: the calls of workers, and files left by an earlier keeper (tests/local/test_keeper.py).
"""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING

import pytest

from dlion_worker.artifact_server.service import _created
from dlion_worker.artifact_server.store import RESERVE_BYTES, ArtifactStore

if TYPE_CHECKING:
    from pathlib import Path

PATHS = ("state/w0/mine.npz", "state/w1/mine.npz")


@pytest.mark.parametrize("ends", ["commit", "discard"])
def test_files_that_arrive_together_must_fit_together(tmp_path: Path, ends: str) -> None:
    """Or else both end in the middle, and take the space of the records, too."""
    store = ArtifactStore(tmp_path)
    most = int(0.6 * (shutil.disk_usage(tmp_path).free - RESERVE_BYTES))
    first = store.create(PATHS[0], most)
    first.write(b"begins")
    with pytest.raises(OSError, match="do not fit"):
        store.create(PATHS[1], most)
    assert not list((tmp_path / "state/w1").iterdir())
    getattr(first, ends)()
    store.create(PATHS[1], most).discard()


def test_an_upload_that_begins_again_does_not_wait_for_its_first_try(tmp_path: Path) -> None:
    """The keeper notices after half a minute of silence that a connection is lost."""
    store = ArtifactStore(tmp_path)
    most = int(0.6 * (shutil.disk_usage(tmp_path).free - RESERVE_BYTES))
    lost = store.create(PATHS[0], most)
    again = store.create(PATHS[0], most)
    lost.discard()
    with pytest.raises(OSError, match="do not fit"):
        store.create(PATHS[1], most)
    again.discard()
    store.create(PATHS[1], most).discard()


def test_an_upload_that_began_again_takes_no_more_space(tmp_path: Path) -> None:
    """Or else the calls of one caller together fill the space of the records and of others."""
    store = ArtifactStore(tmp_path)
    earlier, again = (store.create(PATHS[0], 4) for _ in range(2))
    with pytest.raises(OSError, match="another upload of this file has begun"):
        earlier.write(b"more")
    again.write(b"last")
    again.commit()
    with pytest.raises(OSError, match="another upload of this file has begun"):
        earlier.commit()
    earlier.discard()
    assert [each.read_bytes() for each in (tmp_path / "state/w0").iterdir()] == [b"last"]


def test_uploads_that_ended_are_forgotten(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    for number in range(20):
        store.create(f"models/{number}.npz", 4).discard()
    assert len(store._partial) == 1


def test_what_has_arrived_counts_once(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    files = [store.create(path, 1000) for path in PATHS]
    for file, arrived in zip(files, (1000, 400), strict=True):
        file.write(bytes(arrived))
    assert [file.missing_bytes for file in files] == [0, 600]
    for file in files:
        file.discard()
    assert [file.missing_bytes for file in files] == [0, 0]


def test_a_file_whose_caller_vanishes_while_it_is_created_reserves_nothing(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    most = int(0.6 * (shutil.disk_usage(tmp_path).free - RESERVE_BYTES))

    async def vanish() -> None:
        with store._creating:  # the file is not created before the end of this block
            call = asyncio.create_task(_created(asyncio.to_thread(store.create, PATHS[0], most)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.sleep(0)
            assert not call.done()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(vanish())
    assert not list((tmp_path / "state/w0").iterdir())
    store.create(PATHS[1], most).discard()
