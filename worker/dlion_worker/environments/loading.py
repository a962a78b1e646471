"""Finding and reading environment files: by name among the published ones, or by path.

The published files live beside this module, in `files/`, so that they are there when DLion is
installed; `environments/` at the root of the repository is a link to that folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from dlion_api.document import parse
from dlion_api.errors import Problem, SpecError
from dlion_worker.environments.model import Environment

FILES = Path(__file__).parent / "files"
MOST_BYTES = 1 << 16

# The reader's constructors raise plain errors: `!!int x`, `!!bool x`, `!!timestamp x`, 2026-13-45.
_NOT_YAML = (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError)


def environment_names() -> list[str]:
    """Names of the published environments."""
    return sorted(path.stem for path in FILES.glob("*.yaml"))


def load_environment(name_or_path: str | Path) -> Environment:
    """The environment of that name, or in that file (anything with a `/` or ending in .yaml).

    Raises: SpecError with every problem of the file, or the names that there are.
    """
    text = str(name_or_path)
    if "/" not in text and not text.endswith((".yaml", ".yml")):
        if text not in environment_names():
            problem = Problem(
                path="environment",
                message="there is no environment of that name",
                value=text,
                allowed=", ".join(environment_names()),
                advice="Give one of these names, or the path of a file.",
            )
            raise SpecError([problem])
        path = FILES / f"{text}.yaml"
    else:
        path = Path(name_or_path)
    document, lines = _read(path)
    return replace(parse(Environment, document, source=str(name_or_path), lines=lines), lines=lines)


def _read(path: Path) -> tuple[object, dict[str, int]]:
    """What the file holds, and the line of each path in it."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise _unreadable(path, f"is larger than {MOST_BYTES} bytes")
        return _parsed(data.decode("utf-8"))
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror}") from error
    except _NOT_YAML as error:
        raise _unreadable(path, f"is not YAML: {error}") from error


def _parsed(text: str) -> tuple[object, dict[str, int]]:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines = _lines(node)  # before the nodes are used up
        return loader.construct_document(node), lines
    finally:
        loader.dispose()


def _lines(root: yaml.Node) -> dict[str, int]:
    """Paths as in `spec.sites[0].name`; what an alias repeats has the line of where it stands."""
    lines: dict[str, int] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, node = waiting.pop()
        lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += [(f"{path}[{i}]", item) for i, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    below = f"{path}.{key.value}" if path else key.value
                    lines.setdefault(below, key.start_mark.line + 1)
                    waiting.append((below, value))
    return lines


def _unreadable(path: Path, reason: str) -> SpecError:
    problem = Problem(
        path="environment",
        message=f"the file {reason}",
        value=str(path),
        advice=f"Give a readable file, or one of: {', '.join(environment_names())}.",
    )
    return SpecError([problem])
