"""TensorFlow and Keras, for all of `dlion_worker.training`, without what no worker uses of them.

Keras looks for scikit-learn and Matplotlib when it is imported, for `keras.wrappers` and the
pictures of `keras.visualization`. Where they are installed, that costs a start as much CPU as the
imports of DLion itself. Here they seem not to be installed while Keras is imported; later on they
can be imported as ever.

What both consist of, hundreds of thousands of objects, stays as long as the process. Garbage is
looked for neither while it is made, which costs a fifth of the import, nor among it later, which
would stop a training for some tenths of a second each time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Inside, to import these raises ModuleNotFoundError, but for those that are there already."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # how Python is told so
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _never_collected() -> Iterator[None]:
    """What is there at the end is left alone by the garbage collector, as is its making."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


with _without("matplotlib", "sklearn"), _never_collected():
    import keras
    import tensorflow as tf

__all__ = ["keras", "tf"]
