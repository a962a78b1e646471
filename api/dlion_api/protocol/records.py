"""Encode progress records as JSON: one line of `events.jsonl`, one entry of a report.

Used by the worker's client, the coordinator and the result folder's reader. Incoming records are
untrusted and fully checked.

JSON has no NaN and infinities: they are the strings "NaN", "Infinity" and "-Infinity". They are
allowed only in `NON_FINITE_FIELDS`, where training can produce them: a diverged loss, or the
accuracy of a class without samples.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn, get_type_hints

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.progress import (
    DirectiveRecord,
    EvaluationRecord,
    EventRecord,
    LinkRecord,
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
    "event": EventRecord,
}
NON_FINITE_FIELDS = frozenset({"loss", "accuracy", "class_accuracy", "sketch", "weights_norm"})
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_KIND_NAMES = {record_type: kind for kind, record_type in KINDS.items()}


def record_to_json(record: ProgressRecord) -> str:
    """Encode a record as one line of JSON, `kind` first. Accepts NumPy scalars as numbers.

    Raises:
        ContractError: `record_from_json` would refuse the result (a bug of the caller).
    """
    kind = _KIND_NAMES[type(record)]
    values: dict[str, object] = {"kind": kind}
    for name, form in _FORMS[kind].items():
        value = getattr(record, name)
        try:
            values[name] = form.encode(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ContractError(
                f"{kind} record: {name}: {error} (given: {value!r:.200})"
            ) from error
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_RECORD_BYTES:
        raise ContractError(
            f"{kind} record of {len(text)} bytes; allowed: at most {MAX_RECORD_BYTES}"
        )
    return text


def record_from_json(text: str | bytes) -> ProgressRecord:
    """Decode a record from one line of JSON.

    Raises:
        ContractError: Too long, not JSON, or a field is unknown, missing, repeated or of a wrong
            type.
    """
    size = len(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    if size > MAX_RECORD_BYTES:
        raise ContractError(f"record of {size} bytes; allowed: at most {MAX_RECORD_BYTES}")
    try:
        values = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 and invalid JSON are ValueErrors
        raise ContractError(f"record is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ContractError(f"record is not an object (given: {type(values).__name__})")
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ContractError(
            f"record of unknown kind (given: {kind!r:.100}); allowed: {', '.join(KINDS)}"
        )
    return KINDS[kind](**_decoded(kind, values))


def _decoded(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    forms = _FORMS[kind]
    unknown = values.keys() - forms.keys()
    missing = [name for name, form in forms.items() if form.required and name not in values]
    if unknown or missing:
        raise ContractError(
            f"{kind} record: unknown fields {sorted(unknown)!r:.200}, missing fields {missing}; "
            f"allowed: {', '.join(forms)}"
        )
    decoded = {}
    for name, value in values.items():
        try:
            decoded[name] = forms[name].decode(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ContractError(
                f"{kind} record: {name}: {error} (given: {value!r:.200})"
            ) from error
    return decoded


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice in an object")
    return values


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


@dataclass(frozen=True)
class _Form:
    """Encoder and decoder of one field; both raise ValueError or TypeError."""

    encode: Callable[[Any], object]
    decode: Callable[[Any], Any]
    required: bool = True


def _integer(value: object) -> int:
    # Outgoing values may be of any integer type, such as NumPy's, but not bool.
    if isinstance(value, bool):
        raise TypeError("not an integer")
    number = operator.index(value)  # type: ignore[arg-type]
    if not 0 <= number <= MAX_INTEGER:
        raise ValueError(f"not within 0 to {MAX_INTEGER}")
    return number


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not text")
    if len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"longer than {MAX_TEXT_CHARACTERS} characters")
    value.encode()  # a lone surrogate is a ValueError: it could not be stored
    return value


def _cut_text(value: object) -> str:
    """Truncate outgoing text: a long message must not lose the record."""
    if not isinstance(value, str):
        raise TypeError("not text")
    return value.encode(errors="replace").decode()[:MAX_TEXT_CHARACTERS]


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("not true or false")
    return value


def _finite(value: object) -> float:
    if isinstance(value, bool | str | bytes):
        raise TypeError("not a number")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _number_out(value: object) -> float | str:
    if isinstance(value, bool | str | bytes):
        raise TypeError("not a number")
    number = float(value)  # type: ignore[arg-type]
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


def _listed(item: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def convert(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list | tuple):
            raise TypeError("not a list")
        if len(values) > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} entries")
        return tuple(item(value) for value in values)

    return convert


def _by_rank_out(item: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def convert(values: Mapping[Rank, Any]) -> dict[str, Any]:
        if len(values) > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} entries")
        return {str(_integer(rank)): item(value) for rank, value in values.items()}

    return convert


def _by_rank_in(item: Callable[[Any], Any]) -> Callable[[Any], dict[Rank, Any]]:
    def convert(values: object) -> dict[Rank, Any]:
        if not isinstance(values, dict):
            raise TypeError("not an object")
        if len(values) > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} entries")
        return {_rank_name(name): item(value) for name, value in values.items()}

    return convert


def _rank_name(name: str) -> Rank:
    if not (name.isascii() and name.isdigit()) or len(name) > 9 or str(int(name)) != name:
        raise ValueError(f"{name!r:.40} is no rank")
    return Rank(int(name))


def _or_none(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else item(value)


def _form(name: str, annotation: object, *, required: bool) -> _Form:
    number_out, number_in = (
        (_number_out, _number_in) if name in NON_FINITE_FIELDS else (_finite, _finite)
    )
    table: list[tuple[object, Callable[[Any], object], Callable[[Any], Any]]] = [
        (int, _integer, _integer),
        (Rank, _integer, _integer),
        (float, number_out, number_in),
        (str, _cut_text, _text),
        (bool, _flag, _flag),
        (int | None, _or_none(_integer), _or_none(_integer)),
        (float | None, _or_none(_finite), _or_none(_finite)),
        (tuple[float, ...], _listed(number_out), _listed(number_in)),
        (Mapping[Rank, int], _by_rank_out(_integer), _by_rank_in(_integer)),
        (Mapping[Rank, float], _by_rank_out(_finite), _by_rank_in(_finite)),
    ]
    encode, decode = next((out, into) for known, out, into in table if known == annotation)
    return _Form(encode, decode, required)


def _forms(record_type: type[ProgressRecord]) -> dict[str, _Form]:
    hints = get_type_hints(record_type)
    return {
        each.name: _form(
            each.name,
            hints[each.name],
            required=each.default is MISSING and each.default_factory is MISSING,
        )
        for each in fields(record_type)
    }


_FORMS = {kind: _forms(record_type) for kind, record_type in KINDS.items()}
