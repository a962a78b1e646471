"""Tests of the traceback of a program.

It begins with the program's first line, wherever DLion called it, and keeps the later lines, also
DLion's. A traceback without a line of the program is complete. That of a SyntaxError has only its
own line.

Left out: the printing (tests/unit/cli/test_program_files, tests/local).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dlion_api.errors import ProgramError
from dlion_api.spec import Program
from dlion_worker.program_traceback import program_traceback
from dlion_worker.training import programs
from dlion_worker.training.building import build_model

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "Traceback (most recent call last):\n"


def printed(folder: Path, text: str) -> str:
    """Return the printed traceback of a failing program with this text."""
    (folder / "mine.py").write_text(text)
    with pytest.raises(ProgramError) as caught:  # noqa: PT012 - either may fail
        program = programs.load(Program(file="mine.py"), directory=folder)
        build_model(program, 3, 1, (4,), np.dtype(np.float32), scales_pixels=False)
    assert caught.value.__cause__ is not None
    return program_traceback(caught.value.__cause__)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def build_model():\n    return missing\n", "line 2, in build_model"),
        ("import math\n\nmath.missing\n", "line 3, in <module>"),
        ("import re\n\nre.compile('(')\n", "line 3, in <module>"),
        ("def build_model(:\n", "line 1\n"),
    ],
)
def test_a_traceback_begins_with_a_line_of_the_program(
    tmp_path: Path, text: str, line: str
) -> None:
    assert printed(tmp_path, text).startswith(f'{HEAD}  File "{tmp_path}/mine.py", {line}')


def test_lines_after_those_of_the_program_stay(tmp_path: Path) -> None:
    text = "from dlion_api.plain_text import without_escapes\n\n\ndef build_model():\n"
    found = printed(tmp_path, f"{text}    without_escapes(3)\n")
    files = re.findall(r'File ".*/(.*)", line', found)
    assert files == ["mine.py", "plain_text.py"]
    assert found.endswith("TypeError: argument of type 'int' is not iterable")


def test_a_traceback_without_a_line_of_the_program_is_complete(tmp_path: Path) -> None:
    found = printed(tmp_path, "def build_model(width):\n    return width\n")
    assert found.startswith(HEAD)
    assert "in user_code" in found
    assert "in build" in found
