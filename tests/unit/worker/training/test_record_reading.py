"""Tests of reading records in batches.

The result equals, bit for bit, that of TensorFlow with one record at a time, for any selection,
sizes and formats. A fault in one record is reported with its number, in any batch. A file that
became shorter since it was opened is refused.

Left out: one reading of one small file (test_readers); speed (benchmarks/start_up.py).
"""

from __future__ import annotations

import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import DataError
from dlion_worker.training.datasets.tfrecord import TFRecordSource
from example_counts import examples

FORMS = ("png", "png16", "grey", "jpeg")
SHAPE = (9, 7, 3)


@dataclass(frozen=True)
class File:
    """Formats of its images, in order; extra bytes of each record; seed."""

    forms: list[str]
    ballast: int
    seed: int

    def write(self, path: Path, bad: dict[int, bytes] | None = None) -> None:
        """`bad`: what some records hold in place of their image."""
        rng = np.random.default_rng(self.seed)
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number, form in enumerate(self.forms):
                encoded = (bad or {}).get(number) or _image(form, rng)
                writer.write(_example(encoded, int(rng.integers(10)), self.ballast))


# With 300,000 extra bytes a batch has three records, with two million it has one.
files = st.builds(
    File,
    forms=st.lists(st.sampled_from(FORMS), min_size=1, max_size=14),
    ballast=st.sampled_from([0, 300_000, 2_000_000]),
    seed=st.integers(0, 2**32),
)


def _image(form: str, rng: np.random.Generator) -> bytes:
    image = rng.integers(0, 256, SHAPE, dtype=np.uint8)
    encoded = {
        "png": lambda: tf.io.encode_png(image),
        "png16": lambda: tf.io.encode_png(image.astype(np.uint16) * 255),
        "grey": lambda: tf.io.encode_png(image[..., :1]),
        "jpeg": lambda: tf.io.encode_jpeg(image),
    }[form]()
    return bytes(encoded.numpy())


def _example(encoded: bytes, label: int, ballast: int = 0) -> bytes:
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        "ballast": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes(ballast)])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def _read_naively(path: Path, index_K: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The selected images, with as many channels as the first of them, and all labels."""
    form = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }
    examples = [
        tf.io.parse_single_example(record, form) for record in tf.data.TFRecordDataset(str(path))
    ]
    chosen = [examples[i]["image/encoded"] for i in index_K]
    channels = tf.io.decode_image(chosen[0], expand_animations=False).shape[2]
    x = [tf.io.decode_image(data, channels=channels, expand_animations=False) for data in chosen]
    return np.stack(x), np.array([example["image/class/label"] for example in examples])


def _some(data: st.DataObject, count: int) -> list[int]:
    """At least one index below this number, in ascending order."""
    return sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))


@given(files, st.data())
@settings(max_examples=examples(25), deadline=None)
def test_the_selected_records_equal_those_read_one_by_one(file: File, data: st.DataObject) -> None:
    index_K = _some(data, len(file.forms))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.tfrecord"
        file.write(path)
        source = TFRecordSource(path)
        read_x, read_y = source.read(np.array(index_K)), source.labels
        x, y = _read_naively(path, index_K)
    np.testing.assert_array_equal(read_x, x)
    np.testing.assert_array_equal(read_y, y)
    assert (read_x.dtype, read_y.dtype) == (np.uint8, np.int32)


@given(files, st.data(), st.sampled_from(["cut", "size", "text"]))
@settings(max_examples=examples(15), deadline=None)
def test_an_invalid_image_is_reported_if_it_is_selected(
    file: File, data: st.DataObject, kind: str
) -> None:
    count = len(file.forms)
    index_K = _some(data, count)
    number = data.draw(st.integers(0, count - 1))
    whole = _image("png", np.random.default_rng(1))
    bad = {
        "cut": whole[: len(whole) // 2],
        "size": bytes(tf.io.encode_png(np.zeros((9, 8, 3), np.uint8)).numpy()),
        "text": b"no image",
    }[kind]
    reported = _first_wrong(kind, number, index_K)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.tfrecord"
        file.write(path, {number: bad})
        source = TFRecordSource(path)
        if reported is None:
            assert len(source.read(np.array(index_K))) == len(index_K)
            return
        with pytest.raises(
            DataError, match=rf"a\.tfrecord: record {reported}: (an|not an?) .*image"
        ):
            source.read(np.array(index_K))


def _first_wrong(kind: str, number: int, index_K: list[int]) -> int | None:
    """The record that the error names if `number` is invalid; the first one sets the size."""
    if kind == "size" and number == index_K[0]:
        return index_K[1] if len(index_K) > 1 else None
    return number if number in index_K else None


@given(files, st.data())
@settings(max_examples=examples(15), deadline=None)
def test_a_wrong_checksum_is_reported_for_any_selection(file: File, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(file.forms) - 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.tfrecord"
        file.write(path)
        source = TFRecordSource(path)
        content = bytearray(path.read_bytes())
        start, length = _frame(content, number)
        content[data.draw(st.integers(start + 12, start + 12 + length + 3))] ^= 1
        path.write_bytes(content)
        message = rf"a\.tfrecord: record {number}: its checksum is wrong"
        with pytest.raises(DataError, match=message):
            TFRecordSource(path)
        with pytest.raises(DataError, match=message):  # opened while it was valid
            source.read(np.array([len(file.forms) - 1]))


def _frame(content: bytearray, number: int) -> tuple[int, int]:
    """Start of a record's frame, and length of its data, in bytes."""
    start = 0
    for _ in range(number):
        start += struct.unpack_from("<Q", content, start)[0] + 16
    return start, struct.unpack_from("<Q", content, start)[0]


@pytest.mark.parametrize("kept", [1, 2, 3, 5])
def test_a_file_that_became_shorter_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.tfrecord"
    File(["png"] * 6, ballast=300_000, seed=1).write(path)
    source = TFRecordSource(path)
    File(["png"] * kept, ballast=300_000, seed=1).write(path)
    with pytest.raises(DataError, match=rf"a\.tfrecord: record {kept}: .*the file is corrupt"):
        source.read(np.arange(6))
