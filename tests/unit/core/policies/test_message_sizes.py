"""Tests of the bound on message sizes.

No payload of any codec is longer than the limit of a receiver of that model, with its headers
included. A lower bound in the manifest counts. The limit is not far above the worst case.

Left out: the refusal of longer messages (tests/unit/core/links/test_framing.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_api.spec import load_job
from dlion_core.codecs import Coding, ValueCodec, encode_range, encode_whole, max_coded_bytes
from dlion_core.codecs.polyline import MAX_DECIMALS, encode_polyline
from dlion_core.policies.factory import MAX_OVERHEAD_BYTES, max_message_bytes
from dlion_core.policies.interface import Layout
from dlion_core.policies.partitions.version_vector import encode_version_vector
from dlion_core.policies.weights.eventgrad import VariableCodec
from local_run import job_document


def extremes(size: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Values that differ from their neighbours by the most that polyline with one
    decimal allows.
    """
    value_D = np.full(size, 2**52 / 10.0**MAX_DECIMALS * 0.999, np.float32)
    value_D[::2] *= -1
    return value_D


@pytest.mark.parametrize("size", [1, 2, 3, 255, 257, 10_000])
def test_no_payload_is_longer_than_the_bound(size: int) -> None:
    value_D = extremes(size)
    most = max_coded_bytes(size)
    for codec in ValueCodec:
        assert len(encode_whole(value_D, Coding(codec))) <= most
        if size > 1:
            assert len(encode_range(value_D, 1, size, Coding(codec))) <= most
    longest = len(encode_polyline(value_D, MAX_DECIMALS))
    assert 0.95 * most - 40 <= longest <= most


def test_the_bound_includes_the_headers() -> None:
    layout = Layout(tuple(f"v{n}" for n in range(900)), (1,) * 900)
    most = max_message_bytes(load_job(job_document(2)), layout)
    held = encode_version_vector({Rank(rank): 2**52 for rank in range(5000)})
    assert len(held) <= MAX_OVERHEAD_BYTES
    value_D = extremes(900)
    assert len(held) + len(encode_whole(value_D, ValueCodec.FLOAT32)) <= most
    chosen = VariableCodec(layout, ValueCodec.FLOAT32).encoded(value_D, np.ones(900, np.bool_))
    assert len(chosen) <= most


def test_a_lower_bound_of_the_manifest_counts() -> None:
    job = load_job(job_document(2, network={"maxMessageBytes": 2**20}))
    small, large = Layout(("w",), (1000,)), Layout(("w",), (10_000_000,))
    assert max_message_bytes(job, small) < 100_000
    assert max_message_bytes(job, large) == 2**20
