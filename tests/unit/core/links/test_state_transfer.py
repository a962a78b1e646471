"""Tests of chunked state transfer: any size is reassembled, and other chunks are refused.

So are chunks by which a peer could prolong a transfer: small ones, and empty ones within a state. A
state that is equal to one that the caller has named arrives without a payload.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from dlion_api.errors import ContractError
from dlion_api.wire.exchange_pb2 import StateChunk
from dlion_core.links.events import StateSnapshot
from dlion_core.links.state_transfer import CHUNK_BYTES, StateAssembler, state_chunks

LIMIT = 4 * CHUNK_BYTES


@settings(deadline=None)  # a busy machine may pause for longer
@given(
    st.sampled_from([1, 2, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, LIMIT]),
    st.integers(0, 2**40),
)
def test_a_state_of_any_size_is_reassembled(size: int, samples: int) -> None:
    sent = StateSnapshot(7, samples, bytes(i % 251 for i in range(64)) * (size // 64 + 1))
    sent = StateSnapshot(7, samples, memoryview(sent.payload)[:size])
    assembly = StateAssembler(LIMIT)
    whole = [
        assembly.feed(chunk) for chunk in [StateChunk().SerializeToString(), *state_chunks(sent)]
    ]
    assert whole[-1] is not None
    assert bytes(whole[-1].payload) == bytes(sent.payload)
    assert (whole[-1].iteration, whole[-1].samples) == (7, samples)


def test_an_equal_state_has_no_payload() -> None:
    equal = StateSnapshot(7, 2**40, b"", is_equal=True)
    (chunk,) = state_chunks(equal)
    assert StateAssembler(LIMIT, may_be_equal=True).feed(chunk) == equal
    with pytest.raises(ContractError, match="not named"):
        StateAssembler(LIMIT).feed(chunk)
    first, _ = state_chunks(StateSnapshot(7, 2**40, bytes(CHUNK_BYTES + 1)))
    assembly = StateAssembler(LIMIT, may_be_equal=True)
    assembly.feed(first)
    with pytest.raises(ContractError, match="not named"):
        assembly.feed(chunk)


BAD: list[tuple[str, Callable[[StateChunk], None]]] = [
    ("allowed", lambda c: setattr(c, "total_bytes", LIMIT + 1)),
    ("expected", lambda c: setattr(c, "offset", 5)),
    ("expected", lambda c: setattr(c, "total_bytes", 1)),
    ("checksum", lambda c: setattr(c, "checksum", c.checksum ^ 1)),
]


@pytest.mark.parametrize(("words", "spoil"), BAD)
def test_a_wrong_chunk_is_refused(words: str, spoil: Callable[[StateChunk], None]) -> None:
    chunk = StateChunk.FromString(next(state_chunks(StateSnapshot(1, 1, b"abc"))))
    spoil(chunk)
    with pytest.raises(ContractError, match=words):
        StateAssembler(LIMIT).feed(chunk.SerializeToString())


def test_a_chunk_of_another_state_is_refused() -> None:
    first, second = state_chunks(StateSnapshot(1, 1, bytes(CHUNK_BYTES + 1)))
    other = StateChunk.FromString(second)
    other.iteration = 2
    assembly = StateAssembler(LIMIT)
    assembly.feed(first)
    with pytest.raises(ContractError, match="another state"):
        assembly.feed(other.SerializeToString())


def test_a_chunk_that_skips_another_is_refused() -> None:
    first, _, third = state_chunks(StateSnapshot(1, 1, bytes(2 * CHUNK_BYTES + 1)))
    assembly = StateAssembler(LIMIT)
    assembly.feed(first)
    with pytest.raises(ContractError, match=f"expected: at {CHUNK_BYTES}"):
        assembly.feed(third)


def test_a_small_chunk_before_the_last_is_refused() -> None:
    chunk = StateChunk(total_bytes=CHUNK_BYTES, payload=b"a", checksum=crc32(b"a"))
    with pytest.raises(ContractError, match=f"allowed before the last: {CHUNK_BYTES}"):
        StateAssembler(LIMIT).feed(chunk.SerializeToString())


def test_an_empty_chunk_within_a_state_is_refused() -> None:
    first, _ = state_chunks(StateSnapshot(1, 1, bytes(CHUNK_BYTES + 1)))
    assembly = StateAssembler(LIMIT)
    assembly.feed(first)
    with pytest.raises(ContractError, match=f"after {CHUNK_BYTES} bytes"):
        assembly.feed(StateChunk().SerializeToString())
