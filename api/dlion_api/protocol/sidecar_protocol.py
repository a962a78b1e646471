"""Encoding of `dlion_api.protocol.measurements` on the Unix socket between trainer and sidecar.

A record is one line of JSON with its kind: `{"kind": "StepTiming", "iteration": 3, ...}`.
`dlion_worker.sidecar` listens and `dlion_worker.trainer.background.sidecar_client` connects.
"""

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

from dlion_api.errors import ContractError
from dlion_api.protocol.json_fields import (
    Conversion,
    Fields,
    fields_converter,
    read_flag,
    read_rank,
    read_record,
    read_text,
)
from dlion_api.protocol.measurements import (
    CpuAllowance,
    Directive,
    LinkDelivery,
    MeasuringEndpoint,
    MeasuringRefused,
    MeasuringSent,
    Peers,
    SpeedProbe,
    StepTiming,
    StreamRefusals,
    TrainerAlive,
)

MAX_LINE_BYTES = 1 << 20
"""Longest line that either end accepts: a membership of some 3,000 workers."""

MAX_TEXT_CHARACTERS = 4096
MAX_INTEGER = 2**63 - 1

TrainerRecord = (
    SpeedProbe
    | StepTiming
    | LinkDelivery
    | CpuAllowance
    | Peers
    | StreamRefusals
    | Directive
    | TrainerAlive
)
"""Trainer to sidecar. A `Directive` is the last one applied, sent to a restarted sidecar."""

SidecarRecord = MeasuringEndpoint | MeasuringRefused | MeasuringSent | Directive
"""Sidecar to trainer."""

LocalRecord = TrainerRecord | SidecarRecord


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
    """Decode one line, with or without its newline. Raises: as `read_record`."""
    return read_record(line, "local message", _KINDS, max_bytes=MAX_LINE_BYTES)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("not an integer")
    return int(_number(value))


def _number(value: Any) -> float:
    """Check a number. All are counts, sizes, durations or rates, so none is negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    if not (0 <= value <= MAX_INTEGER and math.isfinite(value)):
        raise ValueError(f"not within 0 to {MAX_INTEGER}")
    return value


_CONVERSION = Conversion(
    {
        int: _integer,
        float: lambda value: float(_number(value)),
        str: functools.partial(read_text, max_characters=MAX_TEXT_CHARACTERS),
        bool: read_flag,
    },
    key=read_rank,
)
_KINDS: Mapping[str, tuple[type[LocalRecord], Fields]] = {
    kind.__name__: (kind, fields_converter(kind, lambda _name: _CONVERSION))
    for kind in typing.get_args(TrainerRecord | SidecarRecord)
}
