"""Tests of the loading of data.

Each worker computes the same split and holds the same samples out. It loads its own share only.
Classes are filtered, shares subsampled and near-duplicates left out as the manifest requests. A
path with `{site}` leads to a worker's own data. A process that evaluates needs only what is held
out.

Left out: errors of readers (test_readers); growing data (test_watch).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dlion_api.errors import DataError
from dlion_worker.training import datasets, programs

if TYPE_CHECKING:
    from dlion_api.spec import Job
    from dlion_worker.training.datasets import DataSet

DIGITS = programs.builtin("digits")


def _load_all(job: Job, root: Path = Path()) -> list[DataSet]:
    return [datasets.load(job, w, program=DIGITS, data_root=root) for w in job.workers()]


def _train(data: DataSet) -> tuple[np.ndarray, np.ndarray]:
    (pair,) = data.parts.values()
    return pair


def test_shares_and_held_out_samples_are_the_whole_set(make_job) -> None:
    shares = _load_all(make_job(name="digits"))
    for share in shares:
        np.testing.assert_array_equal(share.held_out_x, shares[0].held_out_x)
        assert share.class_count == 10
        assert share.input_shape == (8, 8, 1)
        assert share.input_dtype == np.uint8
        assert share.training_set_samples == 1797 - 180
    assert sum(s.samples for s in shares) + len(shares[0].held_out_y) == 1797
    rows = np.concatenate([_train(s)[0].reshape(-1, 64) for s in shares] + [
        shares[0].held_out_x.reshape(-1, 64)
    ])  # fmt: skip
    everything = datasets.loading.named_datasets.digits()[0].reshape(-1, 64)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, everything))


def test_held_out_samples_are_loaded_without_a_share(make_job) -> None:
    job = make_job(name="digits")
    worker = job.workers()[1]
    whole = datasets.load(job, worker, program=DIGITS, data_root=Path())
    alone = datasets.load(job, worker, program=DIGITS, data_root=Path(), held_out_only=True)
    np.testing.assert_array_equal(alone.held_out_x, whole.held_out_x)
    np.testing.assert_array_equal(alone.held_out_y, whole.held_out_y)
    assert (alone.samples, alone.class_count) == (0, whole.class_count)


def test_by_site_leaves_all_classes_in_the_held_out_samples(make_job) -> None:
    shares = _load_all(make_job(name="digits", partition="bySite"))
    assert [sorted(set(_train(s)[1])) for s in shares] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]
    assert set(shares[0].held_out_y) == set(range(10))


def test_kept_classes_and_fraction_shrink_the_share(make_job) -> None:
    whole = _load_all(make_job(name="digits", keepClasses=[1, 7]))
    thin = _load_all(make_job(name="digits", keepClasses=[1, 7], keepFraction=0.25))
    assert set(_train(thin[0])[1]) == {1, 7}
    assert thin[0].class_count == 10
    assert thin[0].samples == pytest.approx(whole[0].samples / 4, abs=1)
    assert sum(s.samples for s in thin) == thin[0].training_set_samples


def test_near_duplicates_are_left_out_of_the_share(tmp_path: Path, make_job) -> None:
    generator = np.random.default_rng(0)
    x = np.repeat(generator.integers(0, 256, (50, 8, 8, 1), dtype=np.uint8), 4, axis=0)
    x += generator.integers(0, 4, x.shape, dtype=np.uint8) * (x < 250)
    np.savez(tmp_path / "frames.npz", x=x, y=np.repeat(np.arange(50) % 3, 4))
    np.savez(tmp_path / "test.npz", x=x[:9], y=np.arange(9) % 3)
    job = make_job(
        path="frames.npz",
        format="npz",
        evaluationPath="test.npz",
        dropNearDuplicates=True,
        workers=1,
    )
    shares = _load_all(job, tmp_path)
    assert sum(s.samples + s.near_duplicates_left_out for s in shares) == 200
    for share in shares:
        x, _ = _train(share)
        originals = np.unique(np.round(x.reshape(len(x), -1)[:, :6] / 10), axis=0)
        assert share.samples <= 50
        assert len(originals) > 0.8 * share.samples


def test_an_npz_file_may_contain_its_held_out_samples(tmp_path: Path, make_job) -> None:
    x, y = np.zeros((30, 4), np.float32), np.arange(30) % 3
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:5] + 1, y_test=y[:5])
    (first, *_) = _load_all(make_job(path="a.npz", format="npz"), tmp_path)
    assert (first.held_out_x == 1).all()
    assert first.training_set_samples == 30


def test_records_in_a_folder_are_partitioned(
    tmp_path: Path, make_job, images, write_records
) -> None:
    x, y = images
    (tmp_path / "train").mkdir()
    write_records(tmp_path / "train" / "a.tfrecord", x[:25], y[:25])
    write_records(tmp_path / "train" / "b.tfrecord", x[25:], y[25:])
    write_records(tmp_path / "test.tfrecord", x[:4], y[:4])
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\ne\n")
    job = make_job(path="train", format="tfrecord", evaluationPath="test.tfrecord")
    shares = _load_all(job, tmp_path)
    rows = sorted(bytes(image) for s in shares for image in _train(s)[0])
    assert rows == sorted(bytes(image) for image in x)
    assert shares[0].class_count == 5
    np.testing.assert_array_equal(shares[2].held_out_x, x[:4])


def test_a_path_with_the_sites_name_leads_to_its_own_data(tmp_path: Path, make_job) -> None:
    for number, site in enumerate(("plant-a", "plant-b")):
        (tmp_path / site).mkdir()
        x = np.full((20, 4), number, np.float32)
        np.savez(tmp_path / site / "own.npz", x=x, y=np.full(20, number))
    np.savez(tmp_path / "test.npz", x=np.zeros((5, 4), np.float32), y=np.arange(5))
    job = make_job(path="{site}/own.npz", format="npz", evaluationPath="test.npz")
    shares = _load_all(job, tmp_path)
    assert [set(_train(s)[1]) for s in shares] == [{0}, {0}, {1}]
    assert {s.samples for s in shares} == {20}
    assert {s.class_count for s in shares} == {5}


def test_unsuitable_data_are_refused(tmp_path: Path, make_job) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 4), np.float32), y=np.zeros(1, int))
    with pytest.raises(DataError, match=r"1 samples are too few to hold out 0\.1 of them"):
        _load_all(make_job(path="a.npz", format="npz"), tmp_path)
    np.savez(tmp_path / "b.npz", x=np.zeros((9, 4), np.float32), y=np.zeros(9, int))
    np.savez(tmp_path / "c.npz", x=np.zeros((9, 5), np.float32), y=np.zeros(9, int))
    job = make_job(path="b.npz", format="npz", evaluationPath="c.npz")
    with pytest.raises(DataError, match=r"held-out samples: samples of another shape"):
        _load_all(job, tmp_path)
    with pytest.raises(DataError, match="no such file or directory"):
        _load_all(make_job(path="none", format="npz"), tmp_path)
