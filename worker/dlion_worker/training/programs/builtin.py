"""The built-in models. Inputs are images [B, H, W, C] in 0..1, outputs logits [B, classes].

The published evaluation names `cipher` and `mobilenet`; `cnn17` is the 17 MB network of HotCloud'19
(two convolutions, two dense layers). The layer sizes are ours. Variables have fixed names, so that
`freeze` patterns and checkpoints stay valid.
"""

from typing import Any

from dlion_api.errors import ProgramError
from dlion_worker.training.framework import keras

Shape = tuple[int, ...]

layers = keras.layers

_MAX_SIDE = 64
_RESIZED_SIDE = 32


def cipher(input_shape: Shape, class_count: int) -> Any:
    """Three convolutions, two dense layers: 1.15 M parameters (4.6 MB) at 32x32x3, 10 classes."""
    x = inputs = _image_input("cipher", input_shape)
    x = _centred(_shrunk(x, input_shape))
    for number, filters in enumerate((32, 64, 128), start=1):
        x = _convolution(x, filters, f"conv{number}")
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(512, activation="relu", name="dense1")(x)
    x = layers.Dropout(0.5, name="dropout")(x)
    return keras.Model(inputs, layers.Dense(class_count, name="logits")(x), name="cipher")


def cnn17(input_shape: Shape, class_count: int) -> Any:
    """Two convolutions, two dense layers: 4.2 M parameters (17 MB) at 32x32x3, 10 classes."""
    x = inputs = _image_input("cnn17", input_shape)
    x = _centred(_shrunk(x, input_shape))
    for number, filters in enumerate((32, 64), start=1):
        x = _convolution(x, filters, f"conv{number}")
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(1024, activation="relu", name="dense1")(x)
    return keras.Model(inputs, layers.Dense(class_count, name="logits")(x), name="cnn17")


def digits(input_shape: Shape, class_count: int) -> Any:
    """Three convolutions, two dense layers: 28 k parameters (111 kB) at 8x8x1, 10 classes."""
    x = inputs = _image_input("digits", input_shape)
    x = _shrunk(x, input_shape)
    x = layers.Conv2D(32, 3, padding="same", activation="relu", name="conv1")(x)
    for number in (2, 3):
        x = _convolution(x, 32, f"conv{number}")
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(64, activation="relu", name="dense1")(x)
    return keras.Model(inputs, layers.Dense(class_count, name="logits")(x), name="digits")


def mobilenet(input_shape: Shape, class_count: int) -> Any:
    """MobileNet (Howard et al. 2017) without downloaded weights: 3.2 M parameters.

    Images are resized to a multiple of 32, at least 64: at 32x32 the last layers would get a single
    pixel.
    """
    inputs = _image_input("mobilenet", input_shape)
    side = min(224, max(64, -(-max(input_shape[:2]) // 32) * 32))
    x = layers.Resizing(side, side, name="resize")(inputs)
    x = _centred(x)
    body = keras.applications.MobileNet(
        input_shape=(side, side, input_shape[2]), include_top=False, weights=None, pooling="avg"
    )
    x = layers.Dropout(0.2, name="dropout")(body(x))
    return keras.Model(inputs, layers.Dense(class_count, name="logits")(x), name="mobilenet_logits")


def _image_input(program: str, input_shape: Shape) -> Any:
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ProgramError(
            f"program {program}: samples must be images (given shape: {list(input_shape)}; "
            "allowed: [height, width, channels]). Write your own program for other data "
            "(trainer.program.file)"
        )
    return keras.Input(input_shape, name="image")


def _shrunk(x: Any, input_shape: Shape) -> Any:
    """Resize large images first, because the dense layers grow with the image's area."""
    if max(input_shape[:2]) <= _MAX_SIDE:
        return x
    return layers.Resizing(_RESIZED_SIDE, _RESIZED_SIDE, name="resize")(x)


def _centred(x: Any) -> Any:
    """Scale 0..1 to -1..1: inputs around zero train markedly faster."""
    return layers.Rescaling(2.0, offset=-1.0, name="rescale")(x)


def _convolution(x: Any, filters: int, name: str) -> Any:
    x = layers.Conv2D(filters, 3, padding="same", activation="relu", name=name)(x)
    return layers.MaxPooling2D(2, padding="same", name=f"{name}_pool")(x)
