"""Tests of saved states.

A worker's state is restored from its bytes. Bytes of a peer with another length or with values that
are not finite are refused. A checkpoint replaces the old one completely or not at all. A damaged
checkpoint is named.
"""

from __future__ import annotations

import errno
import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.errors import ContractError, DataError
from dlion_worker.training.snapshot import (
    TrainingState,
    load_checkpoint,
    pack,
    save_checkpoint,
    set_aside,
    storage_error_message,
    unpack,
)

MAX_BYTES = 2**20
STATE = TrainingState(
    np.arange(5, dtype=np.float32), np.ones(2, np.float32), np.full(3, 7, np.float32)
)


def same(a: TrainingState, b: TrainingState) -> bool:
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in vars(a))


def test_a_state_is_restored_from_its_bytes() -> None:
    assert same(unpack(pack(STATE, weights_only=False), STATE, weights_only=False), STATE)


def test_weights_alone_do_not_change_the_optimizer() -> None:
    other = TrainingState(STATE.weights_D * 2, STATE.model_state_S * 2, np.zeros(3, np.float32))
    taken = unpack(pack(other, weights_only=True), STATE, weights_only=True)
    assert same(taken, TrainingState(other.weights_D, other.model_state_S, STATE.optimizer_M))


@given(st.binary(max_size=80), st.booleans())
def test_hostile_bytes_are_refused_or_finite(payload: bytes, weights_only: bool) -> None:
    try:
        taken = unpack(payload, STATE, weights_only=weights_only)
    except ContractError:
        return
    assert all(np.isfinite(values).all() for values in vars(taken).values())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    poisoned = TrainingState(STATE.weights_D.copy(), STATE.model_state_S, STATE.optimizer_M)
    poisoned.weights_D[3] = value
    with pytest.raises(ContractError, match="finite"):
        unpack(pack(poisoned, weights_only=False), STATE, weights_only=False)


def test_a_checkpoint_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "state" / "checkpoint.npz"
    save_checkpoint(path, {"weights": STATE.weights_D, "iteration": 3, "policies.mode": "bounded"})
    values = load_checkpoint(path, max_bytes=MAX_BYTES)
    assert values is not None
    assert np.array_equal(values["weights"], STATE.weights_D)
    assert (int(values["iteration"]), str(values["policies.mode"])) == (3, "bounded")


def test_without_a_checkpoint_the_result_is_none(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none.npz", max_bytes=MAX_BYTES) is None


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"x" * 99])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "checkpoint.npz"
    save_checkpoint(path, {"weights": STATE.weights_D})
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=r"checkpoint\.npz"):
        load_checkpoint(path, max_bytes=MAX_BYTES)


def test_a_damaged_checkpoint_is_set_aside_without_replacing_another(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    for content in (b"one", b"two"):
        path.write_bytes(content)
        set_aside(path)
    assert not path.exists()
    assert (tmp_path / "checkpoint.npz.damaged").read_bytes() == b"one"
    assert (tmp_path / "checkpoint.npz.damaged-2").read_bytes() == b"two"


def test_a_member_that_is_not_an_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.npy", b"no array")
    with pytest.raises(DataError, match=r"checkpoint\.npz .*not an array"):
        load_checkpoint(path, max_bytes=MAX_BYTES)


def test_an_archive_that_inflates_beyond_the_models_size_is_refused_unread(tmp_path: Path) -> None:
    """100 MB of zeros take 100 kB in the file."""
    path = tmp_path / "checkpoint.npz"
    np.savez_compressed(path, weights=np.zeros(100 * 2**20, np.uint8))
    assert path.stat().st_size < 2**18
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"once inflated; allowed: up to 1048576"):
            load_checkpoint(path, max_bytes=MAX_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_directory_false", [False, True])
def test_an_array_that_is_longer_than_its_member_is_refused(
    tmp_path: Path, is_directory_false: bool
) -> None:
    """One header claims a gigabyte; one directory claims less than the file has."""
    path = tmp_path / "checkpoint.npz"
    member = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (2**28,)}
    if is_directory_false:
        np.save(member, np.zeros(2**22, np.uint8))
    else:
        np.lib.format.write_array_header_1_0(member, header)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights.npy", member.getvalue())
    if is_directory_false:
        data = path.read_bytes()
        true = struct.pack("<I", len(member.getvalue()))
        path.write_bytes(data.replace(true, struct.pack("<I", 200)))
    with pytest.raises(DataError, match=r"an array of|Bad CRC"):
        load_checkpoint(path, max_bytes=MAX_BYTES)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.npz"
    save_checkpoint(path, {"weights": STATE.weights_D})
    before = path.read_bytes()
    path.with_suffix(".writing").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space") as caught:
        save_checkpoint(path, {"weights": STATE.weights_D * 2})
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert not path.with_suffix(".writing").is_symlink()
    assert "Free some space" in storage_error_message(caught.value)
