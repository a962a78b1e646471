"""Test training a Keras model in memory with the Python client.

- A model that workers cannot load without its code, or that does not fit its data, is refused. So
  are data of wrong types, lengths, values or sizes. The refusal names the remedy, precedes any
  folder or process, and leaves the model and the Keras registry unchanged.
- Every form of data gives the same samples. A tenth is held out by the seed.
- Workers share the other samples under the manifest's partition. They read them from the run's
  folder unchanged, bytes too.

Left out: training (tests/local/test_python_client.py, tests/simulated/test_given_models.py).
"""

from __future__ import annotations

import contextlib
import re
import resource
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlion
from dlion import errors
from dlion.model_project import ModelProject, model_project
from dlion_api.exit_codes import ExitCode
from dlion_api.spec import Job, load_job
from dlion_worker.training import datasets, programs
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.programs.given_model import check_model

SITES = {"plant-a": 2, "plant-b": 1}
X = np.arange(600 * 4, dtype=np.float32).reshape(600, 4)
"""Samples whose rows all differ."""
Y = np.arange(600) % 3


def model_of(*layers: Any, outputs: int = 3, **compiled: Any) -> Any:
    made = keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(outputs)])
    if compiled:
        made.compile(**compiled)
    return made


@keras.saving.register_keras_serializable("tests")
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x


class Thrice(keras.layers.Layer):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return self.factor * x


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def own_function(*values):
    return values[0]


def subclassed() -> Any:
    made = Subclassed()
    made.build((None, 4))
    return made


def with_own_step() -> Any:
    sample = keras.Input((4,))
    return OwnStep(sample, keras.layers.Dense(3)(sample))


def refusal(tmp_path: Path, model: Any, data: Any, **fields: Any) -> errors.DLionError:
    """Return the error of `dlion.train`, which leaves no file."""
    fields = {"sites": SITES, "stop": {"maxSteps": 1}, "root": tmp_path / "runs", **fields}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(errors.DLionError) as caught:
            dlion.train(model, data, **fields)
    assert not (tmp_path / "runs").exists()
    return caught.value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (subclassed, r"cannot be loaded without its code: .*'Subclassed'.*program\.py"),
        (with_own_step, "without its code: .*'OwnStep'"),
        (lambda: model_of(Twice()), "without its code: .*'Twice'"),
        (lambda: model_of(Thrice(3)), "without its code: .*Thrice"),
        (lambda: model_of(keras.layers.Lambda(lambda x: x)), "without its code: .*`Lambda` layer"),
        (lambda: model_of(keras.layers.Lambda(own_function)), "without its code: .*own_function"),
        (lambda: model_of(keras.layers.Dense(2, own_function)), "without its code: .*own_function"),
        (lambda: model_of(loss=own_function), "without its code: .*own_function"),
        (lambda: model_of(loss=lambda y, _: y), "without its code: .*lambda"),
        (lambda: model_of(loss="mse", metrics=[own_function]), "without its code: .*own_function"),
        (lambda: keras.Sequential([keras.layers.Dense(3)]), r"is not built.*keras\.Input"),
    ],
)
def test_a_model_that_needs_its_code_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    registered = dict(keras.saving.get_custom_objects())
    error = refusal(tmp_path, make(), (X, Y))
    assert isinstance(error, errors.ProgramError)
    assert_matches(error, message)
    assert keras.saving.get_custom_objects() == registered


def test_checks_in_several_threads_leave_the_registry_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second check begins while the registry is empty for the first, and ends after it."""
    registered = dict(keras.saving.get_custom_objects())
    read, may_go_on = keras.saving.deserialize_keras_object, threading.Event()

    class Slow(keras.layers.Dense):
        def get_config(self) -> dict[str, Any]:
            if threading.current_thread() is second:
                may_go_on.wait(5)
            return super().get_config()

    def refuse_slow() -> None:
        with contextlib.suppress(errors.ProgramError):
            check_model(model_of(Slow(2)), max_bytes=2**20)

    second = threading.Thread(target=refuse_slow)

    def while_empty(description: Any) -> Any:
        if second.ident is None:
            second.start()
            time.sleep(0.2)
        return read(description)

    monkeypatch.setattr(keras.saving, "deserialize_keras_object", while_empty)
    check_model(model_of(), max_bytes=2**20)
    may_go_on.set()
    second.join()
    assert keras.saving.get_custom_objects() == registered != {}


def assert_matches(error: Exception, message: str) -> None:
    assert re.search(message, str(error), re.DOTALL), error


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (keras.Sequential, (X, Y), "given: the class Sequential.; allowed: a keras.Model"),
        (5, None, "model: cannot be trained .given: int"),
        ("digits", (X, Y), "model: cannot be trained .given: str"),
        (model_of(), None, r"data: are needed with a model; allowed: \(x, y\)"),
    ],
)
def test_an_invalid_model_with_data_is_refused(
    tmp_path: Path, model: Any, data: Any, message: str
) -> None:
    error = refusal(tmp_path, model, data)
    assert isinstance(error, errors.SpecError)
    assert_matches(error, message)


def huge(*shape: int) -> Any:
    """Return an array that claims this much memory and uses none."""
    return np.broadcast_to(np.float32(0), shape)


def with_nan() -> Any:
    x = X.copy()
    x[7, 2] = np.nan
    return x


def pipeline(x: Any = X, y: Any = Y) -> Any:
    return tf.data.Dataset.from_tensor_slices((x, y))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:-1]), r"data\['train'\]: x and y differ .* .given: x 600, y 599"),
        ((X, Y, X, Y[:5]), r"data\['test'\]: x and y differ .* .given: x 600, y 5"),
        (({"a": X, "b": X[1:]}, Y), "given: x 600 and 599, y 600"),
        ((X[:0], Y[:0]), "N at least 1"),
        ((X.tolist(), Y.tolist()), r"x is a list.*numpy\.asarray"),
        (([X, X], Y), "x is a list.*a dict of arrays by name"),
        ((tf.constant(X), Y), r"must be NumPy arrays.*numpy\.asarray"),
        ((X.astype(object), Y), "unsupported sample type .given: object"),
        ((X, Y.astype(str)), "labels must be class numbers.*Give each class a number"),
        ((X.astype("complex64"), Y), "unsupported sample type .given: complex64"),
        ((with_nan(), Y), "sample 7 holds NaN"),
        ((X, np.where(Y == 1, np.inf, 0.0)), "y: sample 1 holds NaN or infinity"),
        ((X, Y - 1), "label out of range"),
        ((huge(2**27 + 1, 4), huge(2**27 + 1)), r"too large.*2\.0 GiB.*trainer\.dataset\.path"),
        ((huge(20_000_001, 1), huge(20_000_001)), "20,000,000 samples"),
        ((X, Y, X.astype(np.int64), Y), r"x of train and test differ .*float32 \[4\] and int32"),
        ((X, Y, X[:, :3], Y), r"x of train and test differ .*\[4\] and float32 \[3\]"),
        ((X, Y, X, Y.astype(np.float32)), "y of train and test differ in type"),
        ((X[:, :3], Y), r"does not take these samples .given: \[3\] for each[^\x1b]*$"),
        ((X, Y * 2), r"3 outputs, and y has class numbers up to 4.*astype\('float32'\)"),
        ((X,), "given: tuple of 1"),
        ((X, Y, X), "given: tuple of 3"),
        ({"train": (X, Y), "validation": (X, Y)}, "given: dict of train, validation"),
        ({"train": X}, r"data\['train'\]: must be \(x, y\) .* .given: ndarray"),
        (X, "given: ndarray"),
        ("x.npz", "given: str"),
        (pipeline().repeat(), r"data\['train'\] does not end"),
        (pipeline(X[:0], Y[:0]), "has no samples"),
        ((X[:3], Y[:3]), "no sample for|too few"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on_are_refused(
    tmp_path: Path, data: Any, message: str
) -> None:
    assert_matches(refusal(tmp_path, model_of(), data), message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": {"name": "digits"}}, r"dataset\.name: is given beside data in memory"),
        ({"dataset": {"path": "a.npz", "format": "npz"}}, r"dataset\.path: is given beside"),
        ({"validation_split": 1.5}, r"dataset\.evaluationFraction"),
        ({"program": {"builtin": "digits"}}, r"trainer\.program"),
        ({"epochs": 5}, r"epochs: is an argument of fit\(\).*maxEpochs"),
        ({"stop": {}}, r"trainer\.stop"),
        ({"backend": "simulated"}, "environment: is needed"),
    ],
)
def test_fields_that_conflict_with_data_are_refused(
    tmp_path: Path, fields: Any, message: str
) -> None:
    assert_matches(refusal(tmp_path, model_of(), (X, Y), **fields), message)


def test_a_partition_by_classes_needs_class_numbers(tmp_path: Path) -> None:
    targets = X[:, :3] / X.max()
    error = refusal(tmp_path, model_of(), (X, targets), dataset={"partition": "dirichlet"})
    assert_matches(error, "partition: needs one class number for each sample .given: dirichlet")


@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.Adam(clipnorm=1.0), keras.optimizers.Lamb()]
)
def test_an_optimizer_that_workers_could_not_use_is_refused(tmp_path: Path, optimizer: Any) -> None:
    model = model_of(optimizer=optimizer, loss="mse")
    error = refusal(tmp_path, model, (X, X[:, :3]))
    assert_matches(error, "the optimizer.* all weights .*as one vector")


def test_a_program_optimizer_needs_a_compiled_model(tmp_path: Path) -> None:
    error = refusal(tmp_path, model_of(), (X, Y), optimizer={"name": "program"})
    assert_matches(error, r"optimizer\(\)|compile")


def test_a_large_model_is_refused() -> None:
    with pytest.raises(errors.ProgramError, match=r"too large.*of weights"):
        check_model(model_of(), max_bytes=50)


def test_the_error_for_a_cluster_names_the_alternative(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("""{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}], users: [{name: u, user: {}}],
contexts: [{name: c, context: {cluster: c, user: u}}]}""")
    with (
        dlion.Client("kubernetes", kubeconfig=str(config)) as client,
        pytest.raises(errors.SpecError, match=r"the sites of a cluster.*load_data\(\)"),
    ):
        client.train(model_of(), (X, Y), sites=SITES)


def job_of(project: ModelProject, **fields: Any) -> Job:
    given = project.manifest(SITES, None, {"stop": {"maxSteps": 1}, **fields})
    return load_job(given.document.value)


@pytest.mark.parametrize(
    "data",
    [
        (X, Y, X[:9], Y[:9]),
        [X, Y, X[:9], Y[:9]],
        ((X, Y), (X[:9], Y[:9])),
        {"train": (X, Y), "test": (X[:9], Y[:9])},
        {"train": [X.astype(np.float64), Y[:, None]], "test": pipeline(X[:9], Y[:9])},
        (pipeline(), pipeline(X[:9], Y[:9]).batch(4)),
    ],
)
def test_every_form_of_data_gives_the_same_samples(data: Any) -> None:
    project = model_project(model_of(), data)
    assert project.test is not None
    for found, expected in zip((*project.train, *project.test), (X, Y, X[:9], Y[:9]), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert project.train[0].dtype == np.float32


@pytest.mark.parametrize("data", [(X, Y), pipeline(), {"train": (X, Y)}])
def test_a_tenth_is_held_out_by_the_seed(data: Any) -> None:
    project = model_project(model_of(), data)

    def held_out(**fields: Any) -> list[float]:
        rows = project.shares(job_of(project, **fields), "")["test"]
        return [*project.train[0][rows][:, 0].tolist()]

    assert len(held_out()) == 60
    assert held_out() == held_out() != held_out(seed=2)
    assert held_out() != X[-60:, 0].tolist(), "at random: samples may be sorted"
    assert len(held_out(dataset={"evaluationFraction": 0.25})) == 150


def read_by_workers(project: ModelProject, job: Job, folder: Path) -> dict[str, datasets.DataSet]:
    """Return what each worker of the run reads in that folder."""
    project.write(folder, project.shares(job, ""))
    program = programs.load(job.spec.trainer.program, directory=folder)
    return {
        worker.name: datasets.load(job, worker, program=program, data_root=folder)
        for worker in job.workers()
    }


def test_workers_share_all_samples_that_are_not_held_out(tmp_path: Path) -> None:
    project = model_project(model_of(), (X, Y))
    found = read_by_workers(project, job_of(project), tmp_path / "project")
    assert len(found) == 3
    assert [each.samples for each in found.values()] == [180] * 3
    (test,) = ({each.held_out_x.tobytes() for each in found.values()},)
    rows = [*np.frombuffer(next(iter(test)), np.float32)[::4]]
    for each in found.values():
        ((x, y),) = each.parts.values()
        rows += [*x[:, 0]]
        np.testing.assert_array_equal(y, Y[(x[:, 0] // 4).astype(int)])
    assert sorted(rows) == X[:, 0].tolist(), "each sample once"


def test_sites_have_the_classes_of_the_manifest(tmp_path: Path) -> None:
    project = model_project(model_of(), (X, Y, X, Y))
    classes = [{"site": "plant-a", "classes": [0, 2]}, {"site": "plant-b", "classes": [1]}]
    job = job_of(project, dataset={"partition": "bySite", "siteClasses": classes})
    found = read_by_workers(project, job, tmp_path / "project")
    classes_by_site = {
        name: {int(label) for _, y in each.parts.values() for label in y}
        for name, each in found.items()
    }
    assert [*classes_by_site.values()] == [{0, 2}, {0, 2}, {1}]
    assert {each.held_out_x.shape for each in found.values()} == {X.shape}


@pytest.mark.parametrize("as_dict", [False, True])
def test_bytes_reach_the_model_as_with_fit(tmp_path: Path, as_dict: bool) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (600, 4), np.uint8)
    if as_dict:
        first, second = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        output = keras.layers.Dense(1)(first + second)
        model, x = keras.Model({"a": first, "b": second}, output), {"a": pixels, "b": pixels}
    else:
        model, x = model_of(outputs=1), pixels
    project = model_project(model, (x, X[:, :1] / X.max(), x, X[:, :1] / X.max()))
    found = read_by_workers(project, job_of(project), tmp_path / "project")
    held_out = next(iter(found.values())).held_out_x
    values = held_out["b"] if as_dict else held_out
    assert values.dtype == np.uint8
    np.testing.assert_array_equal(values, pixels)
    assert not next(iter(found.values())).scales_pixels


def test_the_model_is_loaded_unchanged_and_stays_unchanged(tmp_path: Path) -> None:
    model = model_of(loss="mse", optimizer=keras.optimizers.Adam(0.002), metrics=["mae"])
    before = model.get_weights()
    project = model_project(model, (X, X[:, :3]))
    job = job_of(project)
    project.write(tmp_path / "project", project.shares(job, ""))
    program = programs.load(job.spec.trainer.program, directory=tmp_path / "project")
    loaded = program.build((4,), 0)
    for given, now, read in zip(before, model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(given, now)
        np.testing.assert_array_equal(given, read)
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.002)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.002)
    model.fit(X, X[:, :3], verbose=0)
    assert job.spec.trainer.optimizer.name == "program"
    assert job_of(project, optimizer={"learningRate": 0.3}).spec.trainer.optimizer.name == "sgd"
    assert job_of(model_project(model_of(), (X, Y))).spec.trainer.optimizer.name == "sgd"


@pytest.mark.parametrize("limit_bytes", [500, 20_000])
def test_a_full_disk_leaves_no_folder(tmp_path: Path, limit_bytes: int) -> None:
    """While writing the model, or the samples, which are larger."""
    wide = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(3)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        with pytest.raises(errors.DLionError, match=r"cannot write the model and its data") as full:
            dlion.train(wide, (np.tile(X, 10), Y), stop={"maxSteps": 1}, root=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full.value.exit_code == ExitCode.STORAGE
    assert not list(tmp_path.iterdir())
