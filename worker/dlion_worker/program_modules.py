"""The files beside a user's program: which belong to it, and how its modules are imported.

A program may import modules and packages of its own folder. They are found in the syntax trees,
from the program on; nothing is executed. `training.programs` imports them, `dlion submit` sends
them in the program's ConfigMap, `dlion compare` compares them. All three take exactly these files,
so that a program that runs on one machine does not lack a module in a pod. Likewise a data file
belongs to it, such as weights, that a module names in a text and finds by `__file__`.

A ConfigMap has no folders: there the module `net.layers` is the key `net.layers.py`, and the
package `net` is `net.__init__.py`. A data file is beside its module by its name alone.

Standard library only: commands for clusters run without TensorFlow.
"""

import ast
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from dlion_api.errors import ProgramError

_INIT = "__init__"


@dataclass(frozen=True)
class ProgramModules:
    """The files that belong to a program, but for its own."""

    files: Mapping[str, Path]
    """Files by dotted name, sorted. A package's file is its `__init__.py`."""
    imports_program: bool
    """Whether one of the files imports the program by its file's name."""
    problems: tuple[str, ...]
    """Why the program cannot have what it imports. Each begins with file and line."""
    data_files: tuple[Path, ...] = ()
    """Files that a module with `__file__` names, in the module's folder."""

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all files, and of the packages without `__init__.py` above them."""
        parts = (name.split(".") for name in self.files)
        return frozenset(".".join(each[:end]) for each in parts for end in range(1, len(each) + 1))

    def keys(self) -> dict[str, Path]:
        """The files by their keys in a ConfigMap."""
        return {
            f"{name}.{_INIT}.py" if is_package(name, path) else f"{name}.py": path
            for name, path in self.files.items()
        }


def is_package(name: str, path: Path) -> bool:
    """Whether `path`, the file of module `name`, makes it a package."""
    return path.name in (f"{_INIT}.py", f"{name}.{_INIT}.py")


def find_modules(program: Path, *, in_config_map: bool = False) -> ProgramModules:
    """The modules beside `program` that it imports, and those that they import.

    `in_config_map`: files may be named as keys of a ConfigMap. A program that is not Python has no
    modules, and no problem here: to load it fails.
    """
    return _Search(program, in_config_map).run()


def parse_file(path: Path) -> ast.Module:
    """The syntax tree of a file. Raises: ProgramError with file and line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns when it imports the file
            return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        line = "" if error.lineno is None else f":{error.lineno}"  # a file with null bytes has none
        raise ProgramError(f"{path}{line}: is not Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(f"{path}: is not Python: {error}") from error
    except OSError as error:
        raise ProgramError(f"{path}: cannot be read: {error.strerror}") from error


class ProgramFinder(MetaPathFinder):
    """Imports a program's modules. No other file of its folder can be imported by it."""

    def __init__(self, modules: ProgramModules) -> None:
        self._modules = modules
        self.top_names = {name.partition(".")[0] for name in modules.names}

    def install(self) -> None:
        """Put this first, in place of another program's, whose modules are forgotten.

        Names of installed packages are among `ProgramModules.problems`, so this hides none.
        """
        others = [finder for finder in sys.meta_path if isinstance(finder, ProgramFinder)]
        own = self.top_names.union(*(other.top_names for other in others))
        for name in [each for each in sys.modules if each.partition(".")[0] in own]:
            del sys.modules[name]
        sys.meta_path[:] = [self, *(each for each in sys.meta_path if each not in others)]

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - of the protocol
        target: ModuleType | None = None,  # noqa: ARG002 - of the protocol
    ) -> ModuleSpec | None:
        """Raises: ModuleNotFoundError for another module of the program's packages."""
        if fullname.partition(".")[0] not in self.top_names:
            return None
        if fullname not in self._modules.names:
            message = (
                f"No module named {fullname!r}: of the program's packages only .py files that an "
                "import statement names can be imported"
            )
            raise ModuleNotFoundError(message, name=fullname)
        file = self._modules.files.get(fullname)
        if file is None:
            return ModuleSpec(fullname, None, is_package=True)  # without __init__.py
        # In a ConfigMap a package has no folder.
        folders = [str(file.parent)] if file.name == f"{_INIT}.py" else []
        return importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=SourceFileLoader(fullname, str(file)),
            submodule_search_locations=folders if is_package(fullname, file) else None,
        )


class _Search:
    """One search, from a program's imports on."""

    def __init__(self, program: Path, in_config_map: bool) -> None:
        self._program, self._in_config_map = program, in_config_map
        self._folder = program.parent
        self._files: dict[str, Path] = {}
        self._data_files: set[Path] = set()
        self._pending: list[tuple[str, Path]] = [("", program)]
        self._imports_program = False
        self._problems: dict[str, str] = {}
        """Problems by the name of the module or by the statement's place: one is enough."""

    def run(self) -> ProgramModules:
        """Read the program, and each file that is found, once."""
        while self._pending:
            name, path = self._pending.pop()
            try:
                tree = parse_file(path)
            except ProgramError as error:
                if name:
                    self._problems[name] = str(error)
                continue
            self._data_files.update(_data_files(tree, path.parent))
            package = name if is_package(name, path) else name.rpartition(".")[0]
            for node, is_tried in _imports(tree):
                where = f"{path}:{node.lineno}"
                for imported in self._absolute(node, package, "" if is_tried else where):
                    self._take(imported, where)
        files = dict(sorted(self._files.items()))
        problems, data_files = self._problems.values(), sorted(self._data_files)
        return ProgramModules(files, self._imports_program, tuple(problems), tuple(data_files))

    def _absolute(
        self, node: ast.Import | ast.ImportFrom, package: str, where: str
    ) -> Iterator[str]:
        """Dotted names of all modules that the statement may import. `where` is empty for one
        whose failure the file expects."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = node.module or ""
        if node.level:
            parts = package.split(".") if package else []
            above = len(parts) - node.level + 1
            if above <= 0:
                if where:
                    text = "is a relative import outside of a package. Import by the whole name"
                    self._problems[where] = f"{where}: {text}"
                return
            base = ".".join([*parts[:above], *([base] if base else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")

    def _take(self, imported: str, where: str) -> None:
        """Take the module and the packages above it, as far as they are beside the program."""
        parts = imported.split(".")
        if _INIT in parts:
            return
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            path = self._locate(name)
            if path is None:
                if not self._has_more(name) or (end == 1 and _installed(name, self._folder, None)):
                    return
                continue
            is_taken = name in self._files or self._add(name, path, where)
            if not (is_taken and is_package(name, path)):
                return

    def _add(self, name: str, path: Path, where: str) -> bool:
        """Add a file; False if it cannot be the program's."""
        is_program = path.resolve() == self._program.resolve()
        if "." not in name and (other := _installed(name, self._folder, path)):
            if not is_program:  # its own name need not be free
                text = f"imports {name}, and {path} has the name of {other}. Rename it"
                self._problems.setdefault(name, f"{where}: {text}")
            return False
        if is_program:
            self._imports_program = True
            return False
        if not path.resolve().is_relative_to(self._folder.resolve()):
            text = f"imports {name}, and {path} leads out of the program's folder"
            self._problems.setdefault(name, f"{where}: {text}. Copy it into the folder")
            return False
        self._files[name] = path
        self._pending.append((name, path))
        return True

    def _locate(self, name: str) -> Path | None:
        """The module's file as Python would choose it: a package before a module."""
        path = self._folder.joinpath(*name.split("."))
        choices = [path / f"{_INIT}.py", path.with_name(f"{path.name}.py")]
        if self._in_config_map:
            keys = (f"{name}.{_INIT}.py", f"{name}.py")
            choices = [*(self._folder / key for key in keys), *choices]
        # `Path.is_file` raises for names that are too long.
        return next((each for each in choices if os.path.isfile(each)), None)  # noqa: PTH113

    def _has_more(self, name: str) -> bool:
        """Whether it may be a package without `__init__.py`."""
        if self._in_config_map and any(self._folder.glob(f"{name}.*.py")):
            return True
        return os.path.isdir(self._folder.joinpath(*name.split(".")))  # noqa: PTH112 - likewise


def _data_files(tree: ast.Module, folder: Path) -> Iterator[Path]:
    """Files of the folder whose names are texts of the module.

    None without `__file__`, as the working directory is another folder. Python's files are modules,
    and hidden files may be secrets. So may a file without a suffix whose name is a word that the
    module has for something else, such as a key "token".
    """
    nodes = [*ast.walk(tree)]
    if not any(isinstance(node, ast.Name) and node.id == "__file__" for node in nodes):
        return
    for node in nodes:
        match node:
            case ast.Constant(value=str(name)) if (
                "." in name[1:] and name[0] != "." and "/" not in name and not name.endswith(".py")
            ):
                # `Path.is_file` raises for names that are too long.
                if os.path.isfile(folder / name):  # noqa: PTH113
                    yield folder / name


def _imports(tree: ast.Module) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """All import statements in the file's order, each with whether it is inside a `try`."""
    found = []
    nodes: list[tuple[ast.AST, bool]] = [(tree, False)]
    while nodes:
        node, is_tried = nodes.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append((node, is_tried))
        is_tried = is_tried or isinstance(node, ast.Try | ast.TryStar)
        nodes.extend((child, is_tried) for child in ast.iter_child_nodes(node))
    return sorted(found, key=lambda each: each[0].lineno)


def _run_path() -> list[str]:
    """`sys.path` of a run, which `python -P` starts: without the folder of a script or a shell."""
    paths = [*sys.path]
    if sys.flags.safe_path:
        return paths
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script is not None and getattr(main, "__spec__", None) is None:
        own = str(Path(script).resolve().parent)
    elif "" in paths:  # `-c`, a prompt or a notebook
        own = ""
    else:  # `-m`
        try:
            own = str(Path.cwd())
        except FileNotFoundError:  # it was removed
            own = ""
    # PYTHONPATH and installations may have the same folder, once more.
    if own in paths:
        paths.remove(own)
    return paths


def _installed(name: str, folder: Path, beside: Path | None) -> str:
    """What else Python would import by that top-level name; empty if it is nothing.

    `beside`: the file in `folder`; None if there is only a folder. An editable installation of the
    same file is nothing else, and a folder without `__init__.py` counts less than a file.
    """
    if name in sys.stdlib_module_names or name == "__main__":
        return "a module of Python's own"
    for finder in sys.meta_path:
        if isinstance(finder, ProgramFinder) or not hasattr(finder, "find_spec"):
            continue
        # The protocol has no path for a top-level name, so other finders get none.
        spec = finder.find_spec(name, _run_path() if finder is PathFinder else None)
        if spec is None:
            continue
        if spec.origin is None:
            places = (Path(each).resolve() for each in spec.submodule_search_locations or ())
            is_other = beside is None and (folder / name).resolve() not in places
        else:
            is_other = beside is None or Path(spec.origin).resolve() != beside.resolve()
        return f"an installed package ({spec.origin or 'no file'})" if is_other else ""
    return ""
