"""State of a worker that requests the weights of another partition.

Used by `partition_merge`. Received weights are those of an earlier time. They are compared with
this worker's weights at the request, or in lock step after the same iteration. So updates that both
sides applied since count once.

Source: the project's definition.
"""

from dataclasses import dataclass, field

from dlion_api.names import Rank
from dlion_core.policies.interface import Flat, Message
from dlion_core.policies.partitions.version_vector import VersionVector

ANSWER_TIMEOUT_STEPS = 3
"""Steps to wait for version vectors in lock step, where a step takes as long as a message."""

LOOSE_ANSWER_TIMEOUT_STEPS = 30
"""The same where steps do not wait for messages."""

MAX_SNAPSHOTS = 3
"""Kept snapshots. In lock step an answer is of the iteration of the request or of the next."""


@dataclass
class VectorQuery:
    """A pending query for the version vectors of peers."""

    awaited: set[Rank]
    """Peers that have not answered."""
    steps_left: int

    def stepped(self) -> bool:
        """Count one step; return whether the query has timed out now."""
        self.steps_left -= 1
        if not self.awaited or self.steps_left > 0:
            return False
        self.awaited.clear()
        return True


@dataclass(frozen=True)
class PeerVector:
    """A peer's version vector, compared with the local one when it arrived.

    Gradients that are counted later, on the restored link, are missing at neither side.
    """

    held: VersionVector
    missed: int
    """Samples that the peer has and this worker lacked."""
    lost: int
    """Samples that this worker had and the peer lacks."""


@dataclass(frozen=True)
class PullSnapshot:
    """A worker's version vector and resting weights at one time."""

    held: VersionVector
    resting_D: Flat


@dataclass
class PendingPull:
    """A pending request for weights."""

    peer: Rank
    early_answer: Message | None = None
    """An answer that contains an update not yet made here."""
    snapshots: dict[int, PullSnapshot] = field(default_factory=dict)
    """Snapshots by the last contained iteration, from the request on."""

    def needs_snapshot(self, iteration: int, most: int) -> bool:
        """Whether to keep a snapshot of the weights after that iteration's update."""
        return iteration not in self.snapshots and len(self.snapshots) < most

    def snapshot_after(self, iteration: int) -> PullSnapshot:
        """Return the snapshot of that iteration, or the nearest one."""
        return self.snapshots[min(self.snapshots, key=lambda one: (abs(one - iteration), one))]
