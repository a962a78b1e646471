"""Loads a saved model or its weights, or converts it to TensorFlow's SavedModel or TensorFlow Lite.

`dlion fetch` and the Python client call it on the user's machine. Keras loads the `.keras` file in
safe mode and runs no code from it, so a model with custom layers cannot be converted here.
"""

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

from dlion_api.errors import DataError, ProgramError
from dlion_api.plain_text import error_text
from dlion_core.npz_errors import NPZ_ERRORS
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.site_model import start_file

Form = Literal["savedmodel", "tflite"]


def load_keras_file(path: Path) -> Any:
    """The `keras.Model` of a `.keras` file, without an optimizer.

    Raises: DataError if it cannot be read.
    """
    try:
        return keras.models.load_model(path, compile=False)
    except Exception as error:  # Keras raises any type
        reason = (error_text(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{path}: cannot be loaded: {reason}. If the model has layers of your own, first "
            "import the program that registers them"
        ) from error


def load_weights(model: Any, path: Path) -> None:
    """Load weights and statistics of a `.keras` file, or of the first in a result folder.

    Reads only numbers, never code. Raises: DataError, also where they are of another architecture.
    """
    path = start_file(path)
    if not path.is_file():
        raise DataError(
            f"trainer.startFrom: no such file: {path}. Name a .keras file or a result folder"
        )
    try:
        with warnings.catch_warnings():
            # Keras skips mismatched weights with a warning, which would load half a model.
            warnings.simplefilter("error", UserWarning)
            # The state of a compiled optimizer, which only one of the two may have, is not used.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model.load_weights(path)
    except (*NPZ_ERRORS, UserWarning) as error:  # a `.keras` file is an archive, too
        raise DataError(
            f"trainer.startFrom: {path} does not fit this model: {error}. "
            "Name a model saved by the same program"
        ) from error


def convert(keras_file: Path, form: Form) -> Path:
    """Write the model's other form beside the file; return its path.

    The result is a folder `saved_model` or a file `model.tflite`; an old one is replaced once the
    new one is complete. Raises: ProgramError where Keras or TensorFlow cannot read or convert the
    model.
    """
    target = keras_file.with_name("saved_model" if form == "savedmodel" else "model.tflite")
    with tempfile.TemporaryDirectory(dir=keras_file.parent, prefix=".convert-") as folder:
        made = Path(folder) / target.name
        content: bytes | None = None
        try:
            model = keras.models.load_model(keras_file, compile=False)
            if form == "savedmodel":
                model.export(made, verbose=False)
            else:
                content = tf.lite.TFLiteConverter.from_keras_model(model).convert()
        except Exception as error:  # Keras, TensorFlow and the converter raise any type
            reason = (error_text(error).splitlines() or [type(error).__name__])[0]
            raise ProgramError(
                f"{keras_file}: cannot be converted: {reason}. The .keras file itself is intact; "
                "if the model has custom layers, convert it in a program that defines them"
            ) from error
        if content is not None:
            made.write_bytes(content)
        if target.is_dir():
            shutil.rmtree(target)
        made.replace(target)
    return target
