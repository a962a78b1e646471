"""A Keras model from another process, and whether workers can load and call it.

The Python client calls it before it starts a run (`dlion.model_project`).
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from numpy.typing import NDArray

from dlion_api.errors import Problem, ProgramError, SpecError
from dlion_api.plain_text import error_text
from dlion_worker.training.building import call_arguments, tensors
from dlion_worker.training.framework import keras, tf

_OWN_CODE: Final = (
    "Only the model's description travels to the workers, not your code. Put the model's code into "
    "a file program.py with build_model(), and train that: dlion.train('program.py') "
    "(docs/own-programs.md)"
)

_emptied = threading.Lock()
"""Held while Keras' registry is empty: it belongs to the process, and other threads restore it."""


def check_model(model: Any, *, max_bytes: int) -> None:
    """Check that a worker can load the model, without the code that made it.

    Raises: SpecError if it is none; ProgramError, also if its weights exceed `max_bytes`.
    """
    if not isinstance(model, keras.Model):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        allowed = "a keras.Model (Keras 3) with its data; or a program or manifest without data"
        raise SpecError([Problem("model", "cannot be trained", kind, allowed)], source="train")
    name = f"model {model.name!r}"
    if (backend := keras.backend.backend()) != "tensorflow":
        raise ProgramError(
            f"{name}: Keras uses {backend}, and DLion trains with TensorFlow. Set the variable "
            "KERAS_BACKEND to tensorflow before Python starts"
        )
    if not model.built:
        raise ProgramError(
            f"{name}: is not built, so it has no weights yet. Begin it with keras.Input(shape), or "
            "call model.build((None, *shape))"
        )
    if (size := 4 * model.count_params()) > max_bytes:
        raise ProgramError(
            f"{name}: is too large (given: {size / 2**30:.1f} GiB of weights; allowed: "
            f"{max_bytes / 2**30:g} GiB)"
        )
    _check_restorable(model, name)


def _check_restorable(model: Any, name: str) -> None:
    """Rebuild the model from its description alone, as a worker does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of lambdas, which are refused
            description = keras.saving.serialize_keras_object(model)
            with _nothing_registered():
                keras.saving.deserialize_keras_object(description)
    except Exception as error:  # Keras and get_config() raise any type
        text = str(error).rpartition("Exception encountered: ")[2].strip()
        reason = text.partition("\n")[0].partition(". ")[0][:300] or type(error).__name__
        raise ProgramError(
            f"{name}: cannot be loaded without its code: {reason}. {_OWN_CODE}"
        ) from error


@contextmanager
def _nothing_registered() -> Iterator[None]:
    """Within it Keras has no custom objects: what this process has registered, workers have not."""
    registered = keras.saving.get_custom_objects()
    with _emptied:
        kept = dict(registered)
        registered.clear()
        try:
            yield
        finally:
            registered.update(kept)


def check_fits(model: Any, x_B: NDArray[Any], class_count: int) -> None:
    """Call the model on a few samples, as a worker gets them.

    `class_count`: 0 if there are targets. Raises: ProgramError where the model does not take them,
    or has fewer outputs than classes.
    """
    name = f"model {model.name!r}"
    try:
        outputs = model(tensors(x_B), **call_arguments(model, training=False))
    except Exception as error:  # layers raise any type
        text = " ".join(error_text(error).split())[:300]
        form = ", ".join(x_B.dtype.names or ()) or list(x_B.shape[1:])
        raise ProgramError(
            f"{name}: does not take these samples (given: {form} for each): {text}"
        ) from error
    if not tf.is_tensor(outputs) or not outputs.shape[1:]:
        return
    width = outputs.shape[-1]
    if width < class_count and (width, class_count) != (1, 2):
        raise ProgramError(
            f"{name}: its last layer has {width} outputs, and y has class numbers up to "
            f"{class_count - 1}. Give it {class_count} outputs. If y are values to predict, "
            "convert them: y.astype('float32')"
        )
