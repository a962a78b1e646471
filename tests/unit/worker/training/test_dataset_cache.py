"""Tests of the data cache of workers in one process, or in processes of one run.

Each worker holds the same samples as alone, and files are read once. A file that is replaced during
a run is read again by the processes that start later.

Left out: the shares (test_loading).
"""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dlion_worker.training import datasets, programs
from dlion_worker.training.datasets.tfrecord import TFRecordSource

if TYPE_CHECKING:
    from dlion_api.names import WorkerIdentity
    from dlion_api.spec import Job

DIGITS = programs.builtin("digits")


def assert_same_alone_and_together(job: Job, root: Path) -> None:
    cache = datasets.DatasetCache()
    for worker in job.workers():
        alone = datasets.load(job, worker, program=DIGITS, data_root=root)
        together = datasets.load(job, worker, program=DIGITS, data_root=root, cache=cache)
        for (x, y), (other_x, other_y) in zip(
            alone.parts.values(), together.parts.values(), strict=True
        ):
            np.testing.assert_array_equal(other_x, x)
            np.testing.assert_array_equal(other_y, y)
        np.testing.assert_array_equal(together.held_out_x, alone.held_out_x)
        np.testing.assert_array_equal(together.held_out_y, alone.held_out_y)
        assert together.class_count == alone.class_count
        assert together.training_set_samples == alone.training_set_samples


@pytest.mark.parametrize(
    "dataset",
    [{"partition": "bySite"}, {"partition": "dirichlet"}, {"keepFraction": 0.5}, {}],
)
def test_named_data_are_partitioned_as_for_each_worker_alone(
    make_job: Any, tmp_path: Path, dataset: dict[str, Any]
) -> None:
    assert_same_alone_and_together(make_job(name="digits", workers=4, **dataset), tmp_path)


@pytest.mark.parametrize("dataset", [{}, {"keepFraction": 0.5}, {"keepClasses": [0, 1]}])
def test_records_are_partitioned_as_for_each_worker_alone(
    make_job: Any, write_records: Any, images: Any, tmp_path: Path, dataset: dict[str, Any]
) -> None:
    x, y = images
    write_records(tmp_path / "train.tfrecord", x, y)
    write_records(tmp_path / "test.tfrecord", x[:8], y[:8])
    paths = {"path": "train.tfrecord", "evaluationPath": "test.tfrecord", "format": "tfrecord"}
    assert_same_alone_and_together(make_job(**paths, **dataset), tmp_path)


def test_a_workers_own_data_stay_its_own(
    make_job: Any, write_records: Any, images: Any, tmp_path: Path
) -> None:
    x, y = images
    for rank in range(3):
        write_records(tmp_path / f"{rank}.tfrecord", x[10 * rank : 10 * rank + 12], y[:12])
    write_records(tmp_path / "test.tfrecord", x[:8], y[:8])
    paths = {"path": "{rank}.tfrecord", "evaluationPath": "test.tfrecord", "format": "tfrecord"}
    assert_same_alone_and_together(make_job(**paths), tmp_path)


def test_a_file_is_decoded_at_most_twice_for_any_number_of_workers(
    make_job: Any, write_records: Any, images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = images
    write_records(tmp_path / "train.tfrecord", x, y)
    write_records(tmp_path / "test.tfrecord", x[:8], y[:8])
    read: list[str] = []
    decode = TFRecordSource.read

    def counted(source: TFRecordSource, index_K: Any) -> Any:
        read.append(source.name)
        return decode(source, index_K)

    monkeypatch.setattr(TFRecordSource, "read", counted)
    paths = {"path": "train.tfrecord", "evaluationPath": "test.tfrecord", "format": "tfrecord"}
    job, cache = make_job(workers=9, **paths), datasets.DatasetCache()
    for worker in job.workers():
        datasets.load(job, worker, program=DIGITS, data_root=tmp_path, cache=cache)
    assert read.count(str(tmp_path / "test.tfrecord")) == 1
    assert read.count(str(tmp_path / "train.tfrecord")) == 2


def test_processes_of_a_run_decode_held_out_samples_and_labels_once(
    make_job: Any, write_records: Any, images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches of one folder stand for processes, which do not have each other's objects."""
    x, y = images
    write_records(tmp_path / "train.tfrecord", x, y)
    write_records(tmp_path / "test.tfrecord", x[:8], y[:8])
    made: list[str] = []
    for name in ("read", "_read_labels"):
        monkeypatch.setattr(TFRecordSource, name, _counted(getattr(TFRecordSource, name), made))
    paths = {"path": "train.tfrecord", "evaluationPath": "test.tfrecord", "format": "tfrecord"}
    job, shared = make_job(workers=3, **paths), tmp_path / "shared"
    shared.mkdir()
    alone = [datasets.load(job, w, program=DIGITS, data_root=tmp_path) for w in job.workers()]
    made.clear()
    caches = [datasets.SharedDatasetCache(shared) for _ in job.workers()]

    def load(worker: WorkerIdentity, cache: datasets.DatasetCache) -> datasets.DataSet:
        return datasets.load(job, worker, program=DIGITS, data_root=tmp_path, cache=cache)

    datasets.load(
        job,
        job.workers()[0],
        program=DIGITS,
        data_root=tmp_path,
        cache=datasets.SharedDatasetCache(shared),
        held_out_only=True,
    )
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(load, job.workers(), caches))
    assert sorted(made) == [
        "_read_labels test",
        "_read_labels train",
        "read test",
        *len(caches) * ["read train"],
    ]
    for own, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(other.held_out_x, own.held_out_x)
        np.testing.assert_array_equal(other.held_out_y, own.held_out_y)
        np.testing.assert_array_equal(other.parts["all"][0], own.parts["all"][0])
        assert not other.held_out_x.flags.writeable, "it is the memory of all"


@pytest.mark.parametrize("evaluation", ["test.tfrecord", "test"])
def test_a_process_reads_files_again_that_were_replaced_before_its_start(
    make_job: Any, write_records: Any, images: Any, tmp_path: Path, evaluation: str
) -> None:
    x, y = images
    data, shared = tmp_path / "data", tmp_path / "shared"
    for folder in (data / "test", shared):
        folder.mkdir(parents=True)
    paths = {"path": "train.tfrecord", "evaluationPath": evaluation, "format": "tfrecord"}
    job = make_job(workers=1, **paths)

    def load(cache: datasets.DatasetCache) -> datasets.DataSet:
        worker = job.workers()[0]
        return datasets.load(job, worker, program=DIGITS, data_root=data, cache=cache)

    for order in (slice(None), slice(None, None, -1)):
        for name in ("train.tfrecord", "test.tfrecord", "test/part.tfrecord"):
            write_records(data / name, x[order], y[order])
        alone, found = load(datasets.DatasetCache()), load(datasets.SharedDatasetCache(shared))
        np.testing.assert_array_equal(found.held_out_x, alone.held_out_x)
        np.testing.assert_array_equal(found.held_out_y, alone.held_out_y)
        np.testing.assert_array_equal(found.parts["all"][1], alone.parts["all"][1])


def test_what_a_killed_process_left_half_written_is_made_again(tmp_path: Path) -> None:
    key, wanted = ("kind", "name"), (np.arange(3), np.ones((2, 2), np.float32))
    datasets.SharedDatasetCache(tmp_path).arrays(key, lambda: wanted)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (folder / "1.npy").write_bytes(b"half")
    folder.rename(folder.with_suffix(".partial"))
    found = datasets.SharedDatasetCache(tmp_path).arrays(key, lambda: wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_process_that_cannot_write_keeps_its_own_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    own = (np.arange(3),)
    found = datasets.SharedDatasetCache(tmp_path).arrays(("kind", "name"), lambda: own)
    assert found is own
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    nowhere = datasets.SharedDatasetCache(tmp_path / "none")
    assert nowhere.arrays(("kind", "name"), lambda: own) is own


def _counted(function: Any, calls: list[str]) -> Any:
    def counted(source: TFRecordSource, *arguments: Any) -> Any:
        calls.append(f"{function.__name__} {Path(source.name).stem}")
        return function(source, *arguments)

    return counted
