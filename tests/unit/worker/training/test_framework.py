"""Tests of the import of TensorFlow and Keras.

A trainer starts without scikit-learn and Matplotlib, which Keras would import. Both can be imported
afterwards, and modules imported before stay. The garbage collector skips TensorFlow's objects and
collects all others.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

NAMES = "found = [n for n in ('matplotlib', 'sklearn') if n in sys.modules]"


@pytest.fixture(scope="module")
def trainer() -> subprocess.CompletedProcess[str]:
    """A process that imports the trainer and the modules that it avoids, and aborts."""
    program = f"""
import os, sys, dlion_worker.trainer.__main__
{NAMES}
import matplotlib, sklearn
from dlion_worker.training import framework
from dlion_worker.training.datasets import named_datasets
print(found, len(named_datasets.digits()[1]), flush=True)
with framework._without_information():
    os.write(2, b"I0000 00:00:1 port.cc:153] on\\nE0000 00:00:1 guard.cc:2] no AVX\\n")
    os.abort()
"""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )


def test_a_trainer_starts_without_modules_that_only_extras_of_keras_use(
    trainer: subprocess.CompletedProcess[str],
) -> None:
    assert trainer.stdout == "[] 1797\n"


def test_earlier_imports_stay_and_garbage_is_collected_except_tensorflows() -> None:
    program = f"""
import gc, sys, sklearn
from dlion_worker.training import framework
{NAMES}
print("sklearn" in found, sys.modules["sklearn"] is sklearn, framework.keras.backend.backend())
class Ring: pass
ring = Ring(); ring.self = ring; del ring
def rings(): return sum(type(o) is Ring for o in gc.get_objects())
print(gc.isenabled(), any(o is framework.tf.__dict__ for o in gc.get_objects()), rings())
print(gc.collect() > 0, rings())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout.split() == [
        "True",
        "True",
        "tensorflow",
        "True",
        "False",
        "1",
        "True",
        "0",
    ]


def test_the_import_logs_fatal_messages_but_no_information(
    trainer: subprocess.CompletedProcess[str],
) -> None:
    """This holds also for an import that aborts."""
    assert trainer.returncode == -signal.SIGABRT
    assert trainer.stderr == "E0000 00:00:1 guard.cc:2] no AVX\n"
