"""Programs as users write them, one of each shape.

Each has the minimum accuracy after 300 steps, and a check of its models. Each is a folder with a
manifest, a program, a package beside it and a file of weights, or one text. All tests write the
same bytes, whether they train it on this machine, in virtual time or at sites of a testbed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

SITES = ("site-a", "site-b")
_IMPORTS = """
    import keras
    import numpy as np
    from keras import layers
"""
_SAMPLES = """


    def samples(split, site, worker_index):
        seed = [len(split), *site.encode(), worker_index]
        generator = np.random.default_rng(seed if split == "train" else 1)
        return generator.normal(size=(400, 4)).astype("float32")
"""
_LEARNED = """

    LEARNED = np.concatenate([np.eye(4), -np.eye(4)], axis=1)
"""
LEARNED = np.concatenate([np.eye(4), -np.eye(4)], axis=1)
_PARTS = {
    "__init__.py": """
    from .sampling import samples as samples
    from .weights.learned import LEARNED as LEARNED
    """,
    "sampling.py": f"    import numpy as np{_SAMPLES}",
    "weights/learned.py": """
    from pathlib import Path

    import numpy as np

    LEARNED = np.load(Path(__file__).with_name("learned.npy"))
    """,
}
"""A package with a subpackage without `__init__.py`, where a module loads weights from a file."""


def _plain(text: str) -> str:
    return textwrap.dedent(text).lstrip()


@dataclass(frozen=True)
class OwnProgram:
    """A program."""

    name: str
    body: str
    min_accuracy: float
    optimizer: str = "sgd"

    @property
    def text(self) -> str:
        """All of it in one file."""
        return _plain(_IMPORTS + _SAMPLES + _LEARNED + self.body)

    def project(self, folder: Path) -> Path:
        """Write it into that folder as a user's project; return its manifest.

        It has two sites with one worker each.
        """
        for name, text in _PARTS.items():
            path = folder / "parts" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_plain(text))
        np.save(folder / "parts" / "weights" / "learned.npy", LEARNED)
        imports = f"{_IMPORTS}\n    from parts import LEARNED, samples\n"
        (folder / "program.py").write_text(_plain(imports + self.body))
        trainer = {
            "program": {"file": "program.py"},
            "optimizer": {"name": self.optimizer, "learningRate": 0.1},
            "stop": {"maxSteps": 300},
        }
        groups = [{"name": "small", "workers": 1}]
        document = {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": self.name},
            "spec": {
                "sites": [{"name": site, "groups": groups} for site in SITES],
                "trainer": trainer,
            },
        }
        manifest = folder / "job.yaml"
        manifest.write_text(yaml.safe_dump(document))
        return manifest

    def judge(self, folder: Path, model: Path) -> None:
        """Assert that the saved model is the program's own, and that it has learned.

        Only Keras loads it. With its weights, the program's model predicts the same from held-out
        samples. With initial weights it does not reach the minimum accuracy.
        """
        from dlion_worker.training.framework import keras

        program = imported(folder / "program.py")
        data = program.load_data("test", SITES[0], 0)
        if self is KERAS_SCRIPT:  # a `tf.data.Dataset` of batches
            data = (np.concatenate(parts) for parts in zip(*data.as_numpy_iterator(), strict=True))
        x, y = data
        keras.utils.set_random_seed(0)
        own = program.build_model()
        assert not self._has_learned(own(x), y)
        restarts = pytest.warns(UserWarning, match="Skipping variable loading for optimizer 'adam'")
        with restarts if self is KERAS_SCRIPT else contextlib.nullcontext():
            loaded = keras.models.load_model(model)
        predicted = loaded(x)
        assert self._has_learned(predicted, y)
        if self is FROZEN:
            kernel = loaded.get_layer("body").get_layer("learned").kernel
            assert np.array_equal(kernel, LEARNED)
        own.set_weights(loaded.get_weights())
        keras.tree.map_structure(np.testing.assert_array_equal, predicted, own(x))

    def _has_learned(self, predicted: Any, y: Any) -> bool:
        if self is TWO_INPUTS:
            sums, signs = (np.asarray(predicted[name])[:, 0] for name in ("sum", "sign"))
            is_right = (signs > 0) == y["sign"]
            return is_near(sums, y["sum"]) and bool(is_right.mean() > self.min_accuracy)
        found = np.asarray(predicted)
        if self is REGRESSION:
            return is_near(found[:, 0], y)
        found = (found[:, 0] > 0.5) if self is BINARY else found.argmax(axis=1)
        return bool((found == y).mean() > self.min_accuracy)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files below a folder, but for Python's caches."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.parent.name != "__pycache__"
    }


def is_near(predicted: Any, y: Any) -> bool:
    """Whether the mean error is below 0.2, and below half of that of the mean of `y`."""
    error = np.abs(predicted - y).mean()
    return bool(error < min(0.2, np.abs(y - y.mean()).mean() / 2))


def imported(program: Path) -> Any:
    """The program, as Python imports it with its folder in the path."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "parts"]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(program.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(program.parent))
    return module


PROBABILITIES = OwnProgram(
    "probabilities",
    """
    def build_model():
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(3, "softmax")]
        )


    def load_data(split, site, worker_index):
        x = samples(split, site, worker_index)
        return x, np.argmax(x[:, :3], axis=1)
    """,
    0.85,
)
BINARY = OwnProgram(
    "binary",
    """
    def build_model():
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(1, "sigmoid")]
        )


    def load_data(split, site, worker_index):
        x = samples(split, site, worker_index)
        return x, (x.sum(axis=1) > 0).astype("uint8")
    """,
    0.9,
)
REGRESSION = OwnProgram(
    "regression",
    """
    def build_model():
        return keras.Sequential([keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(1)])


    def optimizer():
        rate = keras.optimizers.schedules.CosineDecay(0.02, decay_steps=400)
        return keras.optimizers.AdamW(rate)


    def load_data(split, site, worker_index):
        x = samples(split, site, worker_index)
        return x, x @ np.array([0.5, -0.25, 0.25, 0.1]) + 0.5
    """,
    0.9,
    optimizer="program",
)
TWO_INPUTS = OwnProgram(
    "two-inputs",
    """
    def build_model():
        image = keras.Input((2, 2, 1), name="image", dtype="float32")
        place = keras.Input((2,), name="place")
        pixels = layers.Flatten()(layers.Rescaling(1 / 255)(image))
        x = layers.Concatenate()([pixels, place])
        x = layers.Dense(16, "relu")(x)
        outputs = {"sum": layers.Dense(1)(x), "sign": layers.Dense(1)(x)}
        return keras.Model({"image": image, "place": place}, outputs)


    def load_data(split, site, worker_index):
        x = samples(split, site, worker_index)
        pixels = (255 * (x[:, :4].reshape(-1, 2, 2, 1) > 0)).astype("uint8")
        inputs = {"image": pixels, "place": x[:, :2]}
        return inputs, {"sum": x[:, :2].sum(axis=1), "sign": (x[:, 3] > 0).astype("int64")}


    def loss(y_true, y_pred):
        squared = keras.ops.square(y_pred["sum"][:, 0] - y_true["sum"])
        sign = keras.ops.cast(y_true["sign"], "float32")[:, None]
        return squared + keras.losses.binary_crossentropy(sign, y_pred["sign"], from_logits=True)


    def accuracy(y_true, y_pred):
        found = keras.ops.cast(y_pred["sign"][:, 0] > 0, "int32")
        return keras.ops.equal(found, y_true["sign"])
    """,
    0.9,
)
CUSTOM_LOSS = OwnProgram(
    "custom-loss",
    """
    def build_model():
        return keras.Sequential([keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(3)])


    def load_data(split, site, worker_index):
        x = samples(split, site, worker_index)
        return x, np.argmax(x[:, :3], axis=1)


    def loss(y_true, y_pred):
        log_p = keras.ops.log_softmax(y_pred)
        own = keras.ops.sum(log_p * keras.ops.one_hot(y_true, 3), axis=-1)
        return -own * (1 - keras.ops.exp(own))  # focal
    """,
    0.85,
)
FROZEN = OwnProgram(
    "frozen",
    """
    def build_model():
        learned = layers.Dense(8, "relu", use_bias=False, name="learned")
        body = keras.Sequential([keras.Input((4,)), learned], name="body")
        learned.set_weights([LEARNED])
        body.trainable = False
        return keras.Sequential([keras.Input((4,)), body, layers.Dense(2, name="head")])


    def load_data(split, site, worker_index):
        x = samples(split, site, worker_index)
        return x, (x.sum(axis=1) > 0).astype("int64")
    """,
    0.85,
)
"""Its frozen part has weights from which the rest can learn the classes; from others it cannot."""
KERAS_SCRIPT = OwnProgram(
    "keras-script",
    """
    import tensorflow as tf


    class Kernels(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            norm = float(np.linalg.norm(self.model.layers[0].get_weights()[0]))
            with open("kernels.txt", "a") as file:
                file.write(f"{epoch} {norm:.6f}\\n")


    def build_model():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(3, "softmax")]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(0.02),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top2")],
        )
        return model


    def load_data(split, site, worker_index):
        x = samples(split, site, worker_index)
        pairs = tf.data.Dataset.from_tensor_slices((x, np.argmax(x[:, :3], axis=1)))
        return pairs.shuffle(400).batch(64).prefetch(2) if split == "train" else pairs.batch(64)


    def augment(x, y):
        return x + tf.random.normal(tf.shape(x), stddev=0.02), y


    def callbacks():
        return [keras.callbacks.CSVLogger("log.csv", append=True), Kernels()]
    """,
    0.85,
    optimizer="program",
)
"""The parts of a script for one machine: compile(), tf.data, augmentation and callbacks."""
OWN_PROGRAMS = (
    PROBABILITIES, BINARY, REGRESSION, TWO_INPUTS, CUSTOM_LOSS, FROZEN, KERAS_SCRIPT,
)  # fmt: skip
