"""Tests of readers.

TFRecord files, `.npz` files and folders of images are read as they were written, whole or in part.
Missing, truncated, corrupt or hostile content is refused with the file and the record. Keras' own
code reads a set from its cache. The manifest's names are names of Keras' sets.

Left out: partition (test_loading), speed, and sets that Keras accepts only with a published
checksum (mnist, cifar10, cifar100), which need a download.
"""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from dlion_api.document import explain
from dlion_api.errors import DataError
from dlion_api.spec import Dataset
from dlion_worker.training.datasets import folder, named_datasets, npz, open_sources
from dlion_worker.training.datasets.tfrecord import TFRecordSource, record_count


def _read_all(path: Path) -> tuple[np.ndarray, np.ndarray]:
    source = TFRecordSource(path)
    return source.read(np.arange(len(source.labels))), source.labels


def test_records_are_read_as_written(tmp_path: Path, images, write_records) -> None:
    x, y = images
    path = write_records(tmp_path / "a.tfrecord", x, y)
    read_x, read_y = _read_all(path)
    np.testing.assert_array_equal(read_x, x)
    np.testing.assert_array_equal(read_y, y)
    assert read_x.dtype == np.uint8
    chosen = np.array([0, 7, 8, 39])
    np.testing.assert_array_equal(TFRecordSource(path).read(chosen), x[chosen])


def test_jpeg_records_are_decoded_approximately(tmp_path: Path, write_records) -> None:
    x = np.full((3, 16, 16, 3), 90, np.uint8)
    read_x, _ = _read_all(write_records(tmp_path / "a.tfrecord", x, np.arange(3), jpeg=True))
    assert np.abs(read_x.astype(int) - 90).max() <= 3


def test_several_files_are_one_source(tmp_path: Path, images, write_records) -> None:
    x, y = images
    write_records(tmp_path / "b.tfrecord", x[30:], y[30:])
    write_records(tmp_path / "a.tfrecord", x[:30], y[:30])
    (tmp_path / ".hidden.tfrecord").write_bytes(b"nonsense")
    spec = Dataset(path="x", format="tfrecord")
    source = open_sources.open_path(tmp_path, spec, None)
    np.testing.assert_array_equal(source.labels, y)
    chosen = np.array([1, 29, 30, 39])
    np.testing.assert_array_equal(source.read(chosen), x[chosen])


def test_files_of_several_types_are_refused(tmp_path: Path) -> None:
    """Pixels are scaled when a model gets them, floats are not."""
    np.savez(tmp_path / "a.npz", x=np.full((3, 4), 200, np.uint8), y=np.arange(3))
    np.savez(tmp_path / "b.npz", x=np.full((3, 4), 0.5), y=np.arange(3))
    source = open_sources.open_path(tmp_path, Dataset(path=".", format="npz"), None)
    with pytest.raises(DataError, match=r"b\.npz: samples of another type \(given: float32;"):
        source.read(np.arange(6))


def test_a_truncated_file_names_the_record(tmp_path: Path, images, write_records) -> None:
    x, y = images
    path = write_records(tmp_path / "a.tfrecord", x[:10], y[:10])
    whole = path.read_bytes()
    assert record_count(path) == 10
    path.write_bytes(whole[:-3])
    with pytest.raises(DataError, match=r"a\.tfrecord: record 9: the file ends inside it"):
        TFRecordSource(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.tfrecord: the file is empty"):
        TFRecordSource(path)
    path.write_bytes(struct.pack("<Q", 2**63) + bytes(100))
    with pytest.raises(DataError, match="record 0: the file ends inside it"):
        TFRecordSource(path)


def test_a_flipped_bit_names_the_record(tmp_path: Path, images, write_records) -> None:
    x, y = images
    path = write_records(tmp_path / "a.tfrecord", x[:10], y[:10])
    data = bytearray(path.read_bytes())
    (first,) = struct.unpack_from("<Q", data, 0)
    data[16 + first + 12 + 20] ^= 1  # in the data of record 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.tfrecord: record 1: its checksum is wrong"):
        TFRecordSource(path)


def _records(path: Path, payloads: list[bytes]) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for payload in payloads:
            writer.write(payload)
    return path


def _example(encoded: bytes, label: int = 0) -> bytes:
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def _png(*shape: int) -> bytes:
    return tf.io.encode_png(np.zeros(shape, np.uint8)).numpy()


def test_records_with_other_content_are_named(tmp_path: Path) -> None:
    good = _example(_png(4, 4, 3))
    path = _records(tmp_path / "a.tfrecord", [good, b"\xff\xff nonsense"])
    with pytest.raises(DataError, match=r"record 1: not a tf\.train\.Example with image/encoded"):
        TFRecordSource(path)
    path = _records(tmp_path / "b.tfrecord", [good, good, _example(b"no image")])
    with pytest.raises(DataError, match=r"b\.tfrecord: record 2: not a JPEG, PNG"):
        _read_all(path)
    path = _records(tmp_path / "c.tfrecord", [good, _example(_png(4, 5, 3))])
    with pytest.raises(DataError, match=r"record 1: an image of another size \(given: \[4, 5, 3\]"):
        _read_all(path)
    path = _records(tmp_path / "d.tfrecord", [_example(_png(4, 4, 1), label=-2)])
    with pytest.raises(DataError, match=r"record 0: label out of range \(given: -2"):
        TFRecordSource(path)


def test_npz_pairs_are_read(tmp_path: Path) -> None:
    x, y = np.arange(24, dtype=np.uint8).reshape(6, 4), np.arange(6)
    np.savez(tmp_path / "plain.npz", x=x, y=y)
    np.savez_compressed(
        tmp_path / "split.npz", x_train=x[:4], y_train=y[:4, None], x_test=x[4:], y_test=y[4:]
    )
    read_x, read_y = npz.read_train(tmp_path / "plain.npz")
    np.testing.assert_array_equal(read_x, x)
    np.testing.assert_array_equal(read_y, y)
    np.testing.assert_array_equal(npz.read_train(tmp_path / "split.npz")[1], y[:4])
    held_out = npz.read_held_out(tmp_path / "split.npz")
    assert held_out is not None
    np.testing.assert_array_equal(held_out[0], x[4:])
    assert npz.read_held_out(tmp_path / "plain.npz") is None


def test_invalid_npz_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, images=np.zeros(3))
    with pytest.raises(DataError, match=r"a\.npz: array missing \(given: images; allowed: x and y"):
        npz.read_train(path)
    np.savez(path, x=np.array([{}, {}]), y=np.zeros(2, int))
    with pytest.raises(DataError, match="holds Python objects, which are never loaded"):
        npz.read_train(path)
    np.savez(path, x=np.zeros((2, 3)), y=np.zeros(2, int))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"a\.npz: not a readable \.npz file"):
        npz.read_train(path)


def test_npz_labels_are_one_number_for_each_sample(tmp_path: Path) -> None:
    path, x = tmp_path / "a.npz", np.zeros((6, 4), np.float32)
    np.savez(path, x_train=x, y_train=np.eye(6, dtype=int), x_test=x, y_test=np.zeros(6, int))
    wrong = r"a\.npz: y_train must have one class number for each sample \(given: \[6, 6\];"
    with pytest.raises(DataError, match=wrong):
        npz.read_train(path)
    assert npz.read_held_out(path) is not None


def test_an_npz_header_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (10**9, 10**6)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
        archive.writestr("y.npy", header.getvalue())
    with pytest.raises(DataError, match="array x claims 8000000000000000 bytes"):
        npz.read_train(tmp_path / "a.npz")


def _write_images(root: Path, counts: dict[str, int], shape: tuple[int, ...] = (4, 4, 3)) -> None:
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(_png(*shape))


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    _write_images(tmp_path / "data", {"cat": 2, "ant": 3})
    source = folder.open_folder(tmp_path / "data")
    assert source.labels.tolist() == [0, 0, 0, 1, 1]
    assert source.read(np.array([1, 4])).shape == (2, 4, 4, 3)


def test_classes_txt_numbers_the_folders(tmp_path: Path) -> None:
    _write_images(tmp_path / "data", {"cat": 1, "ant": 1})
    (tmp_path / "classes.txt").write_text("dog\ncat\nant\n")
    spec = Dataset(path="data", format="images")
    names = open_sources.class_names(tmp_path / "data", spec, None)
    source = open_sources.open_path(tmp_path / "data", spec, names)
    assert source.labels.tolist() == [2, 1]
    assert open_sources.class_count_of(names, "data", source.labels) == 3
    _write_images(tmp_path / "data", {"emu": 1})
    with pytest.raises(DataError, match=r"emu: no such class \(allowed: dog, cat, ant\)"):
        open_sources.open_path(tmp_path / "data", spec, names)


def test_a_byte_order_mark_is_no_part_of_a_class(tmp_path: Path) -> None:
    """Editors on Windows may begin a file with it."""
    (tmp_path / "classes.txt").write_text("dog\ncat\n", encoding="utf-8-sig")
    assert folder.read_class_list(tmp_path) == ["dog", "cat"]


def test_an_invalid_image_file_is_named(tmp_path: Path) -> None:
    _write_images(tmp_path, {"ant": 3})
    (tmp_path / "ant" / "1.png").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"ant/1\.png: not a JPEG, PNG"):
        folder.open_folder(tmp_path).read(np.arange(3))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for form in ("tfrecord", "npz", "images"):
        spec = Dataset(path="x", format=form)
        with pytest.raises(DataError, match="no such"):
            open_sources.open_path(tmp_path / "none", spec, None)
        (tmp_path / form).mkdir()
        with pytest.raises(DataError, match=r"no data in this directory|no images found"):
            open_sources.open_path(tmp_path / form, spec, None)


def test_labels_beyond_classes_txt_are_refused() -> None:
    with pytest.raises(DataError, match=r"label 2, but classes\.txt names 2 classes"):
        open_sources.class_count_of(["a", "b"], "data", np.array([0, 2], np.int32))


def test_digits_are_small_grey_images() -> None:
    """They are those that scikit-learn loads."""
    from sklearn.datasets import load_digits  # a second of CPU in each process of the tests

    x, y = named_datasets.digits()
    expected = load_digits()
    assert x.shape == (1797, 8, 8, 1)
    assert x.dtype == np.uint8
    assert x.max() == 255
    assert np.allclose(x[..., 0] * (16 / 255), expected.images, atol=0.04)
    assert np.array_equal(y, expected.target)


def test_unavailable_keras_data_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network() -> None:
        raise Exception("URL fetch failure")

    monkeypatch.setattr("keras.datasets.mnist.load_data", no_network)
    with pytest.raises(DataError, match=r"not in Keras' cache .*URL fetch failure"):
        named_datasets.keras_images("mnist")


def test_one_process_at_a_time_loads_keras_data(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = (np.zeros((4, 28, 28), np.uint8), np.arange(4))
    free = ["flock", "--nonblock", str(named_datasets.lock_path()), "true"]
    held: list[int] = []

    def load_data() -> tuple[object, object]:
        held.append(subprocess.run(free, check=False).returncode)
        return pair, pair

    monkeypatch.setattr("keras.datasets.mnist.load_data", load_data)
    named_datasets.keras_images("mnist")
    assert held == [1]
    subprocess.run(free, check=True)


def test_keras_lock_is_in_its_folder_where_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert named_datasets.lock_path() == tmp_path / "dlion.lock"
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "none"))
    monkeypatch.setenv(
        "TMPDIR", str(tmp_path)
    )  # a folder of this run only, in which others must wait too
    assert named_datasets.lock_path().parent == Path("/tmp")


def test_keras_data_are_read_also_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dlion.lock").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    with named_datasets.cache_lock():
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_every_keras_set_of_the_manifest_exists_in_keras() -> None:
    names = explain(Dataset, "name").allowed.split(" | ")
    assert names[0] == "digits"
    assert len(names) == 5
    for name in names[1:]:
        assert callable(getattr(keras.datasets, name.removeprefix("keras:")).load_data)


LOAD = """
import numpy as np
from dlion_worker.training.datasets import named_datasets
train, held_out = named_datasets.keras_images("fashion_mnist")
np.savez("read.npz", *train, *held_out)
"""


def _idx(path: Path, values: np.ndarray) -> None:
    """Bytes in the format in which Fashion-MNIST is published."""
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))


def test_keras_data_in_the_cache_is_read_by_keras_itself(tmp_path: Path) -> None:
    """This uses a separate process, because Keras reads KERAS_HOME once. No proxy answers a
    download.
    """
    x, y = named_datasets.digits()
    x, y = np.pad(x[..., 0].repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2))), y.astype(np.uint8)
    cache = tmp_path / "datasets" / "fashion-mnist"
    cache.mkdir(parents=True)
    for part, rows in (("train", slice(1500)), ("t10k", slice(1500, None))):
        _idx(cache / f"{part}-images-idx3-ubyte.gz", x[rows])
        _idx(cache / f"{part}-labels-idx1-ubyte.gz", y[rows])
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "KERAS_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", LOAD], check=True, cwd=tmp_path, env=environment)
    with np.load(tmp_path / "read.npz") as read:
        train_x, train_y, held_out_x, held_out_y = read.values()
    np.testing.assert_array_equal(train_x, x[:1500, ..., None])
    np.testing.assert_array_equal(held_out_x, x[1500:, ..., None])
    np.testing.assert_array_equal(train_y, y[:1500])
    np.testing.assert_array_equal(held_out_y, y[1500:])
