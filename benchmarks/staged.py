"""Measure the savings and costs of staged training against end-to-end training on images.

    python benchmarks/staged.py --data ../shared/data [--dataset cifar10] [--seeds 3]

It runs in one process on one thread, without links. An encoder is trained on a few correct images,
and then fixed. Features of other images are coded as by policy `staged`, and a decoder is trained
on the decoded features. The reference is the same network, trained end to end on these images, with
new weights or from those of the encoder. The script prints mean and range over the seeds of the
accuracy on test images at several rates, and with wrong labels. It also prints those of a decoder
of ten classes on an encoder of five, and the sizes of both parts. Bits are those of all payloads,
with ranges, labels and headers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from local_runs import commit

from dlion_core.policies.interface import LocalFeatures
from dlion_core.policies.staged.feature_batch import BATCH_SAMPLES, BITS, decode, encode
from dlion_worker.training import threads

CLASSES = 10
WRONG_SHARES = (0.0, 0.1, 0.2, 0.4)
WRONG_BITS = 4
"""Bits of features with wrong labels."""
EPOCHS, BATCH, LEARNING_RATE = 6, 32, 0.1
EQUAL_WITHIN = 0.005
"""Tolerance of the end-to-end accuracy, for equal accuracy."""
END_TO_END, FIVE_CLASSES = "end to end", "new decoder, encoder of five classes"
WRONG = " wrong"
"""Suffix of the names of rows with wrong labels."""

Pair = tuple[np.ndarray, np.ndarray]
Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Sizes:
    """Images for each part, and channels of the encoder: of its first layer, and of its outputs."""

    encoder_images: int
    images: int
    test_images: int
    width: int
    channels: tuple[int, ...]


SIZES = {
    "mnist": Sizes(2000, 3000, 2000, 16, (4, 1)),
    "cifar10": Sizes(3000, 3000, 2000, 16, (16, 4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="holds mnist/ and cifar10/")
    parser.add_argument("--dataset", choices=SIZES, default="mnist")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    threads.configure(1.0)
    sizes, folder = SIZES[arguments.dataset], arguments.data / arguments.dataset
    accuracy: Figures = defaultdict(list)
    bits: dict[str, float] = {}
    training = Training()
    for seed in range(1, arguments.seeds + 1):
        one = Comparison(sizes, folder, seed, training=training, accuracy=accuracy, bits=bits)
        one.run()
    print(f"{arguments.dataset} at {commit()}, {arguments.seeds} seeds, ", end="")
    print(
        f"{time.monotonic() - began_s:.0f} s\n\n"
        "| what | bits per image | accuracy |\n|---|---:|---|"
    )
    for name, values in accuracy.items():
        shown = f"{bits[name]:,.0f}" if name in bits else ""
        print(f"| {name} | {shown} | {spread(values)} |")
    print(equal_accuracy(accuracy, bits))
    for line in costs(sizes, folder):
        print(line)


def spread(values: list[float]) -> str:
    """Return mean and range in percent."""
    low, high = 100 * min(values), 100 * max(values)
    return f"{100 * statistics.mean(values):.1f} % ({low:.1f} to {high:.1f})"


def equal_accuracy(accuracy: Figures, bits: dict[str, float]) -> str:
    """Return the fewest bits at which a decoder is as accurate as the better end-to-end training.

    Its labels are correct, and its encoder was trained on all classes.
    """
    whole = (accuracy[END_TO_END], accuracy[f"{END_TO_END} from the encoder"])
    wanted = max(map(statistics.mean, whole)) - EQUAL_WITHIN
    staged = {name for name in bits if not name.endswith(WRONG)} - {END_TO_END, FIVE_CLASSES}
    equal = [name for name in staged if statistics.mean(accuracy[name]) >= wanted]
    within = f"\nWithin {100 * EQUAL_WITHIN:g} points of the better one end to end"
    if not equal:
        return f"{within}: none"
    best = min(equal, key=bits.__getitem__)
    return f"{within}: {best}, {bits[END_TO_END] / bits[best]:.1f} times fewer bits"


class Comparison:
    """All rows with one seed."""

    def __init__(
        self,
        sizes: Sizes,
        folder: Path,
        seed: int,
        *,
        training: Training,
        accuracy: Figures,
        bits: dict[str, float],
    ) -> None:
        self.sizes, self.seed, self.accuracy, self.bits = sizes, seed, accuracy, bits
        self.training = training
        count = sizes.encoder_images + sizes.images
        x, y = images(folder / "train.tfrecord", count, seed)
        self.early: Pair = (x[: sizes.encoder_images], y[: sizes.encoder_images])
        self.late: Pair = (x[sizes.encoder_images :], y[sizes.encoder_images :])
        self.test = images(folder / "test.tfrecord", sizes.test_images, seed)

    def run(self) -> None:
        encoders = {
            channels: self.encoder(channels, self.early) for channels in self.sizes.channels
        }
        for encoder in encoders.values():
            values = int(np.prod(encoder.output_shape[1:]))
            self.decoder(f"{values} values, uncoded", encoder, None)
            for bits in reversed(BITS):
                self.decoder(f"{values} values of {bits} bits", encoder, bits)
        encoder = encoders[self.sizes.channels[0]]
        for share in WRONG_SHARES:
            self.wrong_labels(encoder, share)
        few = self.early[1] < CLASSES // 2
        old = self.encoder(self.sizes.channels[0], (self.early[0][few], self.early[1][few]))
        self.decoder(FIVE_CLASSES, old, 8)

    def wrong_labels(self, encoder: Any, share: float) -> None:
        import keras

        labels = with_wrong(self.late[1], share, self.seed)
        end = f", {share:.0%}{WRONG}" if share else ""
        if share:
            self.decoder(f"staged{end}", encoder, WRONG_BITS, labels)
        keras.utils.set_random_seed(self.seed)
        new = encoder_layers(self.sizes.width, self.sizes.channels[0], self.late[0].shape[1:])
        self.end_to_end(f"{END_TO_END}{end}", new, labels)
        self.end_to_end(f"{END_TO_END} from the encoder{end}", encoder, labels)

    def encoder(self, channels: int, pair: Pair) -> Any:
        """Return an encoder, trained with a head that is discarded."""
        import keras

        keras.utils.set_random_seed(self.seed)
        features = encoder_layers(self.sizes.width, channels, pair[0].shape[1:])
        logits = keras.layers.Dense(CLASSES)(keras.layers.Flatten()(features.output))
        trained = self.training.fit(keras.Model(features.input, logits), pair)
        features.set_weights(trained.get_weights()[: len(features.weights)])
        return features

    def decoder(
        self, name: str, encoder: Any, bits: int | None, labels: np.ndarray | None = None
    ) -> None:
        """Train a decoder on the late images' features, with these labels."""
        import keras

        keras.utils.set_random_seed(self.seed)
        features = encoder.predict(self.late[0], batch_size=500, verbose=0)
        labels = self.late[1] if labels is None else labels
        if bits is not None:
            features, labels, self.bits[name] = received(features, labels, bits)
        decoder = self.training.fit(decoder_layers(features.shape[1:]), (features, labels))
        outputs = decoder.predict(
            encoder.predict(self.test[0], batch_size=500, verbose=0), batch_size=500, verbose=0
        )
        self.accuracy[name].append(float(np.mean(outputs.argmax(1) == self.test[1])))

    def end_to_end(self, name: str, encoder: Any, labels: np.ndarray) -> None:
        """Train a copy of that encoder and a new decoder together."""
        import keras

        keras.utils.set_random_seed(self.seed)
        model = joined(encoder)
        trained = self.training.fit(model, (self.late[0], labels))
        outputs = trained.predict(self.test[0], batch_size=500, verbose=0)
        self.accuracy[name].append(float(np.mean(outputs.argmax(1) == self.test[1])))
        if name == END_TO_END:
            self.bits[name] = 8 * (self.late[0][0].size + 2)  # a byte per pixel, and the label


def images(path: Path, count: int, seed: int) -> Pair:
    """Return images of that file, selected by the seed, as float32 from 0 to 1, with classes."""
    from dlion_worker.training.datasets.tfrecord import TFRecordSource

    source = TFRecordSource(path)
    chosen = np.random.default_rng(seed).permutation(len(source.labels))[:count]
    chosen.sort()
    order = np.random.default_rng(seed).permutation(count)
    return (source.read(chosen)[order] / np.float32(255)), source.labels[chosen][order]


def with_wrong(labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Return labels of which that share is replaced by another class, uniformly."""
    rng = np.random.default_rng(seed)
    wrong = rng.permutation(len(labels)) < round(share * len(labels))
    moved = (labels + rng.integers(1, CLASSES, len(labels))) % CLASSES
    return np.where(wrong, moved, labels).astype(np.int32)


def received(
    features: np.ndarray, labels: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return features and labels after decoding, and the bits of an image."""
    batches, sent_bytes = [], 0
    for first in range(0, len(labels), BATCH_SAMPLES):
        rows = slice(first, first + BATCH_SAMPLES)
        batch = LocalFeatures(first, len(labels), features[rows], labels[rows])
        payload = encode(batch, bits)
        sent_bytes += len(payload)
        batches.append(decode(payload, features.shape[1:], CLASSES).samples)
    joined_features = np.concatenate([each.features_B for each in batches])
    joined_labels = np.concatenate([each.labels_B for each in batches])
    return joined_features, joined_labels, 8 * sent_bytes / len(labels)


def encoder_layers(width: int, channels: int, shape: tuple[int, ...]) -> Any:
    import keras

    image = keras.Input(shape)
    hidden = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(image)
    hidden = keras.layers.MaxPooling2D(2)(hidden)
    hidden = keras.layers.Conv2D(channels, 3, padding="same", activation="relu")(hidden)
    return keras.Model(image, keras.layers.MaxPooling2D(2)(hidden))


def decoder_layers(shape: tuple[int, ...]) -> Any:
    import keras

    features = keras.Input(shape)
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Flatten()(features))
    return keras.Model(features, keras.layers.Dense(CLASSES)(hidden))


def joined(encoder: Any) -> Any:
    """Return a copy of the encoder with a new decoder, to be trained end to end."""
    import keras

    copy = keras.models.clone_model(encoder)
    copy.set_weights(encoder.get_weights())
    return keras.Model(copy.input, decoder_layers(copy.output_shape[1:])(copy.output))


class Training:
    """Trains models. Those of one shape share the functions that Keras compiles."""

    def __init__(self) -> None:
        self._compiled: dict[str, Any] = {}

    def fit(self, model: Any, pair: Pair) -> Any:
        """Return a model with the weights after training; valid until the next of its shape."""
        import keras

        form = " ".join(f"{weights.shape}" for weights in model.weights)
        if (compiled := self._compiled.get(form)) is None:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            # Without momentum no state of one training is left for the next.
            compiled = self._compiled[form] = keras.models.clone_model(model)
            compiled.compile(keras.optimizers.SGD(LEARNING_RATE), loss, steps_per_execution=16)
        compiled.set_weights(model.get_weights())
        compiled.fit(*pair, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        return compiled


def multiply_adds(model: Any) -> int:
    """Return the multiply-adds of the forward pass of one sample."""
    import keras

    total = 0
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            total += int(np.prod(layer.output.shape[1:3])) * int(np.prod(layer.kernel.shape))
        elif isinstance(layer, keras.layers.Dense):
            total += int(np.prod(layer.kernel.shape))
    return total


def costs(sizes: Sizes, folder: Path) -> list[str]:
    """Return lines on the sizes of both parts. A backward pass counts as two forward ones."""
    shape = images(folder / "test.tfrecord", 1, 1)[0].shape[1:]
    encoder = encoder_layers(sizes.width, sizes.channels[0], shape)
    decoder = decoder_layers(encoder.output_shape[1:])
    forward, head = multiply_adds(encoder), multiply_adds(decoder)
    own, other = 4 * encoder.count_params() / 1000, 4 * decoder.count_params() / 1000
    return [
        "\n| at | stored weights | MFLOP per image and epoch |\n|---|---:|---:|",
        f"| a sensor | {own:.1f} kB | {2e-6 * forward:.2f}, in the first only |",
        f"| the decoder | {other:.1f} kB | {6e-6 * head:.2f} |",
        f"| end to end | {own + other:.1f} kB | {6e-6 * (forward + head):.2f} |",
    ]


if __name__ == "__main__":
    main()
