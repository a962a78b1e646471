"""Hostile files of training data: `.npz`, TFRecord files, images; with TensorFlow.

The result must be a `DataError` that names the file, or samples of one shape with labels from 0.
"""

from __future__ import annotations

import functools
import io
import random
import struct
from pathlib import Path

import numpy as np
import tensorflow as tf

from dlion_api.errors import DataError
from dlion_worker.training.datasets import npz
from dlion_worker.training.datasets.dataset import Samples
from dlion_worker.training.datasets.folder import ImageSource
from dlion_worker.training.datasets.tfrecord import TFRecordSource
from hostile import bending
from hostile.archives import altered_archive, ignore_numpy_warnings, require_named

COUNT = 4


@functools.cache
def valid_arrays() -> tuple[tuple[str, bytes], ...]:
    """Members of a valid `.npz` file."""
    made = []
    x = np.arange(COUNT * 48, dtype=np.uint8).reshape(COUNT, 4, 4, 3)
    for name, array in (("x", x), ("y", np.arange(COUNT)), ("x_test", x), ("y_test", np.ones(4))):
        file = io.BytesIO()
        np.lib.format.write_array(file, array)
        made.append((f"{name}.npy", file.getvalue()))
    return tuple(made)


@functools.cache
def valid_images() -> tuple[bytes, ...]:
    """A small image in each supported format, and in other sizes and depths."""
    image = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    forms = (tf.io.encode_png(image), tf.io.encode_jpeg(image), tf.io.encode_png(image[:4]),
             tf.io.encode_png(image[..., :1]),
             tf.io.encode_png(image.astype(np.uint16)))  # fmt: skip
    header = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54 + 192, 0, 0, 54, 40, 8, 8, 1, 24, 0, 192,
                         0, 0, 0, 0)  # fmt: skip
    gif = (b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff,\x00\x00\x00\x00\x01\x00"
           b"\x01\x00\x00\x02\x02D\x01\x00;")  # fmt: skip
    return (*(form.numpy() for form in forms), header + image.tobytes(), gif)


def _altered_image(rng: random.Random) -> bytes:
    valid = rng.choice(valid_images())
    what = rng.randrange(4)
    if what == 0:  # sizes are near the beginning of every format
        at = rng.randrange(min(40, len(valid)))
        number = rng.choice((0, 1, 9, 255, 65_535, 2**31 - 1, 2**32 - 1))
        field = struct.pack(rng.choice(("<I", ">I")), number)[: rng.choice((2, 4))]
        return valid[:at] + field + valid[at + len(field) :]
    if what == 1:
        return bending.spliced(rng, valid, rng.choice(valid_images()))
    return bending.until_different(valid, lambda: bending.bytes_of(rng, valid))


def _example(image: bytes, label: int) -> bytes:
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def _records_file(path: Path, records: list[bytes]) -> bytes:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path.read_bytes()


def attack_records(rng: random.Random, folder: Path) -> str | None:
    """Read one hostile TFRecord file: its frame, one record (with valid checksums),
    or one image.
    """
    path = folder / "a.tfrecord"
    records = [_example(valid_images()[0], n) for n in range(COUNT)]
    at = rng.randrange(COUNT)
    what = rng.randrange(4)
    if what == 0:
        records[at] = bending.until_different(
            records[at], lambda: bending.bytes_of(rng, records[at])
        )
    elif what == 1:
        records[at] = _example(_altered_image(rng), rng.choice((0, 0, -1, 2**31, 2**63 - 1)))
    data = _records_file(path, records)
    if what > 1:
        data = bending.until_different(data, lambda: _altered_frame(rng, data))
    path.write_bytes(data)
    try:
        source = TFRecordSource(path)
        images = source.read(np.arange(len(source.labels)))
    except DataError as error:
        require_named(path, error)
        return "refused"
    _look_at((images, source.labels))
    return "taken"


def _altered_frame(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.5:
        return bending.bytes_of(rng, data)
    length = rng.choice((0, 1, len(data), 2**31, 2**63, 2**64 - 1, 2**64 - 16, 2**64 - 12))
    return struct.pack("<Q", length) + data[8:]


def attack_images(rng: random.Random, folder: Path) -> str | None:
    """Read one hostile image file among valid ones, or alone."""
    path = folder / "hostile.png"
    path.write_bytes(_altered_image(rng))
    other = folder / "right.png"
    other.write_bytes(valid_images()[0])
    files = rng.choice(([path], [path, other], [other, path]))
    source = ImageSource("images", [(file, 0) for file in files])
    try:
        images = source.read(np.arange(len(files)))
    except DataError:
        return "refused"
    _look_at((images, source.labels))
    return "taken"


@ignore_numpy_warnings()
def attack_npz(rng: random.Random, folder: Path) -> str | None:
    """Read one hostile `.npz` file, as training data and as held-out data."""
    path = folder / "data.npz"
    path.write_bytes(altered_archive(rng, valid_arrays()))
    word = "taken"
    for read in (npz.read_train, npz.read_evaluation):
        try:
            _look_at(read(path))
        except DataError as error:
            require_named(path, error)
            word = "refused"
    return word


def _look_at(samples: Samples) -> None:
    x, y = samples
    assert len(x) == len(y)
    assert x.dtype != object
    assert int(y.min()) >= 0
