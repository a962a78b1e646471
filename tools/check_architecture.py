"""Check the rules of size and shape in docs/architecture.md; exit with 1 on a violation.

Reports files and functions (without docstrings) over their limits, folders with too many modules,
modules with meaningless names, class names that occur twice, import cycles, and forbidden
`__init__.py` files.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("api", "operator", "worker", "cli")
FILE_LIMIT = 400
FUNCTION_LIMIT = 50
MODULE_LIMIT = 15
NAMELESS = frozenset({"utils", "helpers", "common", "manager", "base", "misc"})


def findings(root: Path = ROOT) -> list[str]:
    """Return every violation below `root`, as `path: what`."""
    violations = [
        f"{source}/__init__.py: a source root must not be a package"
        for source in SOURCE_ROOTS
        if (root / source / "__init__.py").exists()
    ]
    violations += [
        f"{path.relative_to(root)}: tests/ holds no packages"
        for path in root.glob("tests/**/__init__.py")
    ]
    sources = {
        path: ast.parse(path.read_text())
        for source in SOURCE_ROOTS
        for path in sorted((root / source).rglob("*.py"))
        if "wire" not in path.parts and "build" not in path.parts
    }
    for path, tree in sources.items():
        violations += _of_file(root, path, tree)
    return [
        *violations,
        *_of_folders(root, sources),
        *_of_class_names(root, sources),
        *_of_circles(root, sources),
    ]


def _of_folders(root: Path, sources: Iterable[Path]) -> list[str]:
    counts = Counter(
        str(path.parent.relative_to(root)) for path in sources if path.name != "__init__.py"
    )
    violations = []
    for folder, count in sorted(counts.items()):
        if count > MODULE_LIMIT:
            violations.append(f"{folder}: {count} modules, limit {MODULE_LIMIT}")
    return violations


def _of_circles(root: Path, sources: Mapping[Path, ast.Module]) -> list[str]:
    """Find modules that import each other at run time; imports of types alone do not count."""
    modules: dict[str, ast.Module] = {}
    for path, tree in sources.items():
        parts = path.relative_to(root).with_suffix("").parts[1:]
        modules[".".join(part for part in parts if part != "__init__")] = tree
    graph = nx.DiGraph()
    for module, tree in modules.items():
        for name in _imports(tree):
            imported = name if name in modules else name.rpartition(".")[0]
            if imported in modules and imported != module:
                graph.add_edge(module, imported)
    circles = [sorted(some) for some in nx.strongly_connected_components(graph) if len(some) > 1]
    return [f"import circle: {', '.join(circle)}" for circle in sorted(circles)]


def _imports(node: ast.AST) -> Iterator[str]:
    """Return full names that a module imports, outside of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) or _is_for_types(child):
            continue
        if isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        else:
            yield from _imports(child)


def _is_for_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def _of_class_names(root: Path, sources: Mapping[Path, ast.Module]) -> list[str]:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return [
        f"{first}: class {name} is also defined in {', '.join(others)}"
        for name, (first, *others) in sorted(places.items())
        if others
    ]


def _of_file(root: Path, path: Path, tree: ast.Module) -> list[str]:
    name = path.relative_to(root)
    violations = []
    if (count := path.read_text().count("\n")) > FILE_LIMIT:
        violations.append(f"{name}: {count} lines, limit {FILE_LIMIT}")
    if path.stem in NAMELESS:
        violations.append(f"{name}: '{path.stem}' is not a term of the field")
    for node in ast.walk(tree):
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
    gc.disable()  # searching the syntax trees for garbage takes as long as parsing
    if violations := findings():
        sys.exit("\n".join(violations))
