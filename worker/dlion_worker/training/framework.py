"""Imports TensorFlow and Keras for `dlion_worker.training`, without unused costs."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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


@contextmanager
def _without_information() -> Iterator[None]:
    """Suppress informational messages of TensorFlow's C++ code.

    It logs them before it reads TF_CPP_MIN_LOG_LEVEL. The filter is a separate process, so that the
    last messages of an aborted import are not lost, for example on a CPU without the instructions.
    """
    if os.getpid() == 1:  # its end would end the filter first
        yield
        return
    try:
        os.fstat(2)
        passed = subprocess.Popen(
            ["sed", "-u", "-E", "/^(I0000 |WARNING: All log messages before absl)/d"],
            stdin=subprocess.PIPE,
            stdout=2,
            start_new_session=True,
        )
    except OSError:  # no sed, or no standard error
        yield
        return
    assert passed.stdin is not None
    kept = os.dup(2)
    os.dup2(passed.stdin.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        passed.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # another thread's process may hold the pipe
            passed.wait(timeout=1.0)


with _without("matplotlib", "sklearn"), _never_collected(), _without_information():
    import keras
    import tensorflow as tf

__all__ = ["keras", "tf"]
