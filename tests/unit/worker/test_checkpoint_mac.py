"""Tests of the MAC of a worker's checkpoint.

A checkpoint is read with the key that it was saved with. Refused are: any byte changed, any number
of bytes removed or added, another key (of another rank, run or job), and no MAC, as in files of
earlier releases. Nothing is parsed before. A file of an insider, with a valid MAC, has the limits
of one without. Files are read and written in pieces.

Left out: where keys come from (tests/unit/operator/pki/test_checkpoint_keys), what follows a
refusal (test_saving, tests/local/test_checkpoint_macs).
"""

from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dlion_worker.checkpoint_mac import MAC_BYTES, MacWriter, has_valid_mac
from dlion_worker.training.snapshot import (
    DamagedCheckpointError,
    load_checkpoint,
    save_checkpoint,
)

KEY, ANOTHER = b"k" * 32, b"K" * 32
MAX_BYTES = 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint that was saved with the key."""
    made = tmp_path / "state" / "checkpoint.npz"
    save_checkpoint(made, {"weights": np.arange(5, dtype=np.float32), "iteration": 3}, key=KEY)
    return made


def assert_untrusted(path: Path, key: bytes = KEY) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint\.npz is not trusted.* keeper's"):
        load_checkpoint(path, max_bytes=MAX_BYTES, key=key)


def test_a_checkpoint_is_read_with_its_key(path: Path) -> None:
    values = load_checkpoint(path, max_bytes=MAX_BYTES, key=KEY)
    assert values is not None
    assert values["weights"].tolist() == [0, 1, 2, 3, 4]
    assert int(values["iteration"]) == 3
    with np.load(path) as archive:  # it stays an archive that NumPy reads
        assert archive["weights"].tolist() == [0, 1, 2, 3, 4]


def test_every_changed_byte_is_refused(path: Path) -> None:
    saved = path.read_bytes()
    for at in range(len(saved)):
        changed = bytearray(saved)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        assert_untrusted(path)


def test_every_other_length_is_refused(path: Path) -> None:
    saved = path.read_bytes()
    for length in range(len(saved)):
        path.write_bytes(saved[:length])
        assert_untrusted(path)
    for added in (b"\0", saved[-MAC_BYTES:], saved):
        path.write_bytes(saved + added)
        assert_untrusted(path)
        path.write_bytes(added + saved)
        assert_untrusted(path)


def test_a_checkpoint_of_another_key_is_refused(path: Path) -> None:
    assert_untrusted(path, ANOTHER)


def test_a_checkpoint_without_a_mac_is_refused(path: Path) -> None:
    save_checkpoint(path, {"iteration": 3})
    assert load_checkpoint(path, max_bytes=MAX_BYTES) is not None
    assert_untrusted(path)


def test_nothing_is_parsed_before_the_mac_is_verified(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("it is opened"))
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("it is loaded"))
    assert_untrusted(path, ANOTHER)


def test_an_insiders_checkpoint_has_the_limits_of_any(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    with path.open("wb") as file:
        writer = MacWriter(file, KEY)
        np.savez_compressed(writer, weights=np.zeros(100 * 2**20, np.uint8))
        writer.finish()
    with pytest.raises(DamagedCheckpointError, match=r"once inflated; allowed: up to 1048576"):
        load_checkpoint(path, max_bytes=MAX_BYTES, key=KEY)


def test_a_file_is_read_and_written_in_pieces(tmp_path: Path) -> None:
    path, weights = tmp_path / "checkpoint.npz", np.zeros(2**24, np.float32)
    tracemalloc.start()
    try:
        save_checkpoint(path, {"weights": weights}, key=KEY)
        with path.open("rb") as file:
            assert has_valid_mac(file, KEY)
            assert file.tell() == 0
        assert tracemalloc.get_traced_memory()[1] < weights.nbytes / 2
    finally:
        tracemalloc.stop()
