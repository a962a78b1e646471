"""Merge the anchors of workers that trained apart.

Used by `anchored_rounds`. The contributions to a round show which worker has another anchor. The
workers of one anchor are a *group*. Each worker compares which samples the groups' anchors contain
(version vectors). A group without `min_samples` that another one lacks does not count: its workers
have just joined, or have missed the message of a lost one. The others' anchors are requested from
one worker of each group, and all continue from

    sum_g m_g anchor_g / sum_g m_g,

with m_g the samples that only group g has. The outer velocity is merged in the same way.

If no link of the other groups' workers has been down since all had the same anchor, the largest
group stands (`repair`).

Workers with the same contributions and vectors make the same bits. Others differ until the next
round, where a merged anchor contains what the unmerged ones have, so that those do not count.

Source: the project's definition, as `partition_merge` for policies that exchange gradients.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.policies.aggregation import Contribution
from dlion_core.policies.interface import Flat
from dlion_core.policies.partitions.version_vector import (
    MAX_WORKER_SAMPLES,
    VersionVector,
    merge_text,
    missing_samples,
)

CONTRIBUTION, ANCHOR = 0, 1
_MORE_THAN_ALL = MAX_WORKER_SAMPLES**2
"""More samples than all workers together can have."""
HEAD = struct.Struct("<BIIH")
"""Head of a `WEIGHTS` message: which of the two it is, checksum of the sender's anchor and outer
velocity, samples of its round, and its proposal for H (anchor: the H in use). A gradient follows;
or the version vector, the anchor, and the outer velocity if there is one."""


def parse_head(
    payload: bytes | memoryview, allowed_steps: range
) -> tuple[tuple[int, int, int, int], memoryview]:
    """Return the fields of a message's head, and what follows. Raises ContractError."""
    whole = memoryview(payload)
    if len(whole) < HEAD.size:
        raise ContractError(f"WEIGHTS of {len(whole)} bytes; allowed: {HEAD.size} on")
    form, checksum, samples, steps = HEAD.unpack_from(whole)
    if form not in (CONTRIBUTION, ANCHOR) or steps not in allowed_steps:
        raise ContractError(
            f"WEIGHTS of form {form} for {steps} local steps; allowed: form 0 or 1,"
            f" {allowed_steps[0]} to {allowed_steps[-1]} steps"
        )
    return (form, checksum, samples, steps), whole[HEAD.size :]


def checksum_of(anchor_D: Flat, velocity_D: Flat | None) -> int:
    """Return the checksum that `HEAD` has."""
    return zlib.crc32(b"" if velocity_D is None else velocity_D.data, zlib.crc32(anchor_D.data))


@dataclass(frozen=True)
class PseudoGradient(Contribution):
    """A worker's contribution to a round."""

    checksum: int
    """Checksum of its anchor."""
    local_steps: int
    """Its proposal for H."""


@dataclass(frozen=True)
class Anchor:
    """What a worker continues from."""

    held: VersionVector
    """Samples of each worker that it contains."""
    iteration: int
    """The end of the round that led to it."""
    local_steps: int
    anchor_D: Flat
    velocity_D: Flat | None


@dataclass
class AnchorMerge:
    """What one worker knows of the groups of a round, itself in one of them."""

    end: int
    """The iteration at which the round ended."""
    holders: list[Rank]
    """One worker of each group, of the largest group first. This worker for its own."""
    own: int
    """Position of the own group."""
    min_samples: int
    vectors: dict[Rank, VersionVector] = field(default_factory=dict)
    anchors: dict[Rank, Anchor] = field(default_factory=dict)
    wanted: set[Rank] | None = None
    """Holders whose anchors were requested; None: vectors are missing."""
    text: str = ""
    """What was merged; empty if no other group counted."""

    def awaited(self) -> frozenset[Rank]:
        """Return the holders whose answers are missing."""
        if self.wanted is not None:
            return frozenset(self.wanted - self.anchors.keys())
        return frozenset(self._others() - self.vectors.keys())

    def lost(self, rank: Rank) -> None:
        """Do without a holder that left or whose answer is invalid."""
        if rank in self._others():
            self.own -= self.holders.index(rank) < self.own
            self.holders.remove(rank)
            self.vectors.pop(rank, None)
            self.anchors.pop(rank, None)
            if self.wanted is not None:
                self.wanted.discard(rank)

    def choose(self, held: VersionVector) -> set[Rank]:
        """Return the holders whose anchors this worker needs, once all vectors are there."""
        own = self.holders[self.own]
        self.wanted = self._weights({**self.vectors, own: held}).keys() - {own}
        return self.wanted

    def merged(self, own: Anchor) -> Anchor:
        """Return the anchor to continue from, once all that were requested are there.

        A holder may have merged before it answered. Then its anchor has this worker's samples, too,
        and counts alone.
        """
        anchors = {**self.anchors, self.holders[self.own]: own}
        weights = self._weights(
            {**self.vectors, **{rank: one.held for rank, one in anchors.items()}}
        )
        known = [rank for rank in weights if rank in anchors]
        if not known:
            return own
        base, total = anchors[known[0]], sum(weights[rank] for rank in known)
        anchor_D, velocity_D, held = base.anchor_D.copy(), base.velocity_D, Counter(base.held)
        for rank in known[1:]:
            part, other = np.float32(weights[rank] / total), anchors[rank]
            anchor_D += part * (other.anchor_D - base.anchor_D)
            velocity_D = _moved(velocity_D, base.velocity_D, other.velocity_D, part)
            held |= Counter(other.held)
        theirs = missing_samples(own.held, held)
        if theirs >= self.min_samples:
            others = [rank for rank in known if rank != self.holders[self.own]]
            is_counted = len(others) < len(known)
            own_samples = weights[self.holders[self.own]] if is_counted else 0
            self.text = merge_text(others, own_samples, theirs)
        iteration, local_steps = max(
            (anchors[one].iteration, anchors[one].local_steps) for one in known
        )
        return Anchor(dict(held), iteration, local_steps, anchor_D, velocity_D)

    def _others(self) -> set[Rank]:
        return {*self.holders} - {self.holders[self.own]}

    def _weights(self, vectors: Mapping[Rank, VersionVector]) -> dict[Rank, int]:
        """Return the samples that only the group of each holder has, of those that count."""
        standing: list[Rank] = []
        for rank in self.holders:  # of equal ones, that of the largest group stands
            if any(self._has_all(vectors[one], vectors[rank]) for one in standing):
                continue
            standing = [one for one in standing if not self._has_all(vectors[rank], vectors[one])]
            standing.append(rank)
        while True:
            weights = {rank: _only_in(rank, standing, vectors) for rank in standing}
            lightest = min(reversed(standing), key=weights.__getitem__)
            if len(standing) == 1 or weights[lightest] >= self.min_samples:
                return {rank: max(1, samples) for rank, samples in weights.items()}
            standing.remove(lightest)  # one by one: what two share may be in no third

    def _has_all(self, held: VersionVector, others: VersionVector) -> bool:
        return missing_samples(held, others) < self.min_samples


def repair(
    end: int, groups: Sequence[Sequence[Rank]], own: Rank, apart: Collection[Rank], min_samples: int
) -> AnchorMerge:
    """Return the repair of a round's groups.

    `apart`: peers whose link has been down since they had this worker's anchor. Without one of
    them no group can have trained apart: their anchors differ by a contribution that some lack.
    Then no claim of samples counts, and the largest group stands. Otherwise one worker that lies
    about its anchor and its samples would replace the model.
    """
    holders = [own if own in ranks else ranks[0] for ranks in groups]
    may_count = any(one in apart for ranks in groups if own not in ranks for one in ranks)
    least = min_samples if may_count else _MORE_THAN_ALL
    return AnchorMerge(end, holders, holders.index(own), least)


def _only_in(rank: Rank, standing: Iterable[Rank], vectors: Mapping[Rank, VersionVector]) -> int:
    """Return how many samples no other one has."""
    others: Counter[Rank] = Counter()
    for other in standing:
        if other != rank:
            others |= Counter(vectors[other])
    return missing_samples(others, vectors[rank])


def group_by_anchor(checksums: Mapping[Rank, int]) -> list[list[Rank]]:
    """Return the workers of each anchor in rank order, the largest group first; of equal ones, that
    of the lowest rank."""
    groups: dict[int, list[Rank]] = {}
    for rank, checksum in sorted(checksums.items()):
        groups.setdefault(checksum, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _moved(
    vector_D: Flat | None, base_D: Flat | None, other_D: Flat | None, part: np.float32
) -> Flat | None:
    """Return `vector_D` moved by that part of the way from `base_D` to `other_D`; None is zero."""
    if base_D is None and other_D is None:
        return vector_D
    known_D = other_D if base_D is None else base_D
    zero_D = np.zeros_like(known_D)
    way_D = (zero_D if other_D is None else other_D) - (zero_D if base_D is None else base_D)
    return (zero_D if vector_D is None else vector_D) + part * way_D
