"""Tests of training programs.

Built-in models have the sizes of the evaluation, accept other image shapes and learn. A user's
program is loaded from a file or a module. Its faults are reported with file, line and remedy, also
in a module beside it. A Conv3D model over [N, T, C, H, W] trains.

Left out: accuracy on real data (tests/local and the benchmarks).
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dlion_api.errors import ProgramError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.spec import Program as ProgramSpec
from dlion_api.spec.trainer import ConfigMapKey
from dlion_worker.training import datasets, programs
from dlion_worker.training.model import FlatModel

if TYPE_CHECKING:
    from pathlib import Path

WORKER = WorkerIdentity(Rank(0), SiteName("plant-a"), "small", 0)


def _load(folder: Path, text: str) -> programs.TrainingProgram:
    (folder / "mine.py").write_text(textwrap.dedent(text))
    return programs.load(ProgramSpec(file="mine.py"), directory=folder)


def _build(
    program: programs.TrainingProgram, shape: tuple[int, ...] = (4,), classes: int = 2
) -> FlatModel:
    return FlatModel(program, input_shape=shape, class_count=classes, seed=1)


DENSE = """
    import keras
    import numpy as np

    def build_model():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
"""


@pytest.mark.parametrize(
    ("name", "shape", "megabytes"),
    [
        ("cipher", (32, 32, 3), (4.4, 4.7)),
        ("cnn17", (32, 32, 3), (16.5, 17.5)),
        ("digits", (8, 8, 1), (0.1, 0.3)),
        ("mobilenet", (32, 32, 3), (12, 14)),
        ("cipher", (28, 28, 1), (4, 4.7)),
        ("cipher", (8, 8, 1), (0.5, 2)),
        ("cnn17", (200, 150, 3), (16.5, 17.5)),
    ],
)
def test_builtin_programs_have_their_sizes(
    name: str, shape: tuple[int, ...], megabytes: tuple[float, float]
) -> None:
    model = _build(programs.builtin(name), shape, 10)
    assert megabytes[0] <= model.layout.size * 4 / 1e6 <= megabytes[1]


@pytest.mark.parametrize(
    "name", ["cipher", "cnn17", "digits", pytest.param("mobilenet", marks=pytest.mark.slow)]
)
def test_builtin_programs_make_a_step(name: str) -> None:
    model = _build(programs.builtin(name), (32, 32, 3), 10)
    x_B = np.random.default_rng(1).random((4, 32, 32, 3), np.float32)
    result = model.step(x_B, np.arange(4))
    assert result.finite
    assert result.gradient_D.shape == (model.layout.size,)
    assert np.abs(result.gradient_D).max() > 0


def test_builtin_programs_refuse_samples_that_are_not_images() -> None:
    with pytest.raises(ProgramError, match=r"samples must be images \(given shape: \[4\]"):
        _build(programs.builtin("cipher"))
    with pytest.raises(ProgramError, match="allowed: cipher, cnn17, digits, mobilenet"):
        programs.builtin("resnet")


def test_a_users_file_trains(tmp_path: Path, make_job) -> None:
    program = _load(
        tmp_path,
        DENSE
        + """
    def load_data(split, site, worker_index):
        x = np.random.default_rng(len(split) + worker_index).normal(size=(50, 4))
        return x, (x.sum(axis=1) > 0).astype(int)

    def loss(y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    """,
    )
    job = make_job(trainer={"program": {"file": "mine.py"}, "dataset": {}})
    data = datasets.load(job, WORKER, program=program, data_root=tmp_path)
    assert (data.samples, data.class_count, data.input_shape) == (50, 2, (4,))
    assert data.training_set_samples == 150
    model = _build(program)
    stream = datasets.BatchStream(data, seed=1, rank=0)
    for _ in range(60):
        model.weights_D -= np.float32(0.5) * model.step(*stream.next(32)).gradient_D
    assert model.evaluate(data.held_out_x, data.held_out_y).accuracy > 0.9


def test_a_users_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "my_package_of_models.py").write_text(textwrap.dedent(DENSE))
    spec = ProgramSpec(module="my_package_of_models")
    assert _build(programs.load(spec, directory=tmp_path)).layout.size == 10


def test_a_users_conv3d_model_over_frames_first_data_trains(tmp_path: Path) -> None:
    program = _load(
        tmp_path,
        """
        import keras
        from keras import layers

        def build_model():
            clips = keras.Input((4, 1, 6, 6))                  # T, C, H, W
            x = layers.Permute((1, 3, 4, 2))(clips)            # channels last: T, H, W, C
            x = layers.Conv3D(4, 3, activation="relu")(x)
            x = layers.GlobalMaxPooling3D()(x)
            return keras.Model(clips, layers.Dense(2)(x))
        """,
    )
    model = _build(program, (4, 1, 6, 6))
    generator = np.random.default_rng(0)
    y = (np.arange(64) % 2).astype(np.int32)
    x = generator.normal(size=(64, 4, 1, 6, 6)).astype(np.float32)
    x[y == 1, 1:3, :, 2:4, 2:4] += 3
    first = model.evaluate(x, y)
    for _ in range(60):
        model.weights_D -= np.float32(0.1) * model.step(x, y).gradient_D
    assert model.evaluate(x, y).loss < first.loss / 2
    assert model.evaluate(x, y).accuracy > 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_this_name", r"loading the file failed at .*mine\.py:1: ModuleNotFound"),
        ("def build_model(:", r"failed at .*mine\.py:1: SyntaxError"),
        ("raise SystemExit(3)", r"mine\.py:1: SystemExit: 3"),
        (
            "class Odd(Exception):\n    def __str__(self): return self.what\nraise Odd",
            r"mine\.py:3: Odd: \(its message raises AttributeError\)",
        ),
        ("build_model = 3", "build_model is not a function"),
        ("build_model = None", "build_model is missing"),
        ("x = 1", r"build_model is missing\. A program needs build_model\(\)"),
    ],
)
def test_a_file_that_does_not_load_is_reported_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        _load(tmp_path, text)


def test_a_missing_file_or_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"no such file: .*none\.py"):
        programs.load(ProgramSpec(file="none.py"), directory=tmp_path)
    with pytest.raises(ProgramError, match="Install it where the trainer runs"):
        programs.load(ProgramSpec(module="none_of_that"), directory=tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('boom')", r"build_model\(\) failed at .*mine\.py:6: ValueError: boom"),
        ("return 3", r"must return a keras\.Model \(given: int\)"),
        (
            "return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])",
            r"output has the wrong shape \(given: \[2\] .* for each of 3 classes",
        ),
        (
            "return keras.Sequential([keras.Input((7,)), keras.layers.Dense(2)])",
            r"calling the model on a sample of shape \[4\] failed",
        ),
    ],
)
def test_a_model_that_breaks_the_protocol_is_refused(
    tmp_path: Path, body: str, message: str
) -> None:
    program = _load(
        tmp_path, f"import keras\nfrom keras import layers\n\n\ndef build_model():\n    {body}\n"
    )
    with pytest.raises(ProgramError, match=message):
        _build(program, classes=3)


def test_a_loss_that_raises_is_reported_with_its_line(tmp_path: Path) -> None:
    program = _load(
        tmp_path, DENSE + "\n    def loss(y_true, y_pred):\n        return y_pred.no_such_thing\n"
    )
    with pytest.raises(ProgramError, match=r"loss\(y_true, y_pred\) failed at .*mine\.py:9"):
        _build(program).step(np.zeros((2, 4), np.float32), np.zeros(2, np.int32))


def test_the_colours_of_keras_are_removed_from_messages(tmp_path: Path) -> None:
    program = _load(
        tmp_path,
        "import keras\n\n\ndef build_model():\n"
        "    return keras.Sequential([keras.Input((7,)), keras.layers.Dense(2)])\n",
    )
    with pytest.raises(ProgramError, match="is incompatible with the layer") as raised:
        _build(program, classes=3)
    assert raised.value.__cause__ is not None
    assert "\x1b" in str(raised.value.__cause__), "Keras colours it"
    assert "\x1b" not in str(raised.value)


def test_a_loss_that_ignores_the_model_is_refused(tmp_path: Path) -> None:
    program = _load(
        tmp_path, DENSE + "\n    def loss(y_true, y_pred):\n        return keras.ops.ones(2)\n"
    )
    with pytest.raises(ProgramError, match="does not depend on any variable"):
        _build(program).step(np.zeros((2, 4), np.float32), np.zeros(2, np.int32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise OSError('disk gone')", r"load_data\('train', 'plant-a', 0\) failed at .*:9: OSErr"),
        ("return np.zeros((3, 4))", r"must return \(x, y\), or a .* \(given: ndarray\)"),
        ("return [1, 2], np.zeros(2, int)", r"given: x list"),
        ("return np.zeros((3, 4)), np.zeros(2, int)", r"wrong shapes \(given: x \[3, 4\], y \[2\]"),
        ("return np.zeros((3, 4)), np.full(3, np.inf)", "y: sample 0 holds NaN or infinity"),
        (
            "return np.zeros((3, 4)), np.array(['a', 'b', 'c'])",
            r"must be class numbers \(given: <U",
        ),
        (
            "return np.zeros(3), np.zeros(3)",
            r"wrong shapes \(given: x \[3\], y \[3\].*dimension of its own: x\[:, None\]",
        ),
        ("return np.zeros(3), np.zeros(3, int)", r"x\[:, None\]"),
        ("return np.array(['a', 'b', 'c']), np.zeros(3, int)", "Turn text into numbers"),
        ("return np.array(['a', 'b', 'c'], object), np.zeros(3, int)", "Turn text into numbers"),
        (
            "return np.zeros((3, 4)), np.zeros(3), np.ones(3)",
            r"given: three parts\)\. Sample weights",
        ),
        ("return np.array([[1], [1, 2]], object), np.zeros(2)", "unsupported sample type"),
        ("return [np.zeros(3), np.zeros(3)], np.zeros(3)", "Several inputs or targets are a dict"),
        ("return {}, np.zeros(3)", "x as a dict must have from 1 to 256 names"),
        ("return {'a': [1]}, np.zeros(3)", "x as a dict must have from 1 to 256 names"),
        ("return {1: np.zeros(3)}, np.zeros(3)", "x as a dict must have from 1 to 256 names"),
        (
            "return {'a': np.zeros(3), 'b': np.zeros(2)}, np.zeros(3)",
            r"x has arrays of different lengths \(given: a 3, b 2\)",
        ),
        ("return {'a': np.zeros((3, 1))}, np.zeros(2)", r"wrong shapes \(given: x \[3\], y \[2\]"),
        (
            "return {'a': np.full((3, 1), np.nan)}, np.zeros(3, int)",
            r"x\['a'\]: sample 0 holds NaN",
        ),
        (
            "return np.zeros((3, 4)), {'y': np.array(['a', 'b', 'c'])}",
            r"y\['y'\]: unsupported sample type",
        ),
        (
            "return np.zeros((3, 4)), np.zeros(3, int) if split == 'test' else np.zeros(3)",
            r"labels or targets of two types \(train float32, test int32\)",
        ),
        (
            "return np.zeros((3, 4)), np.zeros((3, 2 + (split == 'test')))",
            r"labels or targets of two shapes \(train \[3, 2\], test \[3, 3\]\)",
        ),
        ("return np.full((3, 4), np.nan), np.zeros(3, int)", "sample 0 holds NaN"),
        (
            "return np.diag([1.0, -1e300, np.inf]), np.zeros(3, int)",
            r"sample 1 is out of the range of float32 \(given: -1e\+300; allowed: -3\.4e\+38 to ",
        ),
        ("return np.zeros((3, 4)), np.array([0, -1, 0])", "label out of range"),
        ("return np.array([['a']]), np.zeros(1, int)", "unsupported sample type"),
        ("return np.zeros((3, 4)), np.zeros((3, 0), int)", r"wrong shapes \(given: x \[3, 4\]"),
        (
            "return np.zeros((3, 4)), np.zeros((3, 0))",
            r"wrong shapes \(given: x \[3, 4\], y \[3, 0\]",
        ),
        ("return np.full((3, 4), 2**31), np.zeros(3, int)", "integer out of range.*2147483648"),
        (
            "return np.zeros((3, 4)), {'y': np.full(3, -(2**31) - 1)}",
            r"y\['y'\]: integer out of range",
        ),
        (
            "return np.full(3, np.nan, [('a', 'f8', (4,))]), np.zeros(3, int)",
            r"x\['a'\]: sample 0 holds NaN",
        ),
        (
            "return np.zeros(3, [('a', 'O')]), np.zeros(3, int)",
            r"x\['a'\]: unsupported sample type",
        ),
    ],
)
def test_data_that_breaks_the_protocol_is_refused(
    tmp_path: Path, make_job, body: str, message: str
) -> None:
    text = DENSE + f"\n    def load_data(split, site, worker_index):\n        {body}\n"
    program = _load(tmp_path, text)
    job = make_job(trainer={"program": {"file": "mine.py"}, "dataset": {}})
    with pytest.raises(ProgramError, match=message):
        datasets.load(job, WORKER, program=program, data_root=tmp_path)


def test_workers_are_numbered_within_their_site(tmp_path: Path, make_job) -> None:
    text = """
    def load_data(split, site, worker_index):
        return np.full((3, 4), worker_index + 10.0 * site.endswith("b")), np.arange(3)
    """
    program = _load(tmp_path, DENSE + text)
    job = make_job(trainer={"program": {"file": "mine.py"}, "dataset": {}})
    first_values = []
    for worker in job.workers():
        data = datasets.load(job, worker, program=program, data_root=tmp_path)
        first_values.append(float(data.held_out_x[0, 0]))
    assert first_values == [0, 1, 10]


def test_a_program_without_any_data_is_refused(tmp_path: Path, make_job) -> None:
    job = make_job(trainer={"program": {"file": "mine.py"}, "dataset": {}})
    with pytest.raises(ProgramError, match="no data"):
        datasets.load(job, WORKER, program=_load(tmp_path, DENSE), data_root=tmp_path)


def test_a_program_of_a_config_map_is_loaded_where_it_is_mounted(tmp_path: Path) -> None:
    """Its key may lack `.py`. On a machine without the mount it is refused."""
    spec = ProgramSpec(config_map=ConfigMapKey(name="net", key="net"))
    with pytest.raises(ProgramError, match="exists only in a cluster"):
        programs.load(spec, directory=tmp_path)
    (tmp_path / "net").write_text(textwrap.dedent(DENSE))
    assert _build(programs.load(spec, directory=tmp_path)).layout.size == 10


def test_a_program_of_a_config_map_has_its_modules_in_other_keys(tmp_path: Path) -> None:
    spec = ProgramSpec(config_map=ConfigMapKey(name="net", key="program.py"))
    texts = {
        "program.py": "from mynet.layers import build_model\n\nWIDTH = 2\n",
        "mynet.__init__.py": "",
        "mynet.layers.py": DENSE.replace("import keras", "import keras, program", 1).replace(
            "Dense(2)", "Dense(program.WIDTH)"
        ),
    }
    for key, text in texts.items():
        (tmp_path / key).write_text(textwrap.dedent(text))
    assert _build(programs.load(spec, directory=tmp_path)).layout.size == 10


def _with_package(folder: Path, layers: str) -> programs.TrainingProgram:
    (folder / "mynet").mkdir()
    (folder / "mynet" / "layers.py").write_text(layers)
    (folder / "mine.py").write_text("from mynet import layers\nbuild_model = layers.build_model\n")
    return programs.load(ProgramSpec(file="mine.py"), directory=folder)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            "import nothing_of_this_name",
            r"at .*/mynet/layers\.py:1: ModuleNotFoundError: No module",
        ),
        ("from mynet import nothing", r"at .*/mynet/layers\.py:1: ImportError: cannot import"),
        ("\n\nx = 1 / 0", r"at .*/mynet/layers\.py:3: ZeroDivisionError"),
        ("raise SystemExit(3)", r"at .*/mynet/layers\.py:1: SystemExit: 3"),
        ("\ndef f(:", r"^program mine\.py: .*/mynet/layers\.py:2: is not Python: invalid syntax"),
        ("x = 1", r"at .*/mine\.py:2: AttributeError"),
        (
            "import importlib\nimportlib.import_module('mynet.other')",
            r"at .*/mynet/layers\.py:2: ModuleNotFoundError.*an import statement names",
        ),
    ],
)
def test_an_error_beside_the_program_is_reported_with_its_line(
    tmp_path: Path, layers: str, message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        _with_package(tmp_path, layers)


def test_an_error_in_a_function_beside_the_program_is_reported_with_its_line(
    tmp_path: Path,
) -> None:
    program = _with_package(tmp_path, "\ndef build_model():\n    raise ValueError('boom')\n")
    with pytest.raises(ProgramError, match=r"failed at .*/mynet/layers\.py:3: ValueError: boom"):
        _build(program)


def test_a_file_named_as_an_installed_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit")
    with pytest.raises(ProgramError, match=r"mine\.py:3: imports numpy, and .*numpy\.py has the"):
        _load(tmp_path, DENSE)
