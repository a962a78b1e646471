"""Decodes images into one uint8 array, on all threads of the pool.

Used for TFRecord files and folders. TensorFlow decodes JPEG, PNG, GIF (first frame) and BMP.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError
from dlion_worker.training.datasets.sources import check_size
from dlion_worker.training.framework import tf

without_autograph = tf.autograph.experimental.do_not_convert
"""Decorator for `tf.data` functions without Python's `if` and `for`. Autograph's analysis takes as
long as reading thousands of records."""
READ_FAULTS = (tf.errors.OpError, UnicodeDecodeError)
"""TensorFlow's exceptions for bad data; the second if its message contains some of the bytes."""
_MAX_PIXELS = 64 * 2**20


def decode_all(
    encoded: Any, count: int, *, source: str, find_fault: Callable[[tuple[int, ...]], DataError]
) -> NDArray[np.uint8]:
    """Images [count, H, W, C] from a `tf.data.Dataset` of batches of encoded strings.

    All images must have the size of the first. If one does not decode, `find_fault` gets the
    expected shape and returns an error with the culprit's name. It checks images one by one, which
    is slow, so it runs only then.
    """
    iterator = iter(encoded.unbatch().take(1).with_options(reading_options()))
    try:
        shape = decoded_shape(next(iterator))
    except READ_FAULTS as error:
        raise find_fault(()) from error
    check_size(count, shape, source)
    images = np.empty((count, *shape), np.uint8)
    done = 0

    def decode(data: Any) -> Any:
        image = tf.io.decode_image(data, channels=shape[2], expand_animations=False)
        return tf.ensure_shape(image, shape)

    def decode_batch(data_B: Any) -> Any:
        form = tf.TensorSpec(shape, tf.uint8)
        return tf.map_fn(decode, data_B, fn_output_signature=form, parallel_iterations=1)

    several = {"num_parallel_calls": _threads(), "deterministic": True} if _threads() > 1 else {}
    batches = encoded.map(without_autograph(decode_batch), **several).with_options(
        reading_options()
    )
    try:
        for batch in batches.as_numpy_iterator():
            images[done : done + len(batch)] = batch
            done += len(batch)
    except READ_FAULTS as error:
        raise find_fault(shape) from error
    if done < count:  # replaced by a shorter file since it was opened
        raise find_fault(shape)
    return images


def decoded_shape(data: Any) -> tuple[int, ...]:
    """Height, width, channels of one encoded image. Raises: tf.errors.OpError, DataError."""
    shape = tuple(tf.io.decode_image(data, expand_animations=False).shape)
    if int(np.prod(shape, dtype=np.int64)) > _MAX_PIXELS:
        raise DataError(f"image of {shape[0]} by {shape[1]} pixels: too large to train on")
    return shape


def image_fault(data: Any, shape: tuple[int, ...]) -> str | None:
    """What is wrong with one encoded image; None if nothing."""
    try:
        image = tf.io.decode_image(data, channels=shape[2] if shape else 0, expand_animations=False)
    except READ_FAULTS:
        return "not a JPEG, PNG, GIF or BMP image, or truncated"
    if shape and tuple(image.shape) != shape:
        return (
            f"an image of another size (given: {list(image.shape)}; allowed: {list(shape)}, "
            "as the first one)"
        )
    return None


def reading_options() -> Any:
    """`tf.data.Options` for reading a file once, in order.

    Disables optimizations that pay off only in long-running pipelines.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.threading.private_threadpool_size = _threads()
    return options


def _threads() -> int:
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or 2
