"""Encode progress records as JSON: one line of `events.jsonl`, one entry of a report.

Used by the worker's client, the coordinator and the result folder's reader. Incoming records are
untrusted and fully checked.

JSON has no NaN and infinities: they are the strings "NaN", "Infinity" and "-Infinity". They are
allowed only in `NON_FINITE_FIELDS`, where training can produce them: a diverged loss, or the
accuracy of a class without samples.
"""

import json
import math
import operator
from collections.abc import Mapping

from dlion_api.errors import ContractError
from dlion_api.protocol.json_fields import (
    Conversion,
    fields_converter,
    read_flag,
    read_rank,
    read_record,
    read_text,
)
from dlion_api.protocol.progress import (
    DirectiveRecord,
    EvaluationRecord,
    EventRecord,
    LinkRecord,
    ProcessRecord,
    ProgressRecord,
    StepRecord,
)

MAX_RECORD_BYTES = 64 * 1024
MAX_ENTRIES = 4096
"""Limit for a list or map in a record."""
MAX_TEXT_CHARACTERS = 4096
MAX_INTEGER = 2**53
"""Above it other JSON readers lose digits."""

KINDS: Mapping[str, type[ProgressRecord]] = {
    "step": StepRecord,
    "link": LinkRecord,
    "evaluation": EvaluationRecord,
    "directive": DirectiveRecord,
    "process": ProcessRecord,
    "event": EventRecord,
}
NON_FINITE_FIELDS = frozenset({
    "loss", "accuracy", "class_accuracy", "sketch", "weights_norm", "metrics",
})  # fmt: skip
NAMED_FIELDS = frozenset({"metrics"})
"""Mappings by name; the others are by rank."""
_LEFT_OUT = ("sent_segments", "retransmitted_segments", "round_trip_s", "min_round_trip_s")
"""Fields that are not written while they are None: each link has a record a second, and these at
the end only."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_KIND_NAMES = {record_type: kind for kind, record_type in KINDS.items()}


def record_to_json(record: ProgressRecord) -> str:
    """Encode a record as one line of JSON, `kind` first. Accepts NumPy scalars as numbers.

    Raises:
        ContractError: `record_from_json` would refuse the result (a bug of the caller).
    """
    kind = _KIND_NAMES[type(record)]
    try:
        values = _ENCODERS[kind](vars(record))
    except ValueError as error:
        raise ContractError(f"{kind} record: {error}") from error
    given = {
        name: each for name, each in values.items() if each is not None or name not in _LEFT_OUT
    }
    text = _JSON.encode({"kind": kind, **given})
    if len(text) > MAX_RECORD_BYTES:
        raise ContractError(
            f"{kind} record of {len(text)} bytes; allowed: at most {MAX_RECORD_BYTES}"
        )
    return text


def record_from_json(text: str | bytes) -> ProgressRecord:
    """Decode a record from one line of JSON, without fields that only newer releases have.

    Raises: as `read_record`.
    """
    return read_record(text, "record", _DECODERS, max_bytes=MAX_RECORD_BYTES)


def _integer(value: object) -> int:
    if type(value) is int and 0 <= value <= MAX_INTEGER:
        return value  # nearly always; what follows takes three times as long
    # Outgoing values may be of any integer type, such as NumPy's, but not bool.
    if isinstance(value, bool):
        raise TypeError("not an integer")
    number = operator.index(value)  # type: ignore[arg-type]
    if not 0 <= number <= MAX_INTEGER:
        raise ValueError(f"not within 0 to {MAX_INTEGER}")
    return number


def _text(value: object) -> str:
    text = read_text(value, max_characters=MAX_TEXT_CHARACTERS)
    text.encode()  # a lone surrogate is a ValueError: it could not be stored
    return text


def _cut_text(value: object) -> str:
    """Truncate outgoing text: a long message must not lose the record."""
    if not isinstance(value, str):
        raise TypeError("not text")
    return value.encode(errors="replace").decode()[:MAX_TEXT_CHARACTERS]


def _number(value: object) -> float:
    if isinstance(value, bool | str | bytes):
        raise TypeError("not a number")
    return float(value)  # type: ignore[arg-type]


def _finite(value: object) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    number = _number(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _number_out(value: object) -> float | str:
    number = _number(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _number_in(value: object) -> float:
    if isinstance(value, str):
        if value not in _NON_FINITE:
            raise ValueError(f"not a number; allowed texts: {', '.join(_NON_FINITE)}")
        return _NON_FINITE[value]
    return _finite(value)


def _encoding(name: str) -> Conversion:
    number = _number_out if name in NON_FINITE_FIELDS else _finite
    scalars = {int: _integer, float: number, str: _cut_text, bool: read_flag}
    key = _cut_text if name in NAMED_FIELDS else lambda rank: str(_integer(rank))
    return Conversion(scalars, key=key, max_entries=MAX_ENTRIES)


def _decoding(name: str) -> Conversion:
    number = _number_in if name in NON_FINITE_FIELDS else _finite
    scalars = {int: _integer, float: number, str: _text, bool: read_flag}
    key = _text if name in NAMED_FIELDS else read_rank
    return Conversion(scalars, key=key, max_entries=MAX_ENTRIES)


_ENCODERS = {kind: fields_converter(record_type, _encoding) for kind, record_type in KINDS.items()}
_DECODERS = {
    kind: (record_type, fields_converter(record_type, _decoding, ignores_unknown=True))
    for kind, record_type in KINDS.items()
}
