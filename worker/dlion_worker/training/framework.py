"""Imports TensorFlow and Keras for `dlion_worker.training`, without unused costs."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Make imports of these names raise ModuleNotFoundError, unless already imported.

    Keras imports scikit-learn and Matplotlib for parts that no worker uses. If installed, they cost
    as much CPU as all of DLion's imports. They stay importable afterwards.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None marks a name as not importable
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _never_collected() -> Iterator[None]:
    """Exempt all objects created here from garbage collection.

    They are hundreds of thousands, and permanent. Collecting during the import costs a fifth of its
    time; scanning them later would stop training for some tenths of a second.
    """
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
