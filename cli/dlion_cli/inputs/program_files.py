"""A program in a file of the user's: what is checked without running it, and how it travels.

`dlion submit` puts the file into a ConfigMap, whose name has the hash of its text. So all sites
that are given the same file get the same manifest, and a run keeps its program.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dlion_api.errors import Problem
from dlion_api.spec import Job
from dlion_api.spec.trainer import Program

MAX_PROGRAM_BYTES: Final = 900 * 1024
"""Of a ConfigMap: the API server's limit is 1 MiB for the whole object."""
_FIELD: Final = "spec.trainer.program"
_ADVICE: Final = "Build an image that has it, and set trainer.image (docs/own-programs.md)."


@dataclass(frozen=True)
class PackedProgram:
    """A program's ConfigMap, and the manifest's `trainer.program` that names it."""

    name: str
    key: str
    text: str

    @property
    def field(self) -> dict[str, Any]:
        return {"configMap": {"name": self.name, "key": self.key}}

    def document(self, namespace: str, owner: dict[str, Any] | None) -> dict[str, Any]:
        """Return the ConfigMap. It goes with its owner, if one is given."""
        metadata: dict[str, Any] = {"name": self.name, "namespace": namespace}
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "immutable": True,
            "data": {self.key: self.text},
        }


def program_problems(job: Job, root: Path) -> list[Problem]:
    """Return what is wrong with the program file, without running it.

    `root`: the folder in which it is looked up. A program that comes with `trainer.image` is not
    looked for.
    """
    file = job.spec.trainer.program.file
    if not file or job.spec.trainer.image:
        return []
    path = root / file
    if not path.is_file():
        advice = "Paths are relative to the manifest; `dlion init` creates a template."
        return [Problem(f"{_FIELD}.file", f"no such file: {path}", value=file, advice=advice)]
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        message = f"{path}:{error.lineno}: is not Python: {error.msg}"
        return [Problem(f"{_FIELD}.file", message, value=file)]
    except (ValueError, RecursionError, MemoryError) as error:
        return [Problem(f"{_FIELD}.file", f"{path}: is not Python: {error}", value=file)]
    except OSError as error:
        return [Problem(f"{_FIELD}.file", f"cannot be read: {error.strerror}", value=file)]
    names, dataset = _names(tree), job.spec.trainer.dataset
    problems = []
    if "build_model" not in names:
        advice = "It returns the keras.Model (docs/own-programs.md)."
        problems.append(Problem(f"{_FIELD}.file", f"{path} has no build_model()", file, "", advice))
    if not (dataset.name or dataset.path or "load_data" in names):
        advice = "Give the program load_data(), or set trainer.dataset.name or path."
        problems.append(Problem(f"{_FIELD}.file", "there are no data", file, "", advice))
    return problems


def packed_program(job: Job, root: Path) -> tuple[PackedProgram | None, list[Problem]]:
    """Return the program to send with the job, and why it cannot be sent.

    None without problems: it is built in, in an image, or in a ConfigMap already.
    """
    program = job.spec.trainer.program
    if job.spec.trainer.image or not (program.file or program.module):
        return None, []
    if problems := program_problems(job, root) or _not_alone(program, root):
        return None, problems
    if not program.file:
        return None, []
    content = (root / program.file).read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or len(content) > MAX_PROGRAM_BYTES:
        allowed = f"UTF-8 text of at most {MAX_PROGRAM_BYTES:,} bytes"
        message = "does not fit into a ConfigMap"
        return None, [
            Problem(f"{_FIELD}.file", message, program.file, allowed=allowed, advice=_ADVICE)
        ]
    digest = hashlib.sha256(content).hexdigest()[:10]
    name = Path(program.file).name
    key = name if re.fullmatch(r"[-._a-zA-Z0-9]+", name) else "program.py"
    return PackedProgram(f"{job.metadata.name}-program-{digest}", key, text), []


def _not_alone(program: Program, root: Path) -> list[Problem]:
    """Return a problem if the program needs files beside it: a ConfigMap holds one."""
    field, beside = "module", [] if program.module is None else [program.module.partition(".")[0]]
    if program.file:
        field, path = "file", root / program.file
        root = path.parent
        beside = [name for name in _imported(ast.parse(path.read_bytes())) if name != path.stem]
    found = [name for name in beside if not name or _is_in(root, name)]
    if not found:
        return []
    what = ", ".join(name or "a relative module" for name in found)
    message = f"needs {what} beside it, and only one file is sent to a cluster"
    return [Problem(f"{_FIELD}.{field}", message, value=program.file or "", advice=_ADVICE)]


def _is_in(folder: Path, module: str) -> bool:
    return (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file()


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the first part of each imported module's name; empty for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else (node.module or "").partition(".")[0]


def _names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines, anywhere in it: definitions may be conditional."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update((one.asname or one.name).partition(".")[0] for one in aliases)
                if any(one.name == "*" for one in aliases):
                    names |= {"build_model", "load_data"}  # they may come with them
    return names
