"""Locates and hashes the code of an exchange policy from an installed package.

Called by `run_identity`. Built-in policies are identified by DLion's version.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

from dlion_core.policies.catalogue import BUILT_IN, GROUP

_CODE: Final = frozenset({".py", ".so", ".pyd"})


def policy_source(name: str) -> dict[str, str]:
    """Distribution, version and code digest of that policy; empty if it is built in."""
    if name in BUILT_IN:
        return {}
    for point in entry_points(group=GROUP):
        if point.name == name:
            return {
                "distribution": "" if point.dist is None else point.dist.name,
                "version": "" if point.dist is None else point.dist.version,
                "sha256": digest_of(sorted(policy_files(point).items())),
            }
    return {}


def policy_files(point: EntryPoint) -> dict[str, Path]:
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


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """Digest of the names and contents of files."""
    digest = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
