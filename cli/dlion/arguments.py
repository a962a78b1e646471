"""Checks arguments of Python callers before anything is read or started."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from dlion_api.errors import Problem, SpecError
from dlion_api.spec.trainer import BUILTINS
from dlion_api.suggestions import did_you_mean


def path_argument(name: str, value: object, *, source: str) -> Path:
    """The path that this argument names. Raises: SpecError.

    >>> path_argument("root", "runs", source="Client")
    PosixPath('runs')
    """
    if isinstance(value, str | Path):
        return Path(value)
    raise wrong_argument(name, "is not a path", value, "a str or pathlib.Path", source=source)


def fields_argument(name: str, value: object, *, source: str) -> Mapping[str, Any]:
    """The fields that this argument has. Raises: SpecError."""
    if isinstance(value, Mapping):
        return value
    raise wrong_argument(name, "has no fields", value, "a dict of its fields", source=source)


def check_assignments(value: object) -> None:
    """Raises: SpecError if `set` is neither a dict nor a list."""
    if not isinstance(value, Mapping | Sequence):
        allowed = 'fields by path, as {"trainer.stop.maxSeconds": 20}, or a list of path=value'
        raise wrong_argument("set", "has no fields to set", value, allowed, source="train")


def wrong_argument(
    name: str, message: str, value: object, allowed: str, *, source: str
) -> SpecError:
    """The error for an argument of a wrong type or value."""
    return SpecError([Problem(name, message, reprlib.repr(value), allowed)], source=source)


def check_program_name(name: str) -> None:
    """Raises: SpecError if this is not a built-in program, no `.py` file and no module here.

    Files are checked later, with their contents. A module is not imported.
    """
    is_known = name in BUILTINS or name.endswith(".py")
    if is_known or PathFinder.find_spec(name.partition(".")[0], [str(Path.cwd()), *sys.path]):
        return
    beside = [each.name for each in Path().iterdir() if each.suffix in (".py", ".yaml", ".yml")]
    problem = Problem(
        "program",
        "there is no built-in program, module or file of that name",
        reprlib.repr(name),
        f"{', '.join(BUILTINS)}, an importable module, a .py file or a .yaml file",
        did_you_mean(name, [*BUILTINS, *beside]),
    )
    raise SpecError([problem], source="train")
