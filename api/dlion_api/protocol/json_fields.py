"""Convert JSON to dataclasses and back by their type hints, with every value checked.

Used by `records` and `sidecar_protocol`, which define how single values are converted. Converters
are built once for each class.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, TypeVar

from dlion_api.errors import ContractError
from dlion_api.names import Rank

Convert = Callable[[Any], Any]
"""Checks and converts a value. Raises: ValueError, TypeError, OverflowError."""
Fields = Callable[[Any], dict[str, Any]]
"""Checks and converts all fields of a dataclass, as `fields_converter` returns it."""
T = TypeVar("T")


@dataclass(frozen=True)
class Conversion:
    """How the values of one direction are converted: scalars by type, and keys of mappings."""

    scalars: Mapping[Any, Convert]
    key: Convert
    max_entries: float = math.inf
    """Limit for a list or mapping."""


def read_record(
    text: str | bytes, what: str, kinds: Mapping[str, tuple[type[T], Fields]], *, max_bytes: int
) -> T:
    """Return the record in a JSON object with its kind; `what` names it in messages.

    Raises: ContractError: Too long, not JSON, of unknown kind, or a field is missing, repeated or
        of a wrong type; unknown fields as `kinds` have it.
    """
    size = len(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise ContractError(f"{what} of {size} bytes; allowed: at most {max_bytes}")
    try:
        values = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 and invalid JSON are ValueErrors
        raise ContractError(f"{what} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ContractError(f"{what} is not an object (given: {type(values).__name__})")
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        allowed = ", ".join(kinds)
        raise ContractError(f"{what} of unknown kind (given: {kind!r:.100}); allowed: {allowed}")
    record_type, fields = kinds[kind]
    try:
        return record_type(**fields(values))
    except ValueError as error:
        raise ContractError(f"{kind} {what}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice in an object")
    return values


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _checked_names(
    values: Mapping[str, Any],
    known: Mapping[str, object],
    required: Iterable[str],
    *,
    ignores_unknown: bool,
) -> Mapping[str, Any]:
    """Return the known fields. Raises: ValueError for a missing or unknown one."""
    unknown: set[str] = set() if ignores_unknown else values.keys() - known.keys()
    missing = [name for name in required if name not in values]
    if unknown or missing:
        raise ValueError(
            f"unknown fields {sorted(unknown)!r:.200}, missing fields {missing}; "
            f"allowed: {', '.join(known)}"
        )
    return {name: value for name, value in values.items() if name in known}


def fields_converter(
    kind: type[Any],
    conversion_of: Callable[[str], Conversion],
    *,
    ignores_unknown: bool = False,
) -> Fields:
    """Return a function that converts all fields of that dataclass.

    `conversion_of` selects the conversion by the field's name. The function raises ValueError with
    the field, its value and what is wrong. `ignores_unknown`: leave out fields that the dataclass
    lacks, as of a newer release; else they are an error.
    """
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    converters = {f.name: _converter(hints[f.name], conversion_of(f.name)) for f in fields}
    required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]

    def convert(values: Any) -> dict[str, Any]:
        if not isinstance(values, dict):
            raise TypeError("not an object")
        if values.keys() != converters.keys():
            values = _checked_names(values, converters, required, ignores_unknown=ignores_unknown)
        converted = {}
        for name, value in values.items():
            try:
                converted[name] = converters[name](value)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{name}: {error} (given: {value!r:.200})") from error
        return converted

    return convert


def _converter(hint: Any, conversion: Conversion) -> Convert:
    hint = getattr(hint, "__supertype__", hint)  # Rank is an int, SiteName a str
    if hint in conversion.scalars:
        return conversion.scalars[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (_converter(a, conversion) for a in arguments if a is not types.NoneType)
        return lambda value: None if value is None else inner(value)
    if origin in (tuple, Mapping):
        item = _converter(arguments[origin is Mapping], conversion)
        return _entries_converter(origin, item, conversion)
    if dataclasses.is_dataclass(hint):
        kind = typing.cast("type[Any]", hint)
        fields = fields_converter(kind, lambda _name: conversion)
        return lambda value: kind(**fields(value))
    return _enum_converter(hint)


def _enum_converter(kind: type[Enum]) -> Convert:
    def convert(value: Any) -> Enum:
        try:
            return kind(value)
        except ValueError:
            allowed = ", ".join(str(member.value) for member in kind)
            raise ValueError(f"unknown value; allowed: {allowed}") from None

    return convert


def _entries_converter(origin: type[Any], item: Convert, conversion: Conversion) -> Convert:
    is_list = origin is tuple
    given_kinds = (list, tuple) if is_list else (Mapping,)

    def convert(given: Any) -> tuple[Any, ...] | dict[Any, Any]:
        if not isinstance(given, given_kinds):
            raise TypeError("not a list" if is_list else "not an object")
        values: Any = given
        if len(values) > conversion.max_entries:
            raise ValueError(f"more than {conversion.max_entries} entries")
        if is_list:
            return tuple(map(item, values))
        return {conversion.key(name): item(value) for name, value in values.items()}

    return convert


def read_text(value: Any, *, max_characters: int) -> str:
    """Return text of limited length."""
    if not isinstance(value, str):
        raise TypeError("not text")
    if len(value) > max_characters:
        raise ValueError(f"longer than {max_characters} characters")
    return value


def read_flag(value: Any) -> bool:
    """Return a truth value."""
    if not isinstance(value, bool):
        raise TypeError("not true or false")
    return value


def read_rank(name: str) -> Rank:
    """Return the rank that is a mapping's key, which JSON can only hold as a string."""
    if not (name.isascii() and name.isdigit()) or len(name) > 9 or str(int(name)) != name:
        raise ValueError(f"{name!r:.40} is not a rank")
    return Rank(int(name))
