"""Records from any bytes: the result is a record or a ContractError.

A record that was read is written and read again unchanged.

Left out: the table of errors (tests/unit/worker/coordination/test_records.py).
"""

from __future__ import annotations

import json
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.protocol.records import KINDS, record_from_json, record_to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["NaN", "Infinity", "-Infinity"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["0", "1", "01", "x", "-1"]), inner, max_size=4),
    max_leaves=6,
)  # fmt: skip


@st.composite
def near_records(draw: st.DrawFn) -> str:
    """Objects with the right names and any values."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    numbers = st.integers(0, 9) | st.floats(0, 1)
    values = {each.name: draw(numbers | VALUES) for each in fields(KINDS[kind])}
    return json.dumps({"kind": kind, **values})


@given(st.binary(max_size=200) | st.text(max_size=200) | near_records())
def test_any_input_is_a_record_or_refused(text: str | bytes) -> None:
    try:
        record = record_from_json(text)
    except ContractError:
        return
    again = record_to_json(record)
    assert record_to_json(record_from_json(again)) == again
