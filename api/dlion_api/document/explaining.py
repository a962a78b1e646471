"""Explain a document's fields, for `dlion explain` and the generated manifest reference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dlion_api.document import shapes
from dlion_api.document.rendering import render
from dlion_api.document.scalars import bounds
from dlion_api.document.schemas import description
from dlion_api.errors import Problem, SpecError
from dlion_api.suggestions import nearest

_NEARLY_EQUAL: Final = 0.85
"""Likeness of names in other objects, among which some is always a little alike."""


@dataclass(frozen=True)
class Explanation:
    """One field. `default` is None if there is none; `children` are an object's fields."""

    path: str
    name: str
    type: str
    doc: str
    allowed: str
    required: bool
    hashed: bool
    default: Any
    rules: tuple[str, ...]
    children: tuple[Explanation, ...]


def explain(cls: type[Any], path: str = "", *, parent: str = "") -> Explanation:
    """Return the field at a dotted path (indices optional) with everything below it.

    `parent`: the path of the object itself, which the returned paths begin with. Raises: SpecError:
    There is no such path; suggests the nearest field.
    """
    root = explanation = _explain_object(cls, parent)
    parts = [part for part in re.sub(r"\[[^\]]*\]", "", path).split(".") if part]
    for index, name in enumerate(parts):
        child = next((child for child in explanation.children if child.name == name), None)
        if child is None:
            names = [child.name for child in explanation.children]
            problem = Problem(
                path=_joined(explanation.path, name),
                message="there is no such field",
                allowed=", ".join(names) or "nothing: it has no fields",
                advice=_suggestion(parts[index:], explanation, root),
            )
            raise SpecError([problem])
        explanation = child
    return explanation


def _suggestion(rest: Sequence[str], *searched: Explanation) -> str:
    """A question with the field that `rest` most likely means; empty: there is none.

    That is a field of the first of `searched` with this name in another case; one below them whose
    path ends as `rest` does; a field of the first with a similar name; one below them whose name is
    nearly the same.
    """
    names = [child.name for child in searched[0].children]
    paths = [path for each in searched for path in _paths_below(each)]
    by_name = {path.rpartition(".")[2]: path for path in reversed(paths)}
    end = f".{'.'.join(rest)}".lower()
    found = (
        nearest(rest[0], names, likeness=1.0)
        or next((path for path in paths if f".{path}".lower().endswith(end)), "")
        or nearest(rest[0], names)
        or by_name.get(nearest(rest[-1], by_name, likeness=_NEARLY_EQUAL), "")
    )
    return f"Did you mean {found}?" if found else ""


def _paths_below(explanation: Explanation) -> Iterator[str]:
    for child in explanation.children:
        yield child.path
        yield from _paths_below(child)


def _joined(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _explain_object(cls: type[Any], path: str) -> Explanation:
    shape = shapes.shape_of(cls)
    children = tuple(_explain(field, _joined(path, field.name)) for field in shape.fields)
    doc = (cls.__doc__ or "").strip().split("\n\n")[0]
    return Explanation(path, "", "object", doc, "", True, True, None, _rules(shape), children)


def _explain(field: shapes.Field, path: str) -> Explanation:
    inner = field.shape
    while isinstance(inner, shapes.List | shapes.Map):
        inner = inner.item if isinstance(inner, shapes.List) else inner.value
    children: tuple[Explanation, ...] = ()
    if isinstance(inner, shapes.Object):
        children = tuple(_explain(child, f"{path}.{child.name}") for child in inner.fields)
    default = None if field.required else field.declared.default
    return Explanation(
        path=path,
        name=field.name,
        type=type_text(field.shape),
        doc=description(field),
        allowed=allowed_text(field.shape),
        required=field.required,
        hashed=field.declared.hashed,
        default=None if default is None else render(field.shape, default),
        rules=_rules(inner),
        children=children,
    )


def _rules(shape: shapes.Shape) -> tuple[str, ...]:
    if not isinstance(shape, shapes.Object):
        return ()
    rules = [rule.message for rule in shape.rules]
    return (*rules, *(rule.message for rule in shape.transitions))


def type_text(shape: shapes.Shape) -> str:
    """Return the type's name: `string`, `list of object`, `map of quantity`."""
    match shape:
        case shapes.Scalar(kind=kind):
            return kind
        case shapes.Quantity():
            return "quantity"
        case shapes.Free() | shapes.Object():
            return "object"
        case shapes.List(item=item):
            return f"list of {type_text(item)}"
        case shapes.Map(value=value):
            return f"map of {type_text(value)}"


def allowed_text(shape: shapes.Shape) -> str:
    """Return a description of the allowed values; empty if any is allowed."""
    match shape:
        case shapes.Scalar(choices=choices) if choices:
            return " | ".join(choices)
        case shapes.Scalar(kind="string", limits=limits):
            parts = [limits.pattern_description or limits.pattern or ""]
            if limits.max_length is not None:
                parts.append(f"up to {limits.max_length} characters")
            return ", ".join(part for part in parts if part)
        case shapes.Scalar(limits=limits):
            return bounds(limits)
        case shapes.List(item=item):
            return "; ".join(word for word in (_counts(shape), allowed_text(item)) if word)
        case shapes.Map(value=value, max_items=most):
            parts = [f"up to {most} entries" if most is not None else "", allowed_text(value)]
            return "; ".join(part for part in parts if part)
        case _:
            return ""


def _counts(shape: shapes.List) -> str:
    uniqueness = f", unique by {shape.key}" if shape.key else ", no duplicates"
    uniqueness = uniqueness if shape.key or shape.unique else ""
    minimum = f"{shape.min_items} to " if shape.min_items else "up to "
    return f"{minimum}{shape.max_items} items{uniqueness}" if shape.max_items is not None else ""
