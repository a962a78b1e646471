"""A program in a file of the user's: what is checked without running it, and how it travels.

`dlion submit` puts the file, and the modules and data files that belong to it, into a ConfigMap,
whose name has the hash of their contents. So all sites that are given the same files get the same
manifest, and a run keeps its program.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dlion_api.errors import Problem, ProgramError, SpecError
from dlion_worker.program_modules import find_modules, parse_file

if TYPE_CHECKING:
    from dlion_api.spec import Job

MAX_PROGRAM_BYTES: Final = 900 * 1024
"""Maximum size in a ConfigMap: the API server's limit is 1 MiB for the whole object."""
_FIELD: Final = "spec.trainer.program"
_ADVICE: Final = (
    "Build an image that has it, and set trainer.image "
    "(docs/images.md, Packages of your own in the worker image)."
)
_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")


@dataclass(frozen=True)
class PackedProgram:
    """A program's ConfigMap, and the manifest's `trainer.program` that names it."""

    name: str
    key: str
    texts: Mapping[str, str]
    """Texts by key: the program first, then its modules."""
    data: Mapping[str, bytes]
    """Contents of data files by key."""

    @property
    def field(self) -> dict[str, Any]:
        return {"configMap": {"name": self.name, "key": self.key}}

    def document(self, namespace: str, owner: dict[str, Any] | None) -> dict[str, Any]:
        """Return the ConfigMap. It goes with its owner, if one is given."""
        metadata: dict[str, Any] = {"name": self.name, "namespace": namespace}
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        document: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "immutable": True,
            "data": dict(self.texts),
        }
        if self.data:
            encoded = {key: base64.b64encode(each).decode() for key, each in self.data.items()}
            document["binaryData"] = encoded
        return document


def program_problems(job: Job, root: Path) -> list[Problem]:
    """Return what is wrong with the program file and its modules, without running them.

    `root`: the folder in which it is looked up. A program that comes with `trainer.image` is not
    looked for.
    """
    return [] if job.spec.trainer.image else file_problems(job, root)


def file_problems(job: Job, root: Path) -> list[Problem]:
    """As `program_problems`, also for a program that an image should have."""
    file = job.spec.trainer.program.file
    if not file:
        return []
    path = root / file
    if not path.is_file():
        advice = "Paths are relative to the manifest; `dlion init` creates a template."
        return [Problem(f"{_FIELD}.file", f"no such file: {path}", value=file, advice=advice)]
    try:
        tree = parse_file(path)
    except ProgramError as error:
        return [Problem(f"{_FIELD}.file", str(error), value=file)]
    names, dataset = _names(tree), job.spec.trainer.dataset
    found = find_modules(path.resolve())
    problems = [Problem(f"{_FIELD}.file", text, file) for text in found.problems]
    if "build_model" not in names:
        advice = "It returns the keras.Model (docs/own-programs.md)."
        problems.append(Problem(f"{_FIELD}.file", f"{path} has no build_model()", file, "", advice))
    if not (dataset.name or dataset.path or "load_data" in names):
        advice = "Give the program load_data(), or set trainer.dataset.name or path."
        problems.append(Problem(f"{_FIELD}.file", "there are no data", file, "", advice))
    return problems


def program_error(problems: Sequence[Problem], source: str) -> ProgramError:
    """The error for problems of `program_problems`, in the words of those of the manifest."""
    return ProgramError(str(SpecError(problems, source=source)))


def packed_program(job: Job, root: Path) -> tuple[PackedProgram | None, list[Problem]]:
    """Return the program to send with the job, and why a cluster cannot take it.

    None without problems: it is built in, in an image, or in a ConfigMap already. The caller has
    checked `program_problems`.
    """
    program = job.spec.trainer.program
    if job.spec.trainer.image or not (program.file or program.module):
        return None, []
    if not program.file:
        return None, _beside(program.module or "", root)
    path = (root / program.file).resolve()
    key = path.name if _KEY.fullmatch(path.name) else "program.py"
    found = find_modules(path)
    modules, data_files = found.keys(), {each.name: each for each in found.data_files}
    wrong = [each for each in (*modules, *data_files) if not _KEY.fullmatch(each) or each == key]
    if found.imports_program and key != path.name:
        wrong.append(path.name)
    if wrong:
        message = f"{wrong[0]!r} cannot be a key of a ConfigMap, or is the program's key, too"
        advice = f"Rename the file, with letters and digits of ASCII. {_ADVICE}"
        return None, [Problem(f"{_FIELD}.file", message, program.file, advice=advice)]
    if same := [each for each in found.data_files if data_files[each.name] != each]:
        message = f"{same[0]} and {data_files[same[0].name]} would have one key of a ConfigMap"
        return None, [Problem(f"{_FIELD}.file", message, program.file, advice="Rename one.")]
    if outside := [each for each in found.data_files if not _is_below(each, path.parent)]:
        message = f"{outside[0]} leads out of the program's folder"
        advice = "Copy it into the folder."
        return None, [Problem(f"{_FIELD}.file", message, program.file, advice=advice)]
    files = {key: path, **modules, **data_files}
    try:
        size = sum(len(each) + file.stat().st_size for each, file in files.items())
        if size > MAX_PROGRAM_BYTES:  # a data set need not fit into the memory here
            parts = "program, modules and data files" if data_files else "program and modules"
            return None, [_does_not_fit(f"{parts}, {size:,} bytes, do", program.file)]
        contents = {each: file.read_bytes() for each, file in files.items()}
    except OSError as error:
        message = f"{error.filename}: cannot be read: {error.strerror}"
        return None, [Problem(f"{_FIELD}.file", message, program.file)]
    data = {each: contents.pop(each) for each in data_files}
    texts = {each: _text(content) for each, content in contents.items()}
    strange = [each for each, text in texts.items() if text is None]
    if strange or not contents[key]:
        return None, [_does_not_fit(f"{[*strange, key][0]} does", program.file)]
    digest = hashlib.sha256(contents[key])
    for each in modules:
        digest.update(f"\0{each}\0".encode() + contents[each])  # no source has a NUL
    for each, content in data.items():
        digest.update(f"\0{each}\0{hashlib.sha256(content).hexdigest()}".encode())
    name = f"{job.metadata.name}-program-{digest.hexdigest()[:10]}"
    return PackedProgram(name, key, {each: text or "" for each, text in texts.items()}, data), []


def _is_below(file: Path, folder: Path) -> bool:
    """Whether the file is in the folder, whatever links lead to it."""
    return file.resolve().is_relative_to(folder)


def _does_not_fit(what: str, file: str) -> Problem:
    message = f"{what} not fit into a ConfigMap"
    allowed = f"{MAX_PROGRAM_BYTES:,} bytes together, programs and modules in UTF-8"
    return Problem(f"{_FIELD}.file", message, file, allowed=allowed, advice=_ADVICE)


def _text(content: bytes) -> str | None:
    """The text; None if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _beside(module: str, root: Path) -> list[Problem]:
    """A problem if the module is beside the manifest: only a program's file is sent."""
    top = module.partition(".")[0]
    if not ((root / f"{top}.py").is_file() or (root / top / "__init__.py").is_file()):
        return []
    message = f"{top} is beside the manifest, and trainer.program.module is not sent to a cluster"
    advice = f"Name a file in trainer.program.file, with `from {module} import *`. {_ADVICE}"
    return [Problem(f"{_FIELD}.module", message, value=module, advice=advice)]


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
