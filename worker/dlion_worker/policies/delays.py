"""What age means to a gradient that is applied whenever it comes: `delayed`'s parts.

`Delays` is what a policy says about it; `Readers` knows when each peer last read the weights here,
and so how many updates its next gradient is old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dlion_worker.policies.headers import by_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_api.names import Rank
    from dlion_worker.codecs import GradientPart
    from dlion_worker.policies.interface import BudgetsChanged, Flat, Value
    from dlion_worker.policies.sending import Outgoing

_READ_AT = "read_at_"
"""Before a rank, in a checkpoint."""


class Delays(Protocol):
    """What a policy sends of a gradient, and what age does to one."""

    own_as_peers: bool
    """Whether, peer to peer, an own gradient is corrected here as the peers will correct it."""

    def prepare(self, gradient_D: Flat, peers: Sequence[Rank], links: BudgetsChanged) -> Outgoing:
        """Payloads for those peers (who is not named gets none), and what counts here of it."""
        ...

    def correct(self, gradient_D: Flat, part: GradientPart, sender: Rank) -> None:
        """Changes an arrived gradient, in place, by what has happened since its sender read."""
        ...

    def applied(self, part: GradientPart) -> None:
        """The weights have taken an update of these entries."""
        ...

    def read(self, reader: Rank) -> None:
        """That peer has the weights as they are now, as far as is known here."""
        ...

    def forget(self, reader: Rank) -> None:
        """A peer has left."""
        ...

    def state(self) -> dict[str, Value]:
        """What a restart must bring back."""
        ...

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave, among other things of the machine's."""
        ...


class Readers:
    """Updates made here, how many when each peer read, and how old their gradients were."""

    def __init__(self) -> None:
        self.updates = 0
        self._read_at: dict[Rank, int] = {}
        self._kept: set[Rank] = set()  # of a checkpoint, and not back yet
        self._aged = self._age_sum = self._age_most = 0

    def read(self, rank: Rank) -> None:
        """That peer has the weights as they are now."""
        self._read_at[rank] = self.updates

    def is_back(self, rank: Rank) -> bool:
        """Whether it is a peer of the checkpoint, not heard of since: it has what it had."""
        if rank not in self._kept:
            return False
        self._kept.discard(rank)
        return True

    def left(self, rank: Rank) -> None:
        """What it had read is void."""
        self._read_at.pop(rank, None)
        self._kept.discard(rank)

    def count_age(self, sender: Rank) -> None:
        """A gradient of that peer's is to be applied now."""
        age = self.updates - self._read_at.get(sender, 0)
        self._aged += 1
        self._age_sum += age
        self._age_most = max(self._age_most, age)

    def state(self) -> dict[str, Value]:
        """With ages in updates: their number, sum and largest."""
        return {
            "updates": self.updates,
            "staleness_count": self._aged,
            "staleness_sum": self._age_sum,
            "staleness_most": self._age_most,
            **{f"{_READ_AT}{rank}": at for rank, at in self._read_at.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        self.updates = int(state["updates"])
        self._aged = int(state["staleness_count"])
        self._age_sum = int(state["staleness_sum"])
        self._age_most = int(state["staleness_most"])
        self._read_at = by_rank(state, _READ_AT)
        self._kept = set(self._read_at)
