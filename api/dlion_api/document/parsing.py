"""Strict parsing: convert a mapping to a document object, or raise one error with all problems.

Used for manifests (`dlion_api.spec`) and environments. It reads no files: `lines` maps each path to
its line (made by `dlion_cli.inputs.manifests`).

As in the API server, null counts as absent, an integral float is an integer, and string lengths are
in code points. Unlike there, an unknown field is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from dlion_api.document import shapes
from dlion_api.document.rules import Rule
from dlion_api.document.scalars import BELOW, FaultError, as_free, as_quantity, as_scalar, shown
from dlion_api.errors import Problem, SpecError
from dlion_api.suggestions import did_you_mean

T = TypeVar("T")

MAX_PROBLEMS = 100
"""Further problems are only counted, so that a malformed document does not flood a terminal."""


def parse(
    cls: type[T],
    document: object,
    *,
    source: str = "",
    lines: Mapping[str, int] | None = None,
    root: str = "",
    unknown: list[Problem] | None = None,
) -> T:
    """Parse a document to an object, with defaults filled in.

    `root` is the path of the document within a larger one. `unknown` collects fields that the shape
    does not have; None: each is a problem.

    Raises:
        SpecError: All problems, each with its path, value, allowed values and line, if known.
    """
    reader = _Reader(lines or {}, unknown=unknown)
    value = reader.read(shapes.shape_of(cls), document, root)
    if reader.problems:
        raise SpecError(reader.reported(), source=source)
    return cast("T", value)


def line_of(path: str, lines: Mapping[str, int]) -> int | None:
    """Return the line of a path or, if it is missing, of its nearest parent.

    >>> line_of("workers[0].cores", {"": 1, "workers": 2})
    2
    """
    while path and path not in lines:
        path = _parent_path(path)
    return lines.get(path)


def _parent_path(path: str) -> str:
    return path[: max(path.rfind("."), path.rfind("["), 0)]


_WRONG = object()
"""Placeholder for an invalid value, whose problem is recorded."""


@dataclass
class _Reader:
    lines: Mapping[str, int]
    problems: list[Problem] = field(default_factory=list)
    unknown: list[Problem] | None = None

    def reported(self) -> list[Problem]:
        """Return the problems by line, as far as lines are known."""
        problems = sorted(self.problems, key=lambda p: p.line or 0)
        left = len(problems) - MAX_PROBLEMS
        if left > 0:
            problems[MAX_PROBLEMS:] = [Problem("", f"and {left} more problems")]
        return problems

    def note(self, path: str, fault: FaultError, into: list[Problem] | None = None) -> object:
        problem = replace(fault.problem, path=path or "(document)", line=line_of(path, self.lines))
        (self.problems if into is None else into).append(problem)
        return _WRONG

    def read(self, shape: shapes.Shape, value: object, path: str) -> Any:
        """Parse a value of that shape; return a placeholder for an invalid one."""
        try:
            match shape:
                case shapes.Scalar():
                    return as_scalar(shape, value)
                case shapes.Quantity():
                    return as_quantity(value)
                case shapes.Free():
                    return as_free(value)
                case shapes.List():
                    return self._list(shape, value, path)
                case shapes.Map():
                    return self._map(shape, value, path)
                case shapes.Object():
                    return self._object(shape, value, path)
        except FaultError as fault:
            return self.note(path, fault)

    def _list(self, shape: shapes.List, value: object, path: str) -> Any:
        if not isinstance(value, list | tuple):
            raise FaultError(
                "must be a list", shown(value), advice="Write its items below as `- …`."
            )
        if len(value) < shape.min_items:
            raise FaultError("has too few items", str(len(value)), f"at least {shape.min_items}")
        if shape.max_items is not None and len(value) > shape.max_items:
            raise FaultError("has too many items", str(len(value)), f"at most {shape.max_items}")
        items = [self.read(shape.item, item, f"{path}[{i}]") for i, item in enumerate(value)]
        self._refuse_duplicates(shape, items, path)
        return tuple(items)

    def _refuse_duplicates(self, shape: shapes.List, items: list[Any], path: str) -> None:
        if not (shape.key or shape.unique):
            return
        first_index: dict[object, int] = {}
        for i, item in enumerate(items):
            key = getattr(item, shape.key, _WRONG) if shape.key else item
            if key is _WRONG or isinstance(key, SimpleNamespace):
                continue
            if key in first_index:
                message = f"is a duplicate of {path}[{first_index[key]}]"
                self.note(_join(f"{path}[{i}]", shape.key), FaultError(message, shown(key), "once"))
            first_index.setdefault(key, i)

    def _map(self, shape: shapes.Map, value: object, path: str) -> Any:
        given = _mapping(value)
        if shape.max_items is not None and len(given) > shape.max_items:
            raise FaultError("has too many entries", str(len(given)), f"at most {shape.max_items}")
        return {
            key: self.read(shape.value, given[key], f"{path}.{key}")
            for key in given
            if given[key] is not None
        }

    def _object(self, shape: shapes.Object, value: object, path: str) -> Any:
        given = _mapping(value)
        before = len(self.problems)
        for name in given:
            if shape.field(name) is None and name not in shape.ignored:
                self.note(_join(path, name), _unknown(shape, name), self.unknown)
        read = {f.attribute: self._field(f, given.get(f.name), path) for f in shape.fields}
        if len(self.problems) == before:
            made = shape.cls(**read)
        else:
            made = SimpleNamespace(**{k: v for k, v in read.items() if v is not _WRONG})
        within = [p.path.removeprefix(path).lstrip(".") for p in self.problems[before:]]
        for rule in shape.rules:
            self._check(rule, made, path, self.problems[before:])
        for check in shape.checks:
            for problem in check(made, _PathValidity(within)):
                full = _join(path, problem.path)
                self.problems.append(replace(problem, path=full, line=line_of(full, self.lines)))
        return made

    def _field(self, shape: shapes.Field, value: object, path: str) -> Any:
        if value is not None:
            return self.read(shape.shape, value, _join(path, shape.name))
        if not shape.required:
            return shape.declared.default
        fault = FaultError("is missing", "", _wanted(shape), f"Meaning: {shape.declared.doc}")
        return self.note(_join(path, shape.name), fault)

    def _check(self, rule: Rule, made: Any, path: str, problems: list[Problem]) -> None:
        wrong = [re.sub(r"\[\d+\]", "", p.path.removeprefix(path).lstrip(".")) for p in problems]
        if all(map(_PathValidity(wrong), rule.reads)) and not rule.holds(made):
            fault = FaultError(rule.message, rule.given(made), rule.allowed(made), rule.advice)
            self.note(_join(path, rule.reads[0]), fault)


class _PathValidity:
    """Whether a path is valid, in time independent of the number of problems."""

    def __init__(self, wrong: list[str]) -> None:
        self._wrong = frozenset(wrong)
        self._ancestors = set[str]()
        for path in self._wrong:
            while path and path not in self._ancestors:
                self._ancestors.add(path)
                path = _parent_path(path)

    def __call__(self, path: str) -> bool:
        if path in self._ancestors or path in self._wrong:
            return False
        while path and path not in self._wrong:
            path = _parent_path(path)
        return not path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise FaultError("must be a mapping", shown(value), advice=BELOW)
    for key in value:
        if not isinstance(key, str):
            raise FaultError(
                "has a key that is not a string", shown(key), advice="Put it in quotes."
            )
    return value


def _unknown(shape: shapes.Object, name: str) -> FaultError:
    names = [field.name for field in shape.fields]
    message = f"there is no field {shown(name)} here"
    return FaultError(message, allowed=", ".join(names), advice=did_you_mean(name, names))


def _wanted(declared: shapes.Field) -> str:
    match declared.shape:
        case shapes.Scalar(choices=choices) if choices:
            return ", ".join(choices)
        case shapes.Scalar(kind=kind):
            return f"a {kind}" if kind != "integer" else "an integer"
        case shapes.List():
            return "a list"
        case _:
            return "a mapping"
