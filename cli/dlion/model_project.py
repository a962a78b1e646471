"""A Keras model and data in memory as a program: what `dlion.train(model, data)` trains.

Checks both before anything is started, and writes them into the run's folder, where trainers read
them as those of any other program (`model_program`). Needs TensorFlow, and is imported when a model
is given.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from dlion.manifests import ManifestInput, Sites, job_document, read_manifest, with_fields
from dlion_api.errors import DataError, Problem, SpecError
from dlion_api.spec import Job
from dlion_results.run_folder.storage import writing
from dlion_worker.training.datasets.dataset import Samples, checked_targets, class_labels
from dlion_worker.training.datasets.loading import held_out_split
from dlion_worker.training.datasets.open_sources import class_count_of
from dlion_worker.training.datasets.partition import part_index, partition
from dlion_worker.training.datasets.pipelines import (
    MAX_BYTES,
    MAX_SAMPLES,
    is_pipeline,
    read_pipeline,
)
from dlion_worker.training.keras_optimizer import KerasOptimizer
from dlion_worker.training.programs.compiled import with_compiled
from dlion_worker.training.programs.given_model import check_fits, check_model
from dlion_worker.training.programs.program import TrainingProgram

Shares = dict[str, NDArray[np.int64] | None]
"""Ascending rows of the training data by name; None: the given test data."""
_VALUE_BYTES: Final = 4
"""Maximum size of a value in a worker: float32 or int32."""
_FORMS: Final = (
    "(x, y), (x_train, y_train, x_test, y_test), {'train': (x, y), 'test': (x, y)}, or "
    "tf.data.Dataset objects in place of (x, y)"
)


def _no_model(_input_shape: tuple[int, ...], _class_count: int) -> Any:
    """Replaces the program's function: the model exists already."""
    raise AssertionError


_PROGRAM: Final = TrainingProgram("dlion.train", build=_no_model)
"""The caller's name in messages of the trainer's code."""


@dataclass(frozen=True)
class ModelProject:
    """A model and its samples, checked: they fit each other, and workers can read them."""

    model: Any
    train: Samples
    test: Samples | None
    """Held-out samples. None: a part of `train` is held out."""

    program: ClassVar[Path] = Path(__file__).with_name("model_program.py")
    """The model's file, which `write` copies."""

    def manifest(
        self, sites: Sites | None, workers: int | None, changes: Mapping[str, Any]
    ) -> ManifestInput:
        """The manifest with these fields. A compiled model is trained with its optimizer."""
        trainer: dict[str, Any] = {"program": {"file": self.program.name}}
        if self.model.compiled and "optimizer" not in changes:
            trainer["optimizer"] = {"name": "program"}
        document = job_document(self.model.name, trainer, sites, workers)
        return read_manifest(with_fields(document, changes))

    def shares(self, job: Job, source: str) -> Shares:
        """The rows of `train` of each worker and the held-out ones, by the names of their files.

        Raises: SpecError if the manifest names other data, or a partition that these samples do
        not allow; ProgramError for an optimizer that depends on layers; DataError if there are too
        few samples.
        """
        trainer = job.spec.trainer
        dataset = trainer.dataset
        problems = [
            Problem(
                f"spec.trainer.dataset.{field}",
                "is given beside data in memory, and only one can be trained on",
                advice="Remove it, or name a program in place of the model and its data",
            )
            for field, value in (("name", dataset.name), ("path", dataset.path))
            if value is not None
        ]
        has_classes = self.train[1].dtype == np.int32 and self.train[1].ndim == 1
        if dataset.partition != "iid" and not has_classes:
            problems.append(
                Problem(
                    "spec.trainer.dataset.partition",
                    "needs one class number for each sample",
                    dataset.partition,
                    "iid",
                )
            )
        if problems:
            raise SpecError(problems, source=source)
        if trainer.optimizer.name == "program":  # one that no worker could use ends here
            KerasOptimizer(with_compiled(_PROGRAM, self.model), trainer.optimizer, size=1)
        workers, y = job.workers(), self.train[1]
        held_out, kept = None, np.arange(len(y))
        if self.test is None:
            held_out, kept = held_out_split(len(y), dataset.evaluation_fraction, trainer.seed)
        labels = class_labels(y)[kept]
        parts = partition(
            labels, workers, dataset, class_count=int(labels.max()) + 1, seed=[trainer.seed]
        )
        shares: Shares = {"test": held_out}
        for worker, part in zip(workers, parts, strict=True):
            at_site = [each for each in workers if each.site == worker.site]
            shares[f"{worker.site}-{part_index(worker, at_site)}"] = kept[part]
        return shares

    def write(self, folder: Path, shares: Shares) -> None:
        """Make the folder, with program, model and samples. Raises: StorageError.

        Copies the samples of one worker at a time.
        """
        with writing("cannot write the model and its data", folder):
            folder.mkdir()
            shutil.copyfile(self.program, folder / self.program.name)
            self.model.save(folder / "initial.keras")
            for name, rows in shares.items():
                x, y = self._samples(rows)
                np.savez(folder / f"{name}.npz", x=x, y=y)

    def _samples(self, rows: NDArray[np.int64] | None) -> Samples:
        if rows is None:
            assert self.test is not None
            return self.test
        x, y = self.train
        return x[rows], y[rows]


def model_project(model: object, data: object) -> ModelProject:
    """The model with its data. The model is not changed, and is called once.

    Raises: SpecError for wrong arguments; ProgramError for a model that workers cannot load or
    that does not fit the data; DataError for data that it cannot be trained on.
    """
    check_model(model, max_bytes=MAX_BYTES)
    train, test = _splits(data)
    samples = _samples(train, "data['train']")
    held_out = None if test is None else _samples(test, "data['test']")
    if held_out is not None:
        _check_alike(samples, held_out)
    labels = [each[1] for each in (samples, held_out) if each is not None]
    class_count = class_count_of(None, "data", *labels) if labels[0].dtype == np.int32 else 0
    check_fits(model, samples[0][:2], class_count)
    return ModelProject(model, samples, held_out)


def _splits(data: object) -> tuple[Any, Any]:
    """Training and held-out data; None for the latter if there are none."""
    if isinstance(data, Mapping) and {"train"} <= set(data) <= {"train", "test"}:
        return data["train"], data.get("test")
    if is_pipeline(data):
        return data, None
    if isinstance(data, tuple | list):
        if len(data) == 4:
            return (data[0], data[1]), (data[2], data[3])
        if len(data) == 2:
            are_splits = any(is_pipeline(each) or isinstance(each, tuple) for each in data)
            return (data[0], data[1]) if are_splits else (data, None)
    given = type(data).__name__
    if isinstance(data, Mapping | tuple | list):
        given = f"{given} of {', '.join(map(str, data)) if isinstance(data, dict) else len(data)}"
    problem = Problem("data", "are needed with a model", "" if data is None else given, _FORMS)
    raise SpecError([problem], source="train")


def _samples(split: Any, source: str) -> Samples:
    x: Any
    y: Any
    if is_pipeline(split):
        x, y = read_pipeline(split, _PROGRAM, source)
    elif isinstance(split, tuple | list) and len(split) == 2:
        x, y = split
    else:
        given = type(split).__name__
        problem = Problem(source, "must be (x, y) or a tf.data.Dataset of both", given)
        raise SpecError([problem], source="train")
    for letter, part in (("x", x), ("y", y)):
        if isinstance(part, list | tuple):
            raise DataError(
                f"{source}: {letter} is a {type(part).__name__}, and must be a NumPy array. "
                "Convert numbers with numpy.asarray. Several inputs or targets are a dict of "
                "arrays by name"
            )
    arrays = [each for part in (x, y) for each in _arrays(part)]
    counts = {len(each) for each in arrays}
    if len(counts) > 1:
        lengths = f"x {_lengths(x)}, y {_lengths(y)}"
        raise DataError(f"{source}: x and y differ in their number of samples (given: {lengths})")
    size = _VALUE_BYTES * max(sum(each.size for each in _arrays(part)) for part in (x, y))
    if size > MAX_BYTES or max(counts, default=0) > MAX_SAMPLES:
        raise DataError(
            f"{source}: is too large to go through memory (given: {size / 2**30:.1f} GiB in 32-bit "
            f"values; allowed: {MAX_BYTES / 2**30:g} GiB and {MAX_SAMPLES:,} samples). Write files "
            "and name them in trainer.dataset.path (docs/data.md), or read them in load_data() of "
            "a program (docs/own-programs.md)"
        )
    return checked_targets(x, y, source)


def _arrays(part: Any) -> list[NDArray[Any]]:
    """The arrays of x or y; what is not an array is refused later."""
    given: Iterable[Any] = part.values() if isinstance(part, Mapping) else (part,)
    return [each for each in given if isinstance(each, np.ndarray) and each.ndim]


def _lengths(part: Any) -> str:
    return " and ".join(f"{len(each):,}" for each in _arrays(part))


def _check_alike(train: Samples, test: Samples) -> None:
    for letter, one, other in zip("xy", train, test, strict=True):
        forms = [f"{each.dtype} {list(each.shape[1:])}" for each in (one, other)]
        if forms[0] != forms[1]:
            raise DataError(
                f"data: {letter} of train and test differ in type or shape (given: {forms[0]} and "
                f"{forms[1]} for one sample). Prepare both in the same way"
            )
