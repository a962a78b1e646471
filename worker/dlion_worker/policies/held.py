"""What some weights hold: how many samples of each worker. A version vector, and its payload.

Called by `folding`. Untrusted on arrival.

Source: Parker et al., Detection of Mutual Inconsistency in Distributed Systems (1983).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dlion_api.errors import ContractError
from dlion_api.names import Rank

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

Held = dict[Rank, int]
"""Samples of each worker that some weights hold; who is not named: none."""

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<IQ")
MOST_SAMPLES = 2**53
"""Of a worker: what more is counted stays at that."""


def lacking(held: Mapping[Rank, int], others: Mapping[Rank, int]) -> int:
    """Samples that `others` hold and `held` does not."""
    return sum(max(0, samples - held.get(rank, 0)) for rank, samples in others.items())


def encode_held(held: Mapping[Rank, int]) -> bytes:
    """What weights hold, as the payload of a `HELD` message and the head of a `FOLD`."""
    entries = (_ENTRY.pack(rank, samples) for rank, samples in sorted(held.items()))
    return b"".join((_COUNT.pack(len(held)), *entries))


def decode_held(payload: bytes | memoryview, ranks: Collection[int]) -> tuple[Held, memoryview]:
    """What some weights hold, and what stands behind that in the payload. `ranks`: of whom it may
    speak.

    Raises:
        ContractError: it is cut short, or names unknown workers or absurd counts.
    """
    whole = memoryview(payload)
    try:
        (count,) = _COUNT.unpack_from(whole)
        if count > len(ranks):
            raise ContractError(f"samples of {count} workers; allowed: at most {len(ranks)}")
        end = _COUNT.size + count * _ENTRY.size
        entries = list(_ENTRY.iter_unpack(whole[_COUNT.size : end]))
    except struct.error as error:
        raise ContractError("samples that weights hold, cut short") from error
    held = {Rank(rank): samples for rank, samples in entries}
    if len(entries) < count or len(held) < count:
        raise ContractError("samples that weights hold, cut short or of one worker twice")
    if unknown := [rank for rank in held if rank not in ranks]:
        raise ContractError(f"samples of worker {unknown[0]}: none of this run's")
    if max(held.values(), default=0) > MOST_SAMPLES:
        raise ContractError(f"{max(held.values())} samples; allowed: {MOST_SAMPLES}")
    return held, whole[end:]
