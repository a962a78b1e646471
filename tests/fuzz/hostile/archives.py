"""Damaged `.npz` files of DLion's own: checkpoints, and snapshots of replicas.

The result must be `DataError` or arrays. No object is unpickled, and the claims of a header cost no
memory.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_worker.checkpoint_mac import MacWriter
from dlion_worker.evaluator.snapshot_files import ReplicaSnapshot, take_snapshots, write_snapshot
from dlion_worker.training.snapshot import load_checkpoint, save_checkpoint
from hostile import bending

HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (10**12,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': 3, }",
    "{'descr': '<f4', 'fortran_order': True, 'shape': (0, 4611686018427387904), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<V1000000000', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<U536870911', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': [('a', '<f4', (99999999,))], 'fortran_order': False, 'shape': (3,), }",
    "{'descr': [('a', '<f4'), ('a', '<f4')], 'fortran_order': False, 'shape': (3,), }",
    "{'descr': [1], 'fortran_order': False, 'shape': (3,), }",
    "{'descr': {}, 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<M8[x]', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<f4', 'fortran_order': False}",
    "{'descr': '<f4', 'fortran_order': 1, 'shape': (3,), 'x': 1}",
    "[1, 2", "(", "'", "\x00", "{" * 3000, "(" * 300, "1" * 9000, "", "__import__('os')", "{1L: 2}",
    "{'descr': '\\x', ", "'''", "  1\n 2", "{[]: 1}", "{'descr': -[]}", "1\n\t2\n 3L",
)  # fmt: skip


@functools.cache
def valid_members() -> tuple[tuple[str, bytes], ...]:
    """Arrays as in an archive: floats, counters, a text."""
    arrays = {
        "weights": np.arange(50, dtype=np.float32),
        "iteration": np.asarray(3),
        "policies.mode": np.asarray("bounded"),
    }
    made = []
    for name, array in arrays.items():
        file = io.BytesIO()
        np.lib.format.write_array(file, array, allow_pickle=False)
        made.append((f"{name}.npy", file.getvalue()))
    return tuple(made)


def altered_member(rng: random.Random, data: bytes) -> bytes:
    """Return one array's bytes, mostly with another header."""
    match rng.randrange(4):
        case 0:
            return bending.bytes_of(rng, data)
        case 1:
            at = rng.randrange(min(len(data), 128))
            return data[:at] + rng.randbytes(1) + data[at + 1 :]
        case 2:
            return b"\x93NUMPY\x01\x00" + pickle.dumps(print)
        case _:
            text = rng.choice(HEADERS).encode() + b"\n"
            version = rng.choice((1, 1, 2, 3, 9))
            size = struct.pack("<H" if version == 1 else "<I", len(text))
            return b"\x93NUMPY" + bytes([version, 0]) + size + text + bytes(200)


def altered_archive(rng: random.Random, members: tuple[tuple[str, bytes], ...]) -> bytes:
    """Return an archive of these arrays with one of them, a name, or the archive's own bytes
    altered.
    """
    changed = list(members)
    at = rng.randrange(len(changed))
    what = rng.randrange(6)
    if what in (0, 1):
        changed[at] = (changed[at][0], altered_member(rng, changed[at][1]))
    elif what == 2:
        changed[at] = (rng.choice(("x", "../up.npy", "a" * 3000, "é.npy")), changed[at][1])
    elif what == 3:
        del changed[at]
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2,
                            zipfile.ZIP_LZMA))  # fmt: skip
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in changed:
            archive.writestr(name, data)
    data = file.getvalue()
    if what in (4, 5):
        return bending.until_different(data, lambda: altered_container(rng, data))
    return data


def altered_container(rng: random.Random, data: bytes) -> bytes:
    """Return an archive with some of its own bytes altered."""
    if rng.random() < 0.5:
        return bending.bytes_of(rng, data)
    # A field of the central directory: sizes, offsets, flags (encryption), methods.
    start = data.rfind(b"PK\x01\x02")
    at = start + rng.choice((6, 8, 10, 16, 20, 24, 28, 30, 32, 42))
    number = rng.choice((*bending.NUMBERS, 8, 9, 12, 14, 99))
    field = struct.pack("<I", number)[: rng.choice((2, 4))]
    return data[:at] + field + data[at + len(field) :]


@contextlib.contextmanager
def ignore_numpy_warnings() -> Iterator[None]:
    """Ignore NumPy's warnings of headers that Python 2 may have written, and of types with outdated
    names (`<a8`). They are not a defect.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def require_named(path: Path, error: DataError) -> None:
    """Check that the error names the file."""
    assert path.name in str(error)


MAX_CHECKPOINT_BYTES = 1 << 20
KEY = b"k" * 32


@functools.cache
def archive_of(members: tuple[tuple[str, bytes], ...]) -> bytes:
    """Return an archive of these arrays."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def with_mac(data: bytes) -> bytes:
    """Return a file's bytes with the MAC of a worker that has the key."""
    file = io.BytesIO()
    writer = MacWriter(file, KEY)
    writer.write(data)
    writer.finish()
    return file.getvalue()


@ignore_numpy_warnings()
def attack_checkpoint(rng: random.Random, folder: Path) -> str | None:
    """Read one damaged checkpoint; a new one then replaces it.

    A third has no MAC, as with `dlion run`. A third has a valid one, as an insider's. A third was
    altered after its MAC was made: all of them are refused.
    """
    path = folder / "checkpoint.npz"
    key, is_altered_later = rng.choice(((b"", False), (KEY, False), (KEY, True)))
    if is_altered_later:
        valid = with_mac(archive_of(valid_members()))
        path.write_bytes(bending.until_different(valid, lambda: altered_container(rng, valid)))
    else:
        altered = altered_archive(rng, valid_members())
        path.write_bytes(with_mac(altered) if key else altered)
    try:
        values = load_checkpoint(path, max_bytes=MAX_CHECKPOINT_BYTES, key=key)
        assert not is_altered_later
        assert values is not None
        assert all(isinstance(value, np.ndarray) for value in values.values())
        assert sum(value.nbytes for value in values.values()) <= MAX_CHECKPOINT_BYTES
        word = "taken"
    except DataError as error:
        require_named(path, error)
        word = "refused"
    if rng.random() < 0.02:  # it waits for the disk
        save_checkpoint(path, {"iteration": 4}, key=key)
        again = load_checkpoint(path, max_bytes=MAX_CHECKPOINT_BYTES, key=key)
        assert again is not None
        assert int(again["iteration"]) == 4
    return word


@ignore_numpy_warnings()
def attack_replica(rng: random.Random, folder: Path) -> str | None:
    """Read one damaged snapshot of a replica on its way to the evaluator."""
    write_snapshot(folder, _REPLICA)
    (path,) = folder.glob("*.npz")
    with zipfile.ZipFile(path) as archive:
        members = tuple((name, archive.read(name)) for name in archive.namelist())
    if rng.random() < 0.3:
        about = np.asarray([rng.choice((0, -1, 1e300, np.nan, np.inf)) for _ in range(
            rng.choice((0, 3, 4, 4, 5)))])  # fmt: skip
        file = io.BytesIO()
        np.lib.format.write_array(file, about, allow_pickle=False)
        members = (("about.npy", file.getvalue()), *members[1:])
    path.write_bytes(altered_archive(rng, members))
    try:
        for replica in take_snapshots(folder):
            assert replica.weights_D.dtype != object
        return "taken"
    except DataError:
        return "refused"


_REPLICA = ReplicaSnapshot(Rank(1), 3, 24, 1.5, np.ones(5, np.float32), np.zeros(2, np.float32))
