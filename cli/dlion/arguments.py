"""Checks arguments of Python callers before anything is read or started."""

from __future__ import annotations

import contextlib
import math
import reprlib
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import PathFinder
from numbers import Real
from pathlib import Path
from typing import Any

from dlion_api.errors import Problem, SpecError
from dlion_api.spec.trainer import BUILTINS
from dlion_api.status_names import State
from dlion_api.suggestions import did_you_mean


def path_argument(name: str, value: object, *, source: str) -> Path:
    """The path that this argument names. Raises: SpecError.

    >>> path_argument("root", "runs", source="Client")
    PosixPath('runs')
    """
    if isinstance(value, str | Path) and "\0" not in str(value):
        return Path(value)
    raise wrong_argument(name, "is not a path", value, "a str or pathlib.Path", source=source)


def fields_argument(name: str, value: object, *, source: str) -> Mapping[str, Any]:
    """The fields that this argument has. Raises: SpecError."""
    if isinstance(value, Mapping):
        return value
    raise wrong_argument(name, "has no fields", value, "a dict of its fields", source=source)


def states_argument(name: str, value: object, *, source: str) -> set[str]:
    """The states of a job that this argument names. Raises: SpecError."""
    known = [str(state) for state in State]
    if isinstance(value, str):
        value = [value]
    # Each is compared: what a caller gives need not be hashable.
    if isinstance(value, Collection) and value and all(each in known for each in value):
        return set(value)
    raise wrong_argument(name, "has an unknown state", value, ", ".join(known), source=source)


def seconds_argument(name: str, value: object, *, source: str) -> float:
    """The seconds that this argument names, also infinite ones. Raises: SpecError.

    >>> seconds_argument("timeout_s", 3, source="plot")
    3.0
    """
    with contextlib.suppress(OverflowError):  # of a large integer
        if isinstance(value, Real) and not math.isnan(value):
            return float(value)
    allowed = "a number of seconds, or None for no limit"
    raise wrong_argument(name, "is not a time", value, allowed, source=source)


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
