"""Version vector: samples of each worker that some weights contain, and its encoding.

Used by `partition_merge`. Untrusted on arrival. `SampleCounter` keeps a worker's own vector.

Source: Parker et al., Detection of Mutual Inconsistency in Distributed Systems (1983).
"""

import struct
from collections.abc import Collection, Iterable, Mapping

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.spec import Spec
from dlion_core.policies.claims.samples import max_batch_at
from dlion_core.policies.interface import Value
from dlion_core.policies.state_values import ints_by_rank

VersionVector = dict[Rank, int]
"""Samples by worker; a missing worker counts 0."""

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<IQ")
MAX_WORKER_SAMPLES = 2**53
"""Upper limit of the count of a worker."""

MERGE_ITERATIONS = 10
"""A returned peer's samples cause a merge only above this many iterations of all workers. Below,
the link was down for a moment, and the loss is like that of a superseded gradient."""

_HELD, _STEP_OF = "held_samples_", "held_iteration_"
"""Prefixes of checkpoint keys, each followed by a rank."""

VERSION_VECTOR_STATE = (_HELD, _STEP_OF)
"""State kept when weights are taken over: a lower bound of what they contain. Peers send the rest.
"""


class SampleCounter:
    """The version vector of the local weights."""

    def __init__(self) -> None:
        self.held: VersionVector = {}
        self._iterations: dict[Rank, int] = {}
        """The last iteration of each worker that `held` counts."""

    def count(self, rank: Rank, iteration: int, samples: int) -> None:
        """Add one step of a worker; a repeated message counts once."""
        if samples and iteration > self._iterations.get(rank, 0):
            self._iterations[rank] = iteration
            self.held[rank] = min(self.held.get(rank, 0) + samples, MAX_WORKER_SAMPLES)

    def most(self, ranks: Iterable[Rank], until: int, spec: Spec) -> dict[Rank, int]:
        """Return the most samples that each worker can have made until that iteration.

        That is what is counted here, and a whole global batch for each iteration. A worker without
        a count may have trained before a resume, with a larger batch.
        """
        sizes = spec.batching.global_batch_size
        batch, largest = max_batch_at(spec, until), max(sizes.initial, sizes.max)
        return {
            rank: self.held.get(rank, 0) + until * (batch if rank in self.held else largest)
            for rank in ranks
        }

    def include(self, others: Mapping[Rank, int]) -> None:
        """Take the larger count of each worker."""
        for rank, samples in others.items():
            self.held[rank] = max(samples, self.held.get(rank, 0))

    def merge(self, others: Mapping[Rank, int], then: VersionVector, min_samples: int) -> None:
        """Include a vector that was requested when the local one was `then`. If the difference
        exceeds what can be in transit, also keep the samples counted since."""
        for rank, samples in others.items():
            before, now = then.get(rank, 0), self.held.get(rank, 0)
            is_missed = (samples - before) * len(others) >= min_samples
            since = now - before if is_missed else 0
            self.held[rank] = min(max(samples + since, now), MAX_WORKER_SAMPLES)

    def state(self) -> dict[str, Value]:
        return {
            **{f"{_HELD}{rank}": samples for rank, samples in self.held.items()},
            **{f"{_STEP_OF}{rank}": iteration for rank, iteration in self._iterations.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        self.held = ints_by_rank(state, _HELD)
        self._iterations = ints_by_rank(state, _STEP_OF)


def missing_samples(held: Mapping[Rank, int], others: Mapping[Rank, int]) -> int:
    """Return the number of samples that `others` contains and `held` does not."""
    return sum(max(0, samples - held.get(rank, 0)) for rank, samples in others.items())


def merge_text(senders: Collection[Rank], own: int, theirs: int) -> str:
    """Return the message of the event of a merge. `own`, `theirs`: samples that one side lacks; 0:
    too few to count."""
    workers = f"worker{'s' * (len(senders) > 1)} {', '.join(map(str, senders))}"
    if not own:
        return f"adopted the weights of {workers}, which contain {theirs:,} more samples"
    return (
        f"merged with {workers}, weighted by the samples since the split: {own:,} samples here,"
        f" {theirs:,} there"
    )


def encode_version_vector(held: Mapping[Rank, int]) -> bytes:
    """Encode as the payload of a `HELD` message and the head of a `FOLD`."""
    entries = (_ENTRY.pack(rank, samples) for rank, samples in sorted(held.items()))
    return b"".join((_COUNT.pack(len(held)), *entries))


def decode_version_vector(
    payload: bytes | memoryview, ranks: Collection[int]
) -> tuple[VersionVector, memoryview]:
    """Return the vector and the rest of the payload. `ranks`: allowed workers. Raises ContractError
    if it is truncated, or has unknown workers or invalid counts."""
    whole = memoryview(payload)
    try:
        (count,) = _COUNT.unpack_from(whole)
        if count > len(ranks):
            raise ContractError(f"samples of {count} workers; allowed: at most {len(ranks)}")
        end = _COUNT.size + count * _ENTRY.size
        entries = list(_ENTRY.iter_unpack(whole[_COUNT.size : end]))
    except struct.error as error:
        raise ContractError("version vector is truncated") from error
    held = {Rank(rank): samples for rank, samples in entries}
    if len(entries) < count or len(held) < count:
        raise ContractError("version vector is truncated or repeats a worker")
    if unknown := [rank for rank in held if rank not in ranks]:
        raise ContractError(f"samples of worker {unknown[0]}, which is not part of this run")
    if max(held.values(), default=0) > MAX_WORKER_SAMPLES:
        raise ContractError(f"{max(held.values())} samples; allowed: {MAX_WORKER_SAMPLES}")
    return held, whole[end:]
