"""Random lines between trainer and sidecar.

Any record with values in bounds survives its line. Any bytes either decode to a record that can be
encoded again, or raise ContractError and nothing else.

Left out: sockets.
"""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import (
    Directive,
    Grouping,
    RefusalCount,
    SpeedProbe,
    StepTiming,
    StreamRefusals,
)
from dlion_api.protocol.sidecar_protocol import decode, encode

counts = st.integers(0, 2**40)
seconds = st.floats(0, 1e9)
ranks = st.integers(0, 10**8).map(Rank)

maybe_seconds = st.none() | seconds
steps = st.builds(
    StepTiming,
    counts,
    counts,
    seconds,
    seconds,
    seconds,
    maybe_seconds,
    maybe_seconds,
    st.none() | counts,
    st.booleans(),
)
probes = st.builds(SpeedProbe, counts, seconds, seconds, seconds, maybe_seconds, counts)
directives = st.builds(
    Directive,
    counts,
    counts,
    counts,
    st.dictionaries(ranks, counts),
    st.dictionaries(ranks, seconds),
    st.dictionaries(ranks, seconds),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    st.none()
    | st.builds(
        Grouping,
        counts,
        ranks,
        st.lists(st.lists(ranks, max_size=4).map(tuple), max_size=3).map(tuple),
        st.lists(ranks, max_size=3).map(tuple),
    ),
)
refusals = st.builds(
    StreamRefusals,
    st.lists(
        st.builds(
            RefusalCount,
            st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
            st.booleans(),
            counts,
        ),
        max_size=4,
    ).map(tuple),
)
records = steps | probes | directives | refusals
Record = StepTiming | SpeedProbe | Directive | StreamRefusals
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(records)
def test_any_record_survives_its_line(record: Record) -> None:
    assert decode(encode(record)) == record


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_refused(line: bytes) -> None:
    try:
        encode(decode(line))
    except ContractError:
        return


@given(records, st.data())
def test_a_record_with_one_value_replaced_is_a_record_or_refused(
    record: Record, data: st.DataObject
) -> None:
    document = json.loads(encode(record))
    document[data.draw(st.sampled_from(sorted(document)))] = data.draw(json_values)
    try:
        encode(decode(json.dumps(document).encode()))
    except ContractError:
        return
