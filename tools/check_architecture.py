"""Says where the tree breaks its own rules of size and shape (docs/architecture.md).

Files over the hard limit, functions whose body (docstring apart) is over the limit, packages
named after nothing, an `__init__.py` where none may be. Exit code 1 on any finding.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("api", "operator", "worker", "cli")
FILE_LIMIT = 400
FUNCTION_LIMIT = 50
NAMELESS = frozenset({"utils", "helpers", "common", "manager", "base", "misc"})


def findings() -> list[str]:
    """Every breach, as `path: what`."""
    found = [
        f"{root}/__init__.py: a source root must not be a package"
        for root in SOURCE_ROOTS
        if (ROOT / root / "__init__.py").exists()
    ]
    found += [
        f"{p.relative_to(ROOT)}: tests/ holds no packages"
        for p in ROOT.glob("tests/**/__init__.py")
    ]
    for root in SOURCE_ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            if "wire" not in path.parts and "build" not in path.parts:
                found += _of_file(path)
    return found


def _of_file(path: Path) -> list[str]:
    name = path.relative_to(ROOT)
    text = path.read_text()
    found = []
    if (count := text.count("\n")) > FILE_LIMIT:
        found.append(f"{name}: {count} lines, limit {FILE_LIMIT}")
    if path.stem in NAMELESS:
        found.append(f"{name}: '{path.stem}' names nothing of the field")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None and len(node.body) > 1
            first = node.body[1 if has_docstring else 0]
            length = (node.end_lineno or first.lineno) - first.lineno + 1
            if length > FUNCTION_LIMIT:
                found.append(
                    f"{name}:{node.lineno}: {node.name} has {length} lines, limit {FUNCTION_LIMIT}"
                )
    return found


if __name__ == "__main__":
    if breaches := findings():
        sys.exit("\n".join(breaches))
