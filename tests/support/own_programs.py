"""Programs as users write them, one of each shape: what they train, and the least accuracy after
some hundred steps."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

_HEAD = """
    import keras
    import numpy as np
    from keras import layers


    def samples(split, site, worker_index):
        seed = [len(split), *site.encode(), worker_index]
        generator = np.random.default_rng(seed if split == "train" else 1)
        return generator.normal(size=(400, 4)).astype("float32")
"""


@dataclass(frozen=True)
class OwnProgram:
    """A program's text."""

    name: str
    body: str
    min_accuracy: float
    optimizer: str = "sgd"

    @property
    def text(self) -> str:
        return textwrap.dedent(_HEAD).lstrip() + textwrap.dedent(self.body)


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
        x = layers.Concatenate()([layers.Flatten()(image), place])
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
FROZEN = OwnProgram(
    "frozen",
    """
    def build_model():
        body = keras.Sequential(
            [keras.Input((4,)), layers.Dense(64, "relu", name="learnt")], name="body"
        )
        body.trainable = False
        return keras.Sequential([keras.Input((4,)), body, layers.Dense(2, name="head")])


    def load_data(split, site, worker_index):
        x = samples(split, site, worker_index)
        return x, (x.sum(axis=1) > 0).astype("int64")
    """,
    0.85,
)
OWN_PROGRAMS = (PROBABILITIES, BINARY, REGRESSION, TWO_INPUTS, FROZEN)
