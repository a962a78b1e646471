"""Test that `tools/check_architecture.py` reports each planted violation.

Left out: this repository (`make check`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

TOOL = Path(__file__).parents[2] / "tools" / "check_architecture.py"
LONG_FUNCTION = "def long():\n" + "    x = 1\n" * 60


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_architecture", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planted(root: Path, files: dict[str, str], *, min_lines: int = 60) -> list[str]:
    """Write the files, with comments up to so many lines, and return the violations."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "#\n" * (min_lines - text.count("\n")))
    findings: Any = tool().findings
    return list(findings(root))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"api/p/a.py": "x = 1\n" * 401}, "api/p/a.py: 401 lines, limit 400"),
        ({"api/p/a.py": LONG_FUNCTION}, "api/p/a.py:1: long has 60 lines, limit 50"),
        ({"api/p/utils.py": ""}, "api/p/utils.py: 'utils' is not a term of the field"),
        ({"cli/__init__.py": ""}, "cli/__init__.py: a source root must not be a package"),
        ({"tests/a/__init__.py": ""}, "tests/a/__init__.py: tests/ holds no packages"),
        ({f"api/p/m{number}.py": "" for number in range(16)}, "api/p: 16 modules, limit 15"),
        (
            {"api/p/a.py": "class Store: ...\n", "cli/p/b.py": "class Store: ...\n"},
            "api/p/a.py:1: class Store is also defined in cli/p/b.py:1",
        ),
        (
            {
                "api/p/a.py": "from p import b\n",
                "api/p/b.py": "def late():\n    import p.c\n",
                "cli/p/c.py": "from p.a import x\n",
            },
            "import circle: p.a, p.b, p.c",
        ),
    ],
)
def test_a_planted_violation_is_reported(
    files: dict[str, str], expected: str, tmp_path: Path
) -> None:
    assert planted(tmp_path, files) == [expected]


def test_types_may_be_imported_in_a_cycle(tmp_path: Path) -> None:
    lazily = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import x\n"
    assert planted(tmp_path, {"api/p/a.py": lazily, "api/p/b.py": "from p import a\n"}) == []


def test_a_tree_within_the_limits_passes(tmp_path: Path) -> None:
    files = {f"api/p/m{number}.py": f"class C{number}: ...\n" for number in range(15)}
    assert planted(tmp_path, files) == []


@pytest.mark.parametrize(
    ("importers", "lines", "is_found"),
    [(0, 59, True), (1, 59, True), (1, 60, False), (2, 1, False)],
)
def test_a_small_module_with_one_importer_is_reported(
    tmp_path: Path, importers: int, lines: int, *, is_found: bool
) -> None:
    """An import for types counts."""
    lazily = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import x\n"
    files = {f"api/p/b{number}.py": lazily + "#\n" * 60 for number in range(importers)}
    text = "api/p/a.py: under 60 lines with one importer: fold it in"
    assert planted(tmp_path, {"api/p/a.py": "", **files}, min_lines=lines) == [text] * is_found
