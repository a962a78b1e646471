"""Train the encoder of this example on a few digits before the deployment.

    python examples/staged/encoder.py encoder.keras

The head is needed to train the encoder, and is not saved.
"""

import sys

import keras
from sklearn.datasets import load_digits

SAMPLES = 300


def main(path: str) -> None:
    keras.utils.set_random_seed(1)
    digits = load_digits()
    x, y = digits.images[:SAMPLES, ..., None] / 16, digits.target[:SAMPLES]
    image = keras.Input((8, 8, 1))
    features = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    features = keras.layers.MaxPooling2D(2)(features)
    features = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(features)
    logits = keras.layers.Dense(10)(keras.layers.Flatten()(features))
    model = keras.Model(image, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    model.fit(x, y, batch_size=32, epochs=20, verbose=0)
    keras.Model(image, features).save(path)


if __name__ == "__main__":
    main(sys.argv[1])
