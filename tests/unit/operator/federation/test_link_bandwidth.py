"""Test the receiver of a bandwidth measurement between two sites.

Time starts at the first chunk, whose bytes do not count. A sender that exceeds the limit is
refused.

Left out: real links, and one measurement at a time (tests/local/test_bandwidth).
"""

from __future__ import annotations

import pytest

from dlion_api.errors import ContractError
from dlion_operator.federation.link_bandwidth import (
    CHUNK_BYTES,
    MAX_MEASUREMENT_BYTES,
    ChunkTimer,
)


def test_the_first_chunk_starts_the_time_and_is_not_timed() -> None:
    timer = ChunkTimer()
    for at_s in (10.0, 10.25, 10.5):
        timer.take(1000, at_s)
    result = timer.result()
    assert (result.timed_bytes, result.receiver_micros) == (2000, 500_000)
    assert timer.total_bytes == 3000


def test_nothing_received_is_nothing_timed() -> None:
    result = ChunkTimer().result()
    assert (result.timed_bytes, result.receiver_micros) == (0, 0)


def test_a_measurement_beyond_its_limit_is_refused() -> None:
    timer = ChunkTimer()
    for _ in range(MAX_MEASUREMENT_BYTES // CHUNK_BYTES + 1):
        timer.take(CHUNK_BYTES, 0.0)
    with pytest.raises(ContractError, match="more than"):
        timer.take(1, 0.0)
