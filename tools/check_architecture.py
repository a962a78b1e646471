"""Check the rules of size and shape in docs/architecture.md; exit with 1 on a violation.

Reports files and functions (without docstrings) over their limits, folders with too many modules,
small modules with one importer, modules with meaningless names, class names that occur twice,
import cycles, and forbidden `__init__.py` files.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("api", "operator", "worker", "cli")
FILE_LIMIT = 400
FUNCTION_LIMIT = 50
MODULE_LIMIT = 15
MIN_LINES = 60
"""A smaller module with one importer belongs into it, unless `SEPARATE` gives a reason."""
NAMELESS = frozenset({"utils", "helpers", "common", "manager", "base", "misc"})
SEPARATE = {
    "dlion.model_program": "named by string: the program of a notebook's job",
    "dlion_cli.__main__": "entry point",
    "dlion_cli.commands.cluster.watch": "named by string in `command_line`",
    "dlion_cli.commands.local.init": "named by string in `command_line`",
    "dlion_cli.commands.local.report": "named by string in `command_line`",
    "dlion_cli.findings.folder_description": "imported only if the argument is a folder",
    "dlion_cli.terminal.awaited_child": "the importer would have 390 lines",
    "dlion_core.links.message_rate": "pure; the importer does I/O",
    "dlion_core.policies.claims.cumulative_sums": "one published method",
    "dlion_core.policies.robust.clipping": "one published method",
    "dlion_core.policies.robust.krum": "one published method",
    "dlion_core.policies.weights.sparseloco": "named by string in the catalogue of policies",
    "dlion_environments.aggregate_machine": "about environments; the importer is a command",
    "dlion_operator.__main__": "entry point",
    "dlion_operator.apply.action_messages": "pure; the importer does I/O",
    "dlion_operator.apply.status_patch": "pure; the importer does I/O",
    "dlion_operator.coordinator.thread": "exported by its package, for `dlion run`",
    "dlion_results.summary.decisions": "the importer would have 390 lines",
    "dlion_results.summary.rank_mapping": "about records; the importer is a command",
    "dlion_results.summary.training_pauses": "the importer would have 390 lines",
    "dlion_simulator.quarantine": "the importer has 400 lines",
    "dlion_simulator.trace": "the importer has 400 lines",
    "dlion_worker.checkpoint_mac": "security code, which is reviewed by itself",
    "dlion_worker.coordination.download_reports": "gRPC; the importer does not use it",
    "dlion_worker.trainer.awaited_peers": "the importer has 400 lines",
    "dlion_worker.trainer.step_clock": "the importer has 400 lines",
}
"""Why a small module with one importer, or none, is separate."""


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
        *_of_small_modules(root, sources),
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
    graph = _import_graph(root, sources, _imports)
    circles = [sorted(some) for some in nx.strongly_connected_components(graph) if len(some) > 1]
    return [f"import circle: {', '.join(circle)}" for circle in sorted(circles)]


def _of_small_modules(root: Path, sources: Mapping[Path, ast.Module]) -> list[str]:
    """Find small modules with one importer or none; imports of types alone count."""
    graph = _import_graph(root, sources, lambda tree: _imported_names(ast.walk(tree)))
    small = {
        module: path
        for module, path in graph.nodes(data="path")
        if path.name != "__init__.py"
        and path.read_text().count("\n") < MIN_LINES
        and graph.in_degree(module) <= 1
    }
    violations = [
        f"{path.relative_to(root)}: under {MIN_LINES} lines with one importer: fold it in"
        for module, path in small.items()
        if module not in SEPARATE
    ]
    if root == ROOT:
        violations += [
            f"SEPARATE: {module} needs no reason" for module in SEPARATE if module not in small
        ]
    return violations


def _import_graph(
    root: Path, sources: Mapping[Path, ast.Module], imports: Callable[[ast.Module], Iterable[str]]
) -> nx.DiGraph:
    """Edges lead from a module to those that it imports; a node has its `path`."""
    modules = {}
    for path in sources:
        parts = path.relative_to(root).with_suffix("").parts[1:]
        modules[".".join(part for part in parts if part != "__init__")] = path
    graph = nx.DiGraph()
    for module, path in modules.items():
        graph.add_node(module, path=path)
        for name in imports(sources[path]):
            imported = name if name in modules else name.rpartition(".")[0]
            if imported in modules and imported != module:
                graph.add_edge(module, imported)
    return graph


def _imports(node: ast.AST) -> Iterator[str]:
    """Return full names that a module imports, outside of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) or _is_for_types(child):
            continue
        yield from _imported_names([child])
        yield from _imports(child)


def _imported_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


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
