"""Facts: what was compiled is kept for the next process; what an image ships is taken up, also by
processes that start together, and where it cannot be, nobody stops; processes that start together,
and one that can keep nothing, work all the same; a kernel takes its own types alone; those who code
nothing do not carry the compiler; an image's build compiles every kernel that its workers have.

Left out: what the kernels give (tests/property/test_codecs.py), and their time (benchmarks).
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
"""Processes that start at the same time."""
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


def said(process: subprocess.Popen[str]) -> str:
    words, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return words.strip()


CALL = "import tiny; print(tiny.doubled(4), sum(tiny.doubled.stats.cache_hits.values()))"


def test_processes_that_start_together_work_and_the_next_one_compiles_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    together = [start(tmp_path, CALL) for _ in range(TOGETHER)]
    assert all(said(process).startswith("8 ") for process in together)
    assert said(start(tmp_path, CALL)) == "8 1"


def test_what_an_image_ships_is_taken_up_by_all_that_start_together(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    assert said(start(tmp_path, CALL)) == "8 0"
    (tmp_path / "kept").rename(tmp_path / "shipped")
    shipped = str(tmp_path / "shipped")
    together = [start(tmp_path, CALL, DLION_KERNELS=shipped) for _ in range(TOGETHER)]
    assert [said(process) for process in together] == ["8 1"] * TOGETHER
    assert sorted(path.name for path in tmp_path.glob("kept*")) == ["kept"]


@pytest.mark.parametrize("shipped", ["/nowhere", "", "/etc/hostname"])
def test_what_cannot_be_taken_up_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: str
) -> None:
    """Nothing is left that a process would take for its cache."""
    monkeypatch.setenv(compiling.SHIPPED_VARIABLE, shipped)
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "kept"))
    compiling.install_shipped_kernels()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_can_keep_nothing_works(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    assert said(start(tmp_path, NOWHERE + CALL)) == "8 0"
    assert not (tmp_path / "kept").exists() or not list((tmp_path / "kept").rglob("*.nb?"))


def test_arrays_of_another_type_are_refused_not_compiled_for() -> None:
    with pytest.raises(TypeError):
        kernels.peak_bits(np.zeros(3, np.float64))
    with pytest.raises(TypeError):
        kernels.peak_bits(np.zeros(6, np.uint32)[::2])


def test_who_codes_nothing_does_not_carry_the_compiler(tmp_path: Path) -> None:
    """One process for all: what one of them loads stays loaded."""
    modules = ("dlion_worker.sidecar.__main__", "dlion_operator.coordinator.server",
               "dlion_cli.command_line")  # fmt: skip
    found = "module, 'numba' in sys.modules, 'llvmlite' in sys.modules"
    code = f"import importlib, sys\nfor module in {modules}:\n"
    code += f"    importlib.import_module(module)\n    print({found})\n"
    assert said(start(tmp_path, code)).splitlines() == [f"{one} False False" for one in modules]


def test_an_images_build_compiles_every_kernel_that_its_workers_have(tmp_path: Path) -> None:
    """Others are compiled in the first trainer of every pod, on the slow machine."""
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
    # With the tests' own cache, as which modules are imported is the question.
    assert with_kernels <= set(said(start(tmp_path, code, NUMBA_CACHE_DIR="")).split())
    # The stage copies the codecs and what they import, no more.
    assert {".".join(name.split(".")[:2]) for name in with_kernels} == {"dlion_core.codecs"}
