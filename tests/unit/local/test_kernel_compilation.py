"""Kernels are compiled before trainers start, once, and where they cannot be nothing breaks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlion_local.runner import kernel_compilation


def package(folder: Path, body: str) -> Path:
    """A package that stands for the codecs: importing it says that it was, beside its source."""
    path = folder / "stand_in"
    path.mkdir()
    (path / "kernels.py").write_text("")
    (path / "__init__.py").write_text(body)
    return path


COMPILES = """
from pathlib import Path
cache = Path(__file__).with_name("__pycache__")
cache.mkdir(exist_ok=True)
with (cache / "kernels.one.nbi").open("a") as file:
    file.write("compiled\\n")
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(kernel_compilation, "PACKAGE", "stand_in")
    return package(tmp_path, COMPILES)


def compiled(path: Path) -> int:
    file = path / "__pycache__" / "kernels.one.nbi"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_they_are_compiled_once_and_again_when_their_source_changes(stand_in: Path) -> None:
    kernel_compilation.compile_kernels()
    kernel_compilation.compile_kernels()
    assert compiled(stand_in) == 1
    (stand_in / "kernels.py").write_text("changed = True")
    kernel_compilation.compile_kernels()
    assert compiled(stand_in) == 2
    (stand_in / "more_kernels.py").write_text("")
    kernel_compilation.compile_kernels()
    kernel_compilation.compile_kernels()
    assert compiled(stand_in) == 3


def test_a_compiler_that_fails_is_told_and_stops_nobody(
    stand_in: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = (stand_in / "__init__.py").read_text()
    (stand_in / "__init__.py").write_text("raise SystemExit('no compiler here')")
    kernel_compilation.compile_kernels()
    assert "no compiler here" in caplog.text
    (stand_in / "__init__.py").write_text(whole)
    kernel_compilation.compile_kernels()
    assert compiled(stand_in) == 1


def test_what_is_kept_elsewhere_is_left_alone(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(stand_in))
    kernel_compilation.compile_kernels()
    assert compiled(stand_in) == 0
