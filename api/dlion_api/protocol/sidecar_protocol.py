"""Encoding of `dlion_api.protocol.measurements` on the Unix socket between trainer and sidecar.

A record is one line of JSON with its kind: `{"kind": "StepTiming", "iteration": 3, ...}`.
`dlion_worker.sidecar` listens and `dlion_worker.trainer.background.sidecar_client` connects.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, NoReturn

from dlion_api.errors import ContractError
from dlion_api.protocol.measurements import (
    CpuAllowance,
    Directive,
    LinkDelivery,
    MeasuringEndpoint,
    MeasuringRefused,
    Peers,
    SpeedProbe,
    StepTiming,
    StreamRefusals,
)

MAX_LINE_BYTES = 1 << 20
"""Longest line that either end accepts: a membership of some 3,000 workers."""

MAX_TEXT_CHARACTERS = 4096
MAX_INTEGER = 2**63 - 1

TrainerRecord = (
    SpeedProbe | StepTiming | LinkDelivery | CpuAllowance | Peers | StreamRefusals | Directive
)
"""Trainer to sidecar. A `Directive` is the last one applied, sent to a restarted sidecar."""

SidecarRecord = MeasuringEndpoint | MeasuringRefused | Directive
"""Sidecar to trainer."""

LocalRecord = TrainerRecord | SidecarRecord

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        SpeedProbe,
        StepTiming,
        LinkDelivery,
        CpuAllowance,
        Peers,
        StreamRefusals,
        MeasuringEndpoint,
        MeasuringRefused,
        Directive,
    )
}


def encode(record: LocalRecord) -> bytes:
    """Encode a record as one line, with its newline.

    Raises: ContractError: A number is not finite, or the line would be too long.

    >>> encode(MeasuringEndpoint("127.0.0.1:4000"))
    b'{"kind":"MeasuringEndpoint","address":"127.0.0.1:4000"}\\n'
    """
    name = type(record).__name__
    try:
        text = json.dumps({"kind": name, **_plain(record)}, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise ContractError(f"{name}: {error}; every number must be finite") from error
    line = text.encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ContractError(f"{name}: {len(line)} bytes; at most {MAX_LINE_BYTES} fit a line")
    return line


def decode(line: bytes) -> LocalRecord:
    """Decode one line, with or without its newline.

    Raises: ContractError: Not an output of `encode`: unknown kind or field, missing field, wrong
        type, negative or non-finite number, or too long a line.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ContractError(f"local message: {len(line)} bytes; at most {MAX_LINE_BYTES}")
    try:
        document = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"local message: not a line of JSON: {error}") from error
    if not isinstance(document, dict):
        raise ContractError(f"local message: {_shown(document)}; an object is expected")
    name = document.pop("kind", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ContractError(f"local message: kind {_shown(name)}; allowed: {', '.join(_KINDS)}")
    record: LocalRecord = _record(kind, document, kind.__name__)
    return record


def _plain(record: Any) -> dict[str, Any]:
    return {field.name: _plain_value(getattr(record, field.name)) for field in _fields(record)}


def _plain_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _plain(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    return value


def _fields(record: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(record)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _record(kind: type, document: dict[str, Any], path: str) -> Any:
    hints = _hints(kind)
    fields = {field.name: field for field in _fields(kind)}
    unknown = document.keys() - fields.keys()
    if unknown:
        raise ContractError(f"{path}: unknown field {_shown(min(unknown))}")
    values = {}
    for name, field in fields.items():
        if name in document:
            values[name] = _value(hints[name], document[name], f"{path}.{name}")
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ContractError(f"{path}: field {name!r} is missing")
    return kind(**values)


def _value(hint: Any, value: Any, path: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)  # Rank is an int, SiteName a str
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = next(item for item in arguments if item is not type(None))
        return None if value is None else _value(inner, value, path)
    if hint in (int, float):
        return _number(hint, value, path)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str:
        return _text(value, path)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _record(typing.cast("type", hint), value, path)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {_key(k, path): _value(arguments[1], v, f"{path}[{k}]") for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member(hint, value, path)
    raise ContractError(f"{path}: {_shown(value)} is of the wrong type")


def _number(hint: type[int | float], value: Any, path: str) -> int | float:
    """Check a number. All are counts, sizes, durations or rates, so none is negative."""
    wanted = (int,) if hint is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ContractError(f"{path}: {_shown(value)}; {hint.__name__} expected")
    if not (0 <= value <= MAX_INTEGER and math.isfinite(value)):
        raise ContractError(f"{path}: {_shown(value)}; allowed: 0 to {MAX_INTEGER}")
    return hint(value)


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS:
        raise ContractError(
            f"{path}: {_shown(value)}; text of at most {MAX_TEXT_CHARACTERS} characters expected"
        )
    return value


def _key(key: str, path: str) -> int:
    """Parse a mapping's key: always a rank, which JSON can only hold as a string."""
    if not (key.isascii() and key.isdecimal() and len(key) < 10 and key == str(int(key))):
        raise ContractError(f"{path}: key {_shown(key)}; a rank is expected")
    return int(key)


def _member(hint: type[Enum], value: Any, path: str) -> Enum:
    try:
        return hint(value)
    except ValueError:
        allowed = ", ".join(str(member.value) for member in hint)
        raise ContractError(f"{path}: {_shown(value)}; allowed: {allowed}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")
