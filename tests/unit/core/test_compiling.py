"""Tests of the cache of compiled kernels.

A compiled kernel is kept for the next process. Kernels shipped in an image are used, also by
processes that start together. If they cannot be used, no process stops. Processes that start
together, and a process that cannot write, work too. A kernel accepts its own types only. A process
that codes nothing does not load the compiler. The build of an image compiles each kernel that its
workers use.

Left out: the results of kernels (tests/property/test_codecs.py) and their time (benchmarks).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlion_core import compiling
from dlion_core.codecs import kernels

TINY = """
from numba import types
from dlion_core.compiling import compiled

@compiled(types.int64(types.int64))
def doubled(number):
    return 2 * number
"""

TOGETHER = 2
"""Number of processes that start at the same time."""
NOWHERE = """
import tempfile

def refuse(*arguments, **keywords):
    raise OSError("read-only file system")

tempfile.TemporaryFile = refuse  # by which numba finds out where it can write
"""


def start(folder: Path, code: str, **settings: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "kept"), "PYTHONPATH": path}
    environment |= settings
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )


def printed(process: subprocess.Popen[str]) -> str:
    words, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return words.strip()


CALL = "import tiny; print(tiny.doubled(4), sum(tiny.doubled.stats.cache_hits.values()))"


def test_processes_that_start_together_work_and_the_next_one_compiles_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    together = [start(tmp_path, CALL) for _ in range(TOGETHER)]
    assert all(printed(process).startswith("8 ") for process in together)
    assert printed(start(tmp_path, CALL)) == "8 1"


def test_shipped_kernels_are_used_by_all_processes_that_start_together(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    assert printed(start(tmp_path, CALL)) == "8 0"
    (tmp_path / "kept").rename(tmp_path / "shipped")
    shipped = str(tmp_path / "shipped")
    together = [start(tmp_path, CALL, DLION_KERNELS=shipped) for _ in range(TOGETHER)]
    assert [printed(process) for process in together] == ["8 1"] * TOGETHER
    assert sorted(path.name for path in tmp_path.glob("kept*")) == ["kept"]


@pytest.mark.parametrize("shipped", ["/nowhere", "", "/etc/hostname"])
def test_shipped_kernels_that_cannot_be_used_stop_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: str
) -> None:
    """Nothing is left that a process could mistake for its cache."""
    monkeypatch.setenv(compiling.SHIPPED_VARIABLE, shipped)
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "kept"))
    compiling.install_shipped_kernels()
    assert list(tmp_path.iterdir()) == []


def test_a_process_without_a_writable_cache_works(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    assert printed(start(tmp_path, NOWHERE + CALL)) == "8 0"
    assert not (tmp_path / "kept").exists() or not list((tmp_path / "kept").rglob("*.nb?"))


def test_arrays_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError):
        kernels.peak_bits(np.zeros(3, np.float64))
    with pytest.raises(TypeError):
        kernels.peak_bits(np.zeros(6, np.uint32)[::2])


def test_a_process_that_codes_nothing_does_not_load_the_compiler(tmp_path: Path) -> None:
    """One process checks all modules: a module that one of them loads stays loaded."""
    modules = ("dlion_worker.sidecar.__main__", "dlion_operator.coordinator.server",
               "dlion_cli.command_line")  # fmt: skip
    found = "module, 'numba' in sys.modules, 'llvmlite' in sys.modules"
    code = f"import importlib, sys\nfor module in {modules}:\n"
    code += f"    importlib.import_module(module)\n    print({found})\n"
    assert printed(start(tmp_path, code)).splitlines() == [f"{one} False False" for one in modules]


def test_the_build_of_an_image_compiles_each_kernel_of_its_workers(tmp_path: Path) -> None:
    """Other kernels would be compiled in the first trainer of each pod, on the slow machine."""
    root = Path(__file__).parents[3]
    dockerfile = (root / "Dockerfile").read_text()
    (built,) = re.findall(r"^RUN python -c '(import .*)'$", dockerfile, re.MULTILINE)
    with_kernels = {
        ".".join(path.relative_to(root / "worker").with_suffix("").parts)
        for package in ("dlion_core", "dlion_worker")
        for path in (root / "worker" / package).rglob("*.py")
        if re.search(r"^@compiled\(", path.read_text(), re.MULTILINE)
    }
    code = f"import sys; {built}; print(*(name for name in sys.modules if 'dlion' in name))"
    assert with_kernels
    # This uses the cache of the tests: only the imported modules matter here.
    assert with_kernels <= set(printed(start(tmp_path, code, NUMBA_CACHE_DIR="")).split())
    # The build stage copies only the codecs and their imports.
    assert {".".join(name.split(".")[:2]) for name in with_kernels} == {"dlion_core.codecs"}
