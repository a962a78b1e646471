"""The identity of a compared run: every change to it requires another run.

Data files do not count, unless they belong to the program. Built-in policies are identified by
DLion's version, others by the code of their installed package.
"""

import functools
import hashlib
import importlib.util
import json
import os
import threading
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Final

from dlion_api.document import to_document
from dlion_api.spec import Job
from dlion_cli.comparison.comparison_matrix import Matrix, PlannedRun
from dlion_cli.inputs.manifests import apply_set, load_manifest, read_document
from dlion_cli.inputs.required_files import find_program_root
from dlion_core.policies.catalogue import BUILT_IN, GROUP
from dlion_environments.loading import load_environment
from dlion_worker.program_modules import find_modules

_CODE: Final = frozenset({".py", ".so", ".pyd"})
_DIGESTING: Final = threading.Lock()
"""Held so that runs which start at the same time read files once."""
_CHUNK_BYTES: Final = 1024 * 1024


def identity(command: Iterable[str], planned: PlannedRun, matrix: Matrix) -> dict[str, object]:
    """The run's command, and digests of the files that it depends on.

    Raises: SpecError if the manifest has become invalid.
    """
    environment = json.dumps(to_document(load_environment(planned.environment)), sort_keys=True)
    job = _job(planned, matrix)
    calibration = matrix.calibration
    files = {
        "manifest": {matrix.file.name: matrix.file},
        "program": program_files(job, matrix.file),
        "calibration": {} if calibration is None else {calibration.name: calibration},
    }
    policy = _policy_source(job.spec.exchange.policy)
    return {
        "command": list(command),
        "environment": hashlib.sha256(environment.encode()).hexdigest(),
        "dlion": version("dlion"),
        **{name: _digest_of(paths.items()) for name, paths in files.items() if paths},
        **({"policy": policy} if policy else {}),
    }


def _job(planned: PlannedRun, matrix: Matrix) -> Job:
    document, _ = read_document(matrix.file)
    source = f"{matrix.file}, {planned.variant.name}"
    return load_manifest(apply_set(document, planned.settings(matrix)), source=source, lines=None)


def program_files(job: Job, file: Path) -> dict[str, Path]:
    """The job's program, first, and the files beside it that belong to it, by names.

    Empty for a built-in program. `file`: the job's manifest.
    """
    if not job.spec.trainer.program.file:
        return {}
    program = find_program_root(job, file, None) / job.spec.trainer.program.file
    if not program.is_file():
        return {}
    found = find_modules(program.resolve())
    folder = program.resolve().parent
    data_files = {str(each.relative_to(folder)): each for each in found.data_files}
    return {program.name: program, **found.keys(), **data_files}


def _policy_source(name: str) -> dict[str, str]:
    """Distribution, version and code digest of that policy; empty if it is built in."""
    if name in BUILT_IN:
        return {}
    for point in entry_points(group=GROUP):
        if point.name == name:
            return {
                "distribution": "" if point.dist is None else point.dist.name,
                "version": "" if point.dist is None else point.dist.version,
                "sha256": _digest_of(sorted(_policy_files(point).items())),
            }
    return {}


def _policy_files(point: EntryPoint) -> dict[str, Path]:
    """The code of the entry point's distribution and of its top-level module, by name.

    In an editable installation, the module is outside the distribution. Other modules that the
    distribution names count only beside either of them: a module of that name in the working
    directory is unrelated.
    """
    files: dict[str, Path] = {}
    top = point.module.partition(".")[0]
    own = importlib.util.find_spec(top)
    if point.dist is not None:
        for file in point.dist.files or ():
            path = Path(str(file.locate()))
            if file.suffix in _CODE and path.is_file():
                files[str(file)] = path
        places = [str(point.dist.locate_file("")), *_parent_folder(own)]
        for name in (point.dist.read_text("top_level.txt") or "").split():
            if name != top:
                files.update(_module_files(PathFinder.find_spec(name, places)))
    if own is not None and own.origin is None and point.module != top:
        own = importlib.util.find_spec(point.module)
    files.update(_module_files(own))
    return files


def _parent_folder(spec: ModuleSpec | None) -> Iterable[str]:
    """The folder that contains the module or package; nothing for a namespace package."""
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin)
        yield str((path if spec.submodule_search_locations is None else path.parent).parent)


def _module_files(spec: ModuleSpec | None) -> Iterable[tuple[str, Path]]:
    """A module's file, or all files of a package; nothing for a namespace package."""
    if spec is None or spec.origin is None:
        return
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        yield origin.name, origin
        return
    for path in origin.parent.rglob("*"):
        if path.suffix in _CODE and path.is_file():
            yield str(path.relative_to(origin.parent.parent)), path


def _digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """Digest of the names and contents of files. Many runs have the same large data files: they are
    read once, unless they change."""
    marked = []
    for name, path in files:
        status = path.stat()
        marked.append((name, path, (status.st_ino, status.st_size, status.st_mtime_ns)))
    with _DIGESTING:
        return _digest(tuple(marked))


@functools.cache
def _digest(files: tuple[tuple[str, Path, tuple[int, ...]], ...]) -> str:
    digest = hashlib.sha256()
    for name, path, _ in files:
        with path.open("rb") as file:
            digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
            while chunk := file.read(_CHUNK_BYTES):  # a data file may exceed the memory
                digest.update(chunk)
    return digest.hexdigest()
