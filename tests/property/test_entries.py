"""The largest entries of a vector against a sort.

The kept entries: ties to the first, never zeros, over vectors of few values, of many zeros (for
which selection takes another path) and over chunks. Also the n-th from above.

Left out: how policies use them (their own tests).
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_core.policies.gradient.entries import (
    chunks_of,
    largest_indices,
    largest_of_chunks,
    magnitude_bits,
    nth_largest,
)
from dlion_core.policies.interface import Layout
from example_counts import examples

VALUES = [0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 0.5, 1e-40, float(np.float32(3e38))]
vectors = st.one_of(
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=40),
    st.lists(st.sampled_from([0.0] * 9 + VALUES), min_size=1, max_size=40),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
)


@given(values=vectors, count=st.integers(0, 45))
@settings(max_examples=examples(300), deadline=None)
def test_the_largest_are_the_first_of_a_stable_sort(values: list[float], count: int) -> None:
    value_D = np.array(values, np.float32)
    order = sorted(range(value_D.size), key=lambda i: -abs(float(value_D[i])))
    expected = sorted(i for i in order[:count] if value_D[i])
    assert largest_indices(value_D, count).tolist() == expected


@given(values=vectors, data=st.data())
@settings(max_examples=examples(300), deadline=None)
def test_the_nth_is_that_of_a_sort(values: list[float], data: st.DataObject) -> None:
    bits_D = magnitude_bits(np.array(values, np.float32))
    count = data.draw(st.integers(1, bits_D.size))
    assert nth_largest(bits_D, count) == np.sort(bits_D)[bits_D.size - count]


@given(
    variables=st.lists(vectors, min_size=1, max_size=4), chunk=st.integers(1, 12), data=st.data()
)
@settings(max_examples=examples(200), deadline=None)
def test_the_largest_of_chunks_are_those_of_each(
    variables: list[list[float]], chunk: int, data: st.DataObject
) -> None:
    """No chunk has entries of two variables; the last one of each may be shorter."""
    layout = Layout(tuple("abcd"[: len(variables)]), tuple(map(len, variables)))
    counts = data.draw(st.lists(st.integers(1, 14), min_size=chunk, max_size=chunk))
    kept, begin = [], 0
    for values in variables:
        for start in range(0, len(values), chunk):
            part = np.array(values[start : start + chunk], np.float32)
            kept += (begin + start + largest_indices(part, counts[part.size - 1])).tolist()
        begin += len(values)
    value_D = np.array([value for values in variables for value in values], np.float32)
    found_D = largest_of_chunks(value_D, chunks_of(layout, chunk), lambda size: counts[size - 1])
    assert found_D.nonzero()[0].tolist() == kept
