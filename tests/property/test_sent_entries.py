"""What the detector computes of a sparse contribution equals, bit for bit, what it computes of the
whole vector with zeros for the entries that were not sent.

Left out: the figures themselves (tests/unit/core/policies/test_deviations.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_core.codecs import GradientPart, ValueCodec, decode_gradient
from dlion_core.codecs.positions import Positions
from dlion_core.policies.claims.sent_entries import MIN_RATIO, SentEntries
from dlion_core.policies.claims.sign_balance import sign_balance
from example_counts import examples
from naive_codecs import encode_positions, payload_of

SCHEMES = [one for one in Positions if one is not Positions.ALL]
WIDTH = 509


@pytest.mark.parametrize("scheme", SCHEMES)
@given(
    size=st.sampled_from([1, 300, 509, 70_000, 140_001]),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(20), deadline=None)
def test_a_sparse_contribution_has_the_figures_of_the_whole_vector(
    scheme: Positions, size: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kept = max(1, int(share * size))
    index_K = np.sort(rng.choice(size, kept, replace=False))
    if scheme is Positions.RANGE:
        index_K = np.arange(kept) + int(rng.integers(size - kept + 1))
    value_K = rng.choice(np.array([-1e30, -1, -1e-30, 0, 1e-3, 2], np.float32), kept)
    positions = encode_positions(scheme, index_K, size)
    part = decode_gradient(payload_of(scheme, positions, value_K, size, ValueCodec.FLOAT32), size)
    sent, whole = SentEntries.of(part), SentEntries.of(GradientPart(part.weighted(np.float32(1))))
    np.testing.assert_array_equal(part.index_K, index_K)
    assert (sent.index_K is None) == (MIN_RATIO * kept > size)
    sign_R = rng.choice(np.array([-1, 1], np.float32), -(-size // WIDTH))
    one_S, other_S = np.zeros((2, WIDTH), np.float32)
    assert sent.project(sign_R, one_S) == whole.project(sign_R, other_S)
    assert one_S.tobytes() == other_S.tobytes()
    wanted_T = np.sort(rng.choice(size, min(size, 400), replace=False))
    np.testing.assert_array_equal(sent.at(wanted_T), whole.at(wanted_T))
    first = int(rng.integers(100))
    assert sign_balance(sent, first) == sign_balance(whole, first)
