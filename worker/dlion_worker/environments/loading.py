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
    document, lines, twice = _read(path)
    if twice:
        raise SpecError(twice, source=text)
    return replace(parse(Environment, document, source=str(name_or_path), lines=lines), lines=lines)


def _read(path: Path) -> tuple[object, dict[str, int], list[Problem]]:
    """What the file holds, the line of each path in it, and which stand twice."""
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


def _parsed(text: str) -> tuple[object, dict[str, int], list[Problem]]:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}, []
        lines, twice = _lines(node)  # before the nodes are used up
        return loader.construct_document(node), lines, twice
    finally:
        loader.dispose()


def _lines(root: yaml.Node) -> tuple[dict[str, int], list[Problem]]:
    """The line of each path, as in `spec.sites[0].name`, and keys that stand twice in a mapping.

    What an alias repeats has the line of where it stands.
    """
    lines: dict[str, int] = {}
    twice: list[Problem] = []
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
            first: dict[str, int] = {}
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    below = f"{path}.{key.value}" if path else key.value
                    line = key.start_mark.line + 1
                    if key.value in first and key.value != "<<":
                        twice.append(_twice(below, first[key.value], line))
                    first.setdefault(key.value, line)
                    lines.setdefault(below, line)
                    waiting.append((below, value))
    return lines, sorted(twice, key=lambda problem: problem.line or 0)


def _twice(path: str, first: int, line: int) -> Problem:
    message = f"stands twice, first in line {first}"
    return Problem(path, message, line=line, advice="Keep one of them.")


def _unreadable(path: Path, reason: str) -> SpecError:
    problem = Problem(
        path="environment",
        message=f"the file {reason}",
        value=str(path),
        advice=f"Give a readable file, or one of: {', '.join(environment_names())}.",
    )
    return SpecError([problem])
