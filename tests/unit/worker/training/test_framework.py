"""Tests of the import of TensorFlow and Keras.

A trainer starts without scikit-learn and Matplotlib, which Keras would import. Both can be imported
afterwards, and modules imported before stay. The garbage collector skips TensorFlow's objects and
collects all others.
"""

from __future__ import annotations

import signal
import subprocess
import sys

NAMES = "found = [n for n in ('matplotlib', 'sklearn') if n in sys.modules]"


def _printed(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    return result.stdout.strip()


def test_a_trainer_starts_without_modules_that_only_extras_of_keras_use() -> None:
    program = f"""
import sys, dlion_worker.trainer.__main__
{NAMES}
import matplotlib, sklearn
from dlion_worker.training.datasets import named_datasets
print(found, len(named_datasets.digits()[1]))
"""
    assert _printed(program) == "[] 1797"


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
    assert _printed(program).split() == [
        "True",
        "True",
        "tensorflow",
        "True",
        "False",
        "1",
        "True",
        "0",
    ]


def test_the_import_logs_fatal_messages_but_no_information() -> None:
    """This holds also for an import that aborts."""
    aborting = """
import os
from dlion_worker.training import framework
with framework._without_information():
    os.write(2, b"I0000 00:00:1 port.cc:153] on\\nE0000 00:00:1 guard.cc:2] no AVX\\n")
    os.abort()
"""
    ended = subprocess.run(
        [sys.executable, "-c", aborting], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == -signal.SIGABRT
    assert ended.stderr == "E0000 00:00:1 guard.cc:2] no AVX\n"
