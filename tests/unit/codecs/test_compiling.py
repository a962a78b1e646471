"""Facts: what was compiled is kept for the next process; processes that start together, and one
that can keep nothing, work all the same; a kernel takes its own types alone; those who code nothing
do not carry the compiler.

Left out: what the kernels give (tests/property/test_codecs.py), and their time (benchmarks).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlion_worker.codecs import kernels

TINY = """
from numba import types
from dlion_worker.codecs.compiling import compiled

@compiled(types.int64(types.int64))
def doubled(number):
    return 2 * number
"""

NOWHERE = """
import tempfile

def refuse(*arguments, **keywords):
    raise OSError("read-only file system")

tempfile.TemporaryFile = refuse  # by which numba finds out where it can write
"""


def start(folder: Path, code: str) -> subprocess.Popen[str]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "kept"), "PYTHONPATH": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    words, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return words.strip()


CALL = "import tiny; print(tiny.doubled(4), sum(tiny.doubled.stats.cache_hits.values()))"


def test_processes_that_start_together_work_and_the_next_one_compiles_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    together = [start(tmp_path, CALL) for _ in range(4)]
    assert all(said(process).startswith("8 ") for process in together)
    assert said(start(tmp_path, CALL)) == "8 1"


def test_a_process_that_can_keep_nothing_works(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    assert said(start(tmp_path, NOWHERE + CALL)) == "8 0"
    assert not (tmp_path / "kept").exists() or not list((tmp_path / "kept").rglob("*.nb?"))


def test_arrays_of_another_type_are_refused_not_compiled_for() -> None:
    with pytest.raises(TypeError):
        kernels.peak_bits(np.zeros(3, np.float64))
    with pytest.raises(TypeError):
        kernels.peak_bits(np.zeros(6, np.uint32)[::2])


@pytest.mark.parametrize(
    "module",
    ["dlion_worker.sidecar.__main__", "dlion_operator.coordinator.server", "dlion_cli.__main__"],
)
def test_who_codes_nothing_does_not_carry_the_compiler(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print('numba' in sys.modules, 'llvmlite' in sys.modules)"
    assert said(start(tmp_path, code)) == "False False"
