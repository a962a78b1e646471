"""Checks the rules of size and shape in docs/architecture.md; exits with 1 on a violation.

Reports files and functions (without docstrings) over their limits, folders with too many modules,
modules with meaningless names, class names that occur twice, and forbidden `__init__.py` files.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("api", "operator", "worker", "cli")
FILE_LIMIT = 400
FUNCTION_LIMIT = 50
MODULE_LIMIT = 15
NAMELESS = frozenset({"utils", "helpers", "common", "manager", "base", "misc"})


def findings(root: Path = ROOT) -> list[str]:
    """Every violation below `root`, as `path: what`."""
    violations = [
        f"{source}/__init__.py: a source root must not be a package"
        for source in SOURCE_ROOTS
        if (root / source / "__init__.py").exists()
    ]
    violations += [
        f"{path.relative_to(root)}: tests/ holds no packages"
        for path in root.glob("tests/**/__init__.py")
    ]
    sources = [
        path
        for source in SOURCE_ROOTS
        for path in sorted((root / source).rglob("*.py"))
        if "wire" not in path.parts and "build" not in path.parts
    ]
    for path in sources:
        violations += _of_file(root, path)
    return [*violations, *_of_folders(root, sources), *_of_class_names(root, sources)]


def _of_folders(root: Path, sources: list[Path]) -> list[str]:
    counts = Counter(
        str(path.parent.relative_to(root)) for path in sources if path.name != "__init__.py"
    )
    violations = []
    for folder, count in sorted(counts.items()):
        if count > MODULE_LIMIT:
            violations.append(f"{folder}: {count} modules, limit {MODULE_LIMIT}")
    return violations


def _of_class_names(root: Path, sources: list[Path]) -> list[str]:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return [
        f"{first}: class {name} is also defined in {', '.join(others)}"
        for name, (first, *others) in sorted(places.items())
        if others
    ]


def _of_file(root: Path, path: Path) -> list[str]:
    name = path.relative_to(root)
    text = path.read_text()
    violations = []
    if (count := text.count("\n")) > FILE_LIMIT:
        violations.append(f"{name}: {count} lines, limit {FILE_LIMIT}")
    if path.stem in NAMELESS:
        violations.append(f"{name}: '{path.stem}' is not a term of the field")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None and len(node.body) > 1
            first = node.body[1 if has_docstring else 0]
            length = (node.end_lineno or first.lineno) - first.lineno + 1
            if length > FUNCTION_LIMIT:
                violations.append(
                    f"{name}:{node.lineno}: {node.name} has {length} lines, limit {FUNCTION_LIMIT}"
                )
    return violations


if __name__ == "__main__":
    if violations := findings():
        sys.exit("\n".join(violations))
