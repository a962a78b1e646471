"""The shape of a document class, derived once from its annotations and declarations.

Parsing, rendering, schema and explanation use these shapes only, not the annotations.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import types
import typing
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from dlion_api.document.declaring import METADATA_KEY, NO_LIMITS, REQUIRED, Limits, Setting
from dlion_api.document.rules import Check, Rule, TransitionRule

ScalarKind = Literal["string", "integer", "number", "boolean"]
_SCALARS: dict[Any, ScalarKind] = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True)
class Scalar:
    """A string, number or boolean; `choices` if only some strings are allowed."""

    kind: ScalarKind
    limits: Limits = NO_LIMITS
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantity:
    """A Kubernetes quantity: a string such as `500m`, or an integer; kept as a string."""


@dataclass(frozen=True)
class Free:
    """A mapping that is checked elsewhere; kept unchanged."""


@dataclass(frozen=True)
class List:
    """A list; `key` names the field that identifies its items."""

    item: Shape
    min_items: int
    max_items: int | None
    key: str
    unique: bool


@dataclass(frozen=True)
class Map:
    """A mapping from any string to values of one shape."""

    value: Shape
    max_items: int | None


@dataclass(frozen=True)
class Field:
    """One field of an object. `name` is the document's, `attribute` the dataclass's."""

    name: str
    attribute: str
    shape: Shape
    declared: Setting

    @property
    def required(self) -> bool:
        return self.declared.default is REQUIRED


@dataclass(frozen=True)
class Object:
    """A document class. `ignored`: names that are allowed in the document and dropped."""

    cls: type[Any]
    fields: tuple[Field, ...]
    rules: tuple[Rule, ...]
    transitions: tuple[TransitionRule, ...]
    checks: tuple[Check, ...]
    ignored: frozenset[str]

    def field(self, name: str) -> Field | None:
        """Return the field with that document name."""
        return next((field for field in self.fields if field.name == name), None)


Shape = Scalar | Quantity | Free | List | Map | Object


def document_name(attribute: str) -> str:
    """Return the document name of an attribute.

    >>> document_name("max_steps"), document_name("lambda_")
    ('maxSteps', 'lambda')
    """
    return re.sub(r"_([a-z0-9])", lambda m: m.group(1).upper(), attribute.rstrip("_"))


def shape_of(cls: type[Any]) -> Object:
    """Return the shape of a document class. Raises: TypeError: a declaration is invalid."""
    return _shape_of(cast("Hashable", cls))


@cache
def _shape_of(cls: Any) -> Object:
    hints = typing.get_type_hints(cls, include_extras=True)
    return Object(
        cls=cls,
        fields=tuple(
            _field_shape(cls, field, hints[field.name])
            for field in dataclasses.fields(cls)
            if METADATA_KEY in field.metadata
        ),
        rules=tuple(getattr(cls, "rules", ())),
        transitions=tuple(getattr(cls, "transitions", ())),
        checks=tuple(getattr(cls, "checks", ())),
        ignored=frozenset(getattr(cls, "ignored", ())),
    )


def _field_shape(cls: type[Any], field: dataclasses.Field[Any], hint: Any) -> Field:
    declared: Setting = field.metadata[METADATA_KEY]
    try:
        shape = _shape(hint, declared)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}.{field.name}: {error}") from None
    return Field(document_name(field.name), field.name, shape, declared)


def _shape(hint: Any, declared: Setting) -> Shape:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (hint,) = (a for a in arguments if a is not type(None))
        return _shape(hint, declared)
    if origin is tuple:
        return List(
            _item_shape(arguments[0]),
            declared.min_items,
            declared.max_items,
            declared.key,
            declared.unique,
        )
    if origin is collections.abc.Mapping and arguments[1] is not Any:
        value = Quantity() if declared.quantity else _item_shape(arguments[1])
        return Map(value, declared.max_items)
    return _item_shape(hint, declared)


def _item_shape(hint: Any, limits: Limits = NO_LIMITS) -> Shape:
    if typing.get_origin(hint) is collections.abc.Mapping and typing.get_args(hint)[1] is Any:
        return Free()
    if typing.get_origin(hint) is typing.Annotated:
        hint, limits = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return Scalar("string", limits, typing.get_args(hint))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return shape_of(hint)
    if hint in _SCALARS:
        return Scalar(_SCALARS[hint], limits)
    raise TypeError(f"no document can hold {hint!r}")
