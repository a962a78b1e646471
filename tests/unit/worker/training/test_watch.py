"""Tests of watched folders.

New, changed and removed files are followed within two polls and without a restart. A partly written
file is awaited. A file that stays unreadable is skipped and named, and read when it is written
again. A new class may arrive. Near-duplicates of present samples are left out. Of many small files,
also of one image each, a worker keeps the requested fraction. Classes are as skewed as in one file.
A file of another type than the others is skipped and named, whatever else arrives. A change is
reported also if the poll that found it failed.

Left out: the effect on training (tests/local). Time is virtual.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tensorflow as tf

from dlion_api.errors import DataError
from dlion_api.reasons import EventReason
from dlion_worker.training import datasets, programs
from dlion_worker.training.datasets import BatchStream, FolderWatch

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 10.0


class _Site:
    """One worker with a watched folder, polled once a second."""

    def __init__(self, job, root: Path, rank: int = 0) -> None:
        worker = job.workers()[rank]
        program = programs.builtin("digits")
        self.data = datasets.load(job, worker, program=program, data_root=root)
        self.stream = BatchStream(self.data, seed=1, rank=rank)
        self.watch = FolderWatch(
            job,
            worker,
            data_root=root,
            data=self.data,
            stream=self.stream,
            patience_s=PATIENCE_S,
        )
        self.now_s = 0.0

    def poll(self, times: int = 2) -> list[tuple[EventReason, str, int]]:
        changes = []
        for _ in range(times):
            self.now_s += 1
            self.changes = self.watch.poll(self.now_s)
            changes += [(c.kind, c.file, c.samples) for c in self.changes]
        return changes

    def labels(self) -> set[int]:
        _, y_B = self.stream.next(4 * self.stream.samples)
        return set(y_B.tolist())


def _save(path: Path, label: int, count: int = 12, seed: int = 0) -> None:
    x = np.random.default_rng([seed, label]).integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
    np.savez(path, x=x, y=np.full(count, label))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    _save(tmp_path / "in" / "first.npz", 0)
    x = np.zeros((10, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "test.npz", x=x, y=np.arange(10))
    return tmp_path


@pytest.fixture
def site(root: Path, make_job) -> _Site:
    return _Site(_job(make_job), root)


def _job(make_job, **fields: object):
    """The path has a placeholder, so that all the samples are this worker's."""
    return make_job(
        **{
            "path": "in/{site}/..",
            "format": "npz",
            "evaluationPath": "test.npz",
            "watch": True,
            **fields,
        }
    )


@pytest.fixture(autouse=True)
def _site_folder(root: Path) -> None:
    (root / "in" / "plant-a").mkdir()


def test_a_new_class_arrives_with_a_new_file(site: _Site, root: Path) -> None:
    assert site.labels() == {0}
    assert site.poll(3) == []
    _save(root / "in" / "late.npz", 7)
    assert site.poll() == [(EventReason.DATA_ADDED, "late.npz", 12)]
    assert site.labels() == {0, 7}
    assert site.poll(3) == []


def test_held_out_samples_are_loaded_without_the_folders(site: _Site, root: Path, make_job) -> None:
    job, digits = _job(make_job), programs.builtin("digits")
    worker = job.workers()[0]
    alone = datasets.load(job, worker, program=digits, data_root=root, held_out_only=True)
    np.testing.assert_array_equal(alone.held_out_x, site.data.held_out_x)
    assert (alone.samples, alone.class_count) == (0, site.data.class_count)


def test_a_removed_file_removes_its_samples(site: _Site, root: Path) -> None:
    _save(root / "in" / "late.npz", 7)
    site.poll()
    (root / "in" / "first.npz").unlink()
    assert site.poll(1) == [(EventReason.DATA_REMOVED, "first.npz", 0)]
    assert site.labels() == {7}


def test_the_last_samples_stay_until_others_arrive(site: _Site, root: Path) -> None:
    (root / "in" / "first.npz").unlink()
    assert site.poll(3) == [(EventReason.DATA_SKIPPED, "first.npz", 0)]
    assert site.labels() == {0}
    _save(root / "in" / "late.npz", 7)
    assert site.poll(3) == [
        (EventReason.DATA_ADDED, "late.npz", 12),
        (EventReason.DATA_REMOVED, "first.npz", 0),
    ]
    assert site.labels() == {7}


def test_old_samples_of_a_file_without_new_ones_stay_until_others_arrive(
    root: Path, make_job
) -> None:
    site = _Site(_job(make_job, keepClasses=[0, 7]), root)
    _save(root / "in" / "first.npz", 5, count=11)
    assert site.poll(3) == [(EventReason.DATA_SKIPPED, "first.npz", 0)]
    assert site.labels() == {0}
    _save(root / "in" / "late.npz", 7)
    assert site.poll(3) == [(EventReason.DATA_ADDED, "late.npz", 12)]
    assert site.labels() == {7}
    _save(root / "in" / "first.npz", 0, count=10)
    assert site.poll(3) == [(EventReason.DATA_CHANGED, "first.npz", 10)]
    assert site.labels() == {0, 7}


def test_a_missing_folder_removes_no_samples(site: _Site, root: Path) -> None:
    _save(root / "in" / "late.npz", 7)
    site.poll()
    (root / "in").rename(root / "away")
    assert sorted(site.poll(3)) == [
        (EventReason.DATA_SKIPPED, "first.npz", 0),
        (EventReason.DATA_SKIPPED, "late.npz", 0),
    ]
    assert site.labels() == {0, 7}
    (root / "away").rename(root / "in")
    assert site.poll(3) == []


def test_an_unread_file_is_pending(site: _Site, root: Path) -> None:
    (root / "in" / "late.npz").write_bytes(b"half")
    site.poll(2)
    assert site.watch.waiting == {"late.npz"}
    _save(root / "in" / "late.npz", 7)
    site.poll(2)
    assert site.watch.waiting == frozenset()
    assert site.watch.samples == site.stream.samples


def test_a_changed_file_replaces_its_old_samples(site: _Site, root: Path) -> None:
    _save(root / "in" / "first.npz", 3, count=20)
    assert site.poll() == [(EventReason.DATA_CHANGED, "first.npz", 20)]
    assert site.labels() == {3}
    assert site.stream.samples == 20


def test_a_partly_written_file_is_awaited(site: _Site, root: Path) -> None:
    path = root / "in" / "late.npz"
    _save(path, 7)
    whole = path.read_bytes()
    for part in range(1, 9):  # it grows at each poll, for longer than the patience
        path.write_bytes(whole[: len(whole) * part // 9])
        site.now_s += 5
        assert site.poll(1) == []
    # It pauses within the patience, unreadable.
    assert site.poll(5) == []
    path.write_bytes(whole)
    assert site.poll() == [(EventReason.DATA_ADDED, "late.npz", 12)]


def test_a_corrupt_file_is_skipped_once_and_named(site: _Site, root: Path) -> None:
    path = root / "in" / "bad.npz"
    path.write_bytes(b"nonsense")
    _save(root / "in" / "good.npz", 2)
    changes = site.poll(30)
    assert changes == [
        (EventReason.DATA_ADDED, "good.npz", 12),
        (EventReason.DATA_SKIPPED, "bad.npz", 0),
    ]
    _save(path, 5)
    assert site.poll() == [(EventReason.DATA_ADDED, "bad.npz", 12)]
    assert site.labels() == {0, 2, 5}


def test_a_skipped_file_has_a_reason(site: _Site, root: Path) -> None:
    np.savez(root / "in" / "wide.npz", x=np.zeros((3, 9, 9, 1), np.uint8), y=np.zeros(3, int))
    np.savez(root / "in" / "float.npz", x=np.zeros((3, 8, 8, 1)), y=np.zeros(3, int))
    images = np.full((3, 8, 8, 1), 99, np.uint8)
    np.savez(root / "in" / "rows.npz", x=images, y=np.eye(10, dtype=int)[:3])
    _save(root / "in" / "beyond.npz", 10)
    messages = {}
    for _ in range(15):
        site.poll(1)
        messages |= {c.file: c.message for c in site.changes}
    assert "another shape (given: [9, 9, 1]; allowed: [8, 8, 1]" in messages["wide.npz"]
    assert "of another type (given: float32" in messages["float.npz"]
    assert "one class number for each sample (given: [3, 10]" in messages["rows.npz"]
    assert "label 10" in messages["beyond.npz"]
    assert site.labels() == {0}


def test_a_file_that_is_bad_at_the_start_does_not_stop_the_run(root: Path, make_job) -> None:
    path = root / "in" / "half.npz"
    _save(path, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    site = _Site(_job(make_job), root)
    assert site.poll(3) == []
    path.write_bytes(whole)
    assert site.poll() == [(EventReason.DATA_ADDED, "half.npz", 12)]


def test_a_touched_file_is_read_again(site: _Site, root: Path) -> None:
    os.utime(root / "in" / "first.npz", (1, 1))
    assert site.poll() == [(EventReason.DATA_CHANGED, "first.npz", 12)]
    assert site.stream.samples == 12


def test_workers_of_one_folder_partition_a_new_file(root: Path, make_job) -> None:
    sites = [_Site(_job(make_job, path="in"), root, rank) for rank in range(3)]
    assert sum(s.data.samples for s in sites) == 12
    _save(root / "in" / "late.npz", 7, count=31)
    taken = [s.poll()[0][2] for s in sites]
    assert sum(taken) == 31
    assert max(taken) - min(taken) <= 1


def test_near_duplicates_of_present_samples_are_left_out(root: Path, make_job) -> None:
    site = _Site(_job(make_job, dropNearDuplicates=True), root)
    x, y = (np.load(root / "in" / "first.npz")[k] for k in ("x", "y"))
    np.savez(root / "in" / "again.npz", x=x ^ 1, y=y)
    assert site.poll() == [(EventReason.DATA_ADDED, "again.npz", 0)]
    (root / "in" / "first.npz").unlink()
    assert site.poll(1)[0][0] is EventReason.DATA_SKIPPED  # no other samples are left to train on


@pytest.mark.parametrize("drop", [False, True])
def test_a_file_of_another_type_blocks_no_other_and_is_read_once_corrected(
    drop: bool, root: Path, make_job
) -> None:
    site = _Site(_job(make_job, dropNearDuplicates=drop), root)
    _save(root / "in" / "good.npz", 2)
    _save(root / "in" / "odd.npz", 3)
    with np.load(root / "in" / "odd.npz") as right:
        x, y = right["x"], right["y"]
    np.savez(root / "in" / "odd.npz", x=x.astype(np.float32), y=y)
    changes = site.poll(15)
    assert changes == [
        (EventReason.DATA_ADDED, "good.npz", 12),
        (EventReason.DATA_SKIPPED, "odd.npz", 0),
    ]
    np.savez(root / "in" / "odd.npz", x=x, y=y)
    assert site.poll() == [(EventReason.DATA_ADDED, "odd.npz", 12)]


def test_a_file_of_another_type_at_the_start_does_not_change_the_others(
    root: Path, make_job
) -> None:
    np.savez(root / "in" / "odd.npz", x=np.ones((3, 8, 8, 1)), y=np.ones(3, int))
    site = _Site(_job(make_job), root)
    assert site.stream.next(1)[0].dtype == np.uint8
    assert site.poll(15) == [(EventReason.DATA_SKIPPED, "odd.npz", 0)]
    assert "of another type (given: float32; allowed: uint8" in _skip_reason(site, root, "odd.npz")


def _skip_reason(site: _Site, root: Path, name: str) -> str:
    """Return the reason for skipping a file that is polled again."""
    os.utime(root / "in" / name, (1, 1))
    for _ in range(15):
        site.poll(1)
        for change in site.changes:
            return change.message
    return ""


def test_a_file_that_gets_its_old_content_back_is_compared_again(root: Path, make_job) -> None:
    site = _Site(_job(make_job, dropNearDuplicates=True), root)
    first, aside = root / "in" / "first.npz", root / "aside"
    first.rename(aside)
    first.write_bytes(b"nonsense")
    assert site.poll(3) == [], "incomplete"
    aside.replace(first)  # its time, too
    site.poll(3)
    _save(root / "in" / "copy.npz", 0)
    assert site.poll(3) == [(EventReason.DATA_ADDED, "copy.npz", 0)]


def test_a_file_that_did_not_fit_into_memory_is_not_a_copy_of_itself_later(
    root: Path, make_job
) -> None:
    site = _Site(_job(make_job, dropNearDuplicates=True), root)
    extend, site.stream.extend = site.stream.extend, _out_of_memory
    _save(root / "in" / "late.npz", 7)
    site.poll(1)
    with pytest.raises(MemoryError):
        site.poll(1)
    site.stream.extend = extend
    assert site.poll() == [(EventReason.DATA_ADDED, "late.npz", 12)]


def test_a_removal_is_reported_after_a_poll_that_failed(site: _Site, root: Path) -> None:
    _save(root / "in" / "second.npz", 1)
    site.poll()
    _save(root / "in" / "late.npz", 7)
    site.poll(1)
    (root / "in" / "first.npz").unlink()
    extend, site.stream.extend = site.stream.extend, _out_of_memory
    with pytest.raises(MemoryError):
        site.poll(1)
    site.stream.extend = extend
    removed = (EventReason.DATA_REMOVED, "first.npz", 0)
    assert site.poll() == [removed, (EventReason.DATA_ADDED, "late.npz", 12)]


def _out_of_memory(parts: dict[str, object]) -> None:
    if parts:
        raise MemoryError


def _png(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tf.io.encode_png(np.full((8, 8, 1), value, np.uint8)).numpy())


def test_images_arrive_one_by_one(tmp_path: Path, make_job) -> None:
    for name in ("ant", "bee", "cat"):
        _png(tmp_path / "test" / name / "0.png", 1)
    _png(tmp_path / "in" / "ant" / "0.png", 10)
    (tmp_path / "in" / "plant-a").mkdir(exist_ok=True)
    job = _job(make_job, format="images", evaluationPath="test")
    site = _Site(job, tmp_path)
    assert site.labels() == {0}
    _png(tmp_path / "in" / "cat" / "1.png", 20)
    _png(tmp_path / "in" / "cat" / "2.png", 30)
    (tmp_path / "in" / "ant" / "bad.png").write_bytes(b"nonsense")
    _png(tmp_path / "in" / "dog" / "3.png", 30)
    assert site.poll() == [
        (EventReason.DATA_ADDED, "cat/1.png", 1),
        (EventReason.DATA_ADDED, "cat/2.png", 1),
    ]
    assert site.labels() == {0, 2}
    assert sorted(site.poll(12)) == [
        (EventReason.DATA_SKIPPED, "ant/bad.png", 0),
        (EventReason.DATA_SKIPPED, "dog/3.png", 0),
    ]


def _labels_of(site: _Site) -> dict[str, list[int]]:
    return {key: y.tolist() for key, (_, y) in site.data.parts.items() if len(y)}


def test_of_many_images_the_requested_fraction_is_kept(tmp_path: Path, make_job) -> None:
    for name in ("ant", "bee"):
        for number in range(60):
            _png(tmp_path / "in" / name / f"{number}.png", number)
        _png(tmp_path / "test" / name / "0.png", 1)
    (tmp_path / "in" / "plant-a").mkdir(exist_ok=True)
    job = _job(make_job, format="images", evaluationPath="test", keepFraction=0.25)
    one, again = (_Site(job, tmp_path) for _ in range(2))
    kept = [label for labels in _labels_of(one).values() for label in labels]
    assert len(kept) == pytest.approx(30, abs=15)
    assert set(kept) == {0, 1}
    assert _labels_of(again) == _labels_of(one)


def test_of_many_small_files_the_requested_fraction_is_kept(root: Path, make_job) -> None:
    for number in range(60):
        _save(root / "in" / f"{number}.npz", number % 10, count=3, seed=number)
    (root / "in" / "first.npz").unlink()
    site = _Site(_job(make_job, keepFraction=0.1), root)
    assert site.data.samples == pytest.approx(18, abs=11)


def _shares(sites: list[_Site]) -> np.ndarray:
    """[class, worker]: each worker's share of each class."""
    counts = np.zeros((10, len(sites)))
    for column, site in enumerate(sites):
        for labels in _labels_of(site).values():
            np.add.at(counts[:, column], labels, 1)
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


@pytest.mark.parametrize(("files", "of_each"), [(1, 90), (30, 3), (30, 1)])
def test_classes_are_as_skewed_in_many_files_as_in_one(
    root: Path, make_job, files: int, of_each: int
) -> None:
    (root / "in" / "first.npz").unlink()
    for number in range(files):
        x = np.full((10 * of_each, 8, 8, 1), number, np.uint8)
        np.savez(root / "in" / f"{number}.npz", x=x, y=np.repeat(np.arange(10), of_each))
    means = {}
    for alpha in (0.1, 1000.0):
        job = _job(make_job, path="in", partition="dirichlet", dirichletAlpha=alpha)
        shares = _shares([_Site(job, root, rank) for rank in range(3)])
        means[alpha] = shares.max(axis=1).mean()
    assert means[0.1] > 0.7, "one worker has most of a class"
    assert means[1000.0] < 0.6


@pytest.mark.parametrize("of_each", [1, 2])
def test_sites_with_a_common_class_share_it_also_file_by_file(
    root: Path, make_job, of_each: int
) -> None:
    (root / "in" / "first.npz").unlink()
    for number in range(90):
        _save(root / "in" / f"{number}.npz", 0, count=of_each, seed=number)
    classes = [{"site": site, "classes": [0]} for site in ("plant-a", "plant-b")]
    job = _job(make_job, path="in", partition="bySite", siteClasses=classes)
    shares = _shares([_Site(job, root, rank) for rank in range(3)])[0]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.15)


def test_watching_needs_a_folder(root: Path, make_job) -> None:
    with pytest.raises(DataError, match="not a directory"):
        _Site(_job(make_job, path="in/first.npz"), root)
