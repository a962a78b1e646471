"""Encoded images to one uint8 array, on all threads of the pool.

Used by the readers of TFRecord files and of folders. TensorFlow decodes JPEG, PNG, GIF (its first
frame) and BMP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dlion_api.errors import DataError
from dlion_worker.training.datasets.sources import check_size
from dlion_worker.training.framework import tf

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

as_written = tf.autograph.experimental.do_not_convert
"""For functions of `tf.data` without Python's `if` and `for`: looking for these takes as long as
reading thousands of records."""
READ_FAULTS = (tf.errors.OpError, UnicodeDecodeError)
"""What TensorFlow raises for bad data; the second where its message holds some of the bytes."""
_MOST_PIXELS = 64 * 2**20


def decode_all(
    encoded: Any, count: int, *, source: str, blame: Callable[[tuple[int, ...]], DataError]
) -> NDArray[np.uint8]:
    """Images [count, H, W, C] from a `tf.data.Dataset` of batches of encoded strings.

    All images must have the size of the first. `blame` is asked, with the expected shape, for an
    error that names the culprit when one does not decode: looking one by one is slow, and needed
    only then.
    """
    iterator = iter(encoded.unbatch().take(1).with_options(reading_options()))
    try:
        shape = decoded_shape(next(iterator))
    except READ_FAULTS as error:
        raise blame(()) from error
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
    batches = encoded.map(as_written(decode_batch), **several).with_options(reading_options())
    try:
        for batch in batches.as_numpy_iterator():
            images[done : done + len(batch)] = batch
            done += len(batch)
    except READ_FAULTS as error:
        raise blame(shape) from error
    if done < count:  # it was replaced by a shorter one since it was opened
        raise blame(shape)
    return images


def decoded_shape(data: Any) -> tuple[int, ...]:
    """Height, width, channels of one encoded image. Raises: tf.errors.OpError, DataError."""
    shape = tuple(tf.io.decode_image(data, expand_animations=False).shape)
    if int(np.prod(shape, dtype=np.int64)) > _MOST_PIXELS:
        raise DataError(f"image of {shape[0]} by {shape[1]} pixels: too large to train on")
    return shape


def fault_of(data: Any, shape: tuple[int, ...]) -> str | None:
    """What is wrong with one encoded image, None where nothing is."""
    try:
        image = tf.io.decode_image(data, channels=shape[2] if shape else 0, expand_animations=False)
    except READ_FAULTS:
        return "not a JPEG, PNG, GIF or BMP image, or cut short"
    if shape and tuple(image.shape) != shape:
        return (
            f"an image of another size (given: {list(image.shape)}; allowed: {list(shape)}, "
            "as the first one)"
        )
    return None


def reading_options() -> Any:
    """`tf.data.Options` for reading a file once, in order: nothing that is only worth its own
    cost in a pipeline that runs for long."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.threading.private_threadpool_size = _threads()
    return options


def _threads() -> int:
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or 2
