"""A saved model in other forms: TensorFlow's SavedModel and TensorFlow Lite.

Called by `dlion fetch` on the machine of its user. Loads the `.keras` file in Keras' safe mode: no
code from the file is run, so a model with layers of the user's own cannot be converted here.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dlion_api.errors import ProgramError
from dlion_worker.training.framework import keras, tf

if TYPE_CHECKING:
    from collections.abc import Callable

Form = Literal["savedmodel", "tflite"]


def convert(keras_file: Path, form: Form) -> Path:
    """Makes the model's other form beside the file; its path.

    A folder `saved_model`, or a file `model.tflite`; what was there is replaced once the new one
    is whole. Raises: ProgramError where Keras or TensorFlow cannot read or convert the model.
    """
    target = keras_file.with_name("saved_model" if form == "savedmodel" else "model.tflite")
    with tempfile.TemporaryDirectory(dir=keras_file.parent, prefix=".convert-") as folder:
        made = Path(folder) / target.name
        model = _carried_out(keras_file, lambda: keras.models.load_model(keras_file, compile=False))
        if form == "savedmodel":
            _carried_out(keras_file, lambda: model.export(made, verbose=False))
        else:
            made.write_bytes(_carried_out(keras_file, lambda: _lite(model)))
        if target.is_dir():
            shutil.rmtree(target)
        made.replace(target)
    return target


def _lite(model: Any) -> bytes:
    content: bytes = tf.lite.TFLiteConverter.from_keras_model(model).convert()
    return content


def _carried_out(keras_file: Path, step: Callable[[], Any]) -> Any:
    try:
        return step()
    except Exception as error:  # whatever Keras, TensorFlow or the converter raise
        words = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ProgramError(
            f"{keras_file}: cannot be converted: {words}. The .keras file itself is whole; where "
            "the model has layers of your own, convert it in a program that defines them"
        ) from error
