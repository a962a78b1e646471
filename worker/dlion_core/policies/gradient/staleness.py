"""Staleness of gradients that are applied on arrival: parts of `delayed_gradients`.

A policy extends `StalenessRule`. `WeightReads` tracks when each peer last read the weights, and
so how many updates old its next gradient is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_core.policies.state_values import ints_by_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_api.names import Rank
    from dlion_core.codecs import GradientPart
    from dlion_core.policies.gradient.gradient_selectors import OutgoingPayloads
    from dlion_core.policies.interface import BudgetsChanged, Flat, Value

_READ_AT = "read_at_"
"""Prefix of checkpoint keys, followed by a rank."""


class StalenessRule:
    """What a policy sends of a gradient, and how it corrects old ones (by default not at all)."""

    own_as_peers = False
    """Whether an own gradient is corrected as peers correct it (peer to peer only)."""

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], links: BudgetsChanged
    ) -> OutgoingPayloads:
        """Return payloads for those peers (none for a missing peer), and the part that counts
        locally. Raises ValueError if an entry is not finite."""
        raise NotImplementedError

    def correct(self, gradient_D: Flat, part: GradientPart, sender: Rank) -> None:
        """Correct a received gradient in place for the updates since its sender read weights."""

    def applied(self, part: GradientPart) -> None:
        """An update of these entries was applied to the weights."""

    def read(self, reader: Rank) -> None:
        """The peer has the current weights, as far as is known here."""

    def forget(self, reader: Rank) -> None:
        """A peer has left."""

    def state(self) -> dict[str, Value]:
        """Return what a restart needs."""
        return {}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore what `state` returned; the mapping also holds the machine's state."""


class WeightReads:
    """Counts updates, the updates at each peer's last read, and the staleness of gradients."""

    def __init__(self) -> None:
        self.updates = 0
        self._read_at: dict[Rank, int] = {}
        self._kept: set[Rank] = set()  # from a checkpoint, not rejoined yet
        self._aged = self._age_sum = self._age_most = 0

    def read(self, rank: Rank) -> None:
        """The peer has the current weights."""
        self._read_at[rank] = self.updates

    def is_back(self, rank: Rank) -> bool:
        """Whether a peer of the checkpoint joins for the first time since.

        It still has the weights that it had then.
        """
        if rank not in self._kept:
            return False
        self._kept.discard(rank)
        return True

    def left(self, rank: Rank) -> None:
        self._read_at.pop(rank, None)
        self._kept.discard(rank)

    def count_age(self, sender: Rank) -> None:
        """Record the staleness of a gradient of that peer, which is applied now."""
        age = self.updates - self._read_at.get(sender, 0)
        self._aged += 1
        self._age_sum += age
        self._age_most = max(self._age_most, age)

    def state(self) -> dict[str, Value]:
        return {
            "updates": self.updates,
            "staleness_count": self._aged,
            "staleness_sum": self._age_sum,
            "staleness_most": self._age_most,
            **{f"{_READ_AT}{rank}": at for rank, at in self._read_at.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        self.updates = int(state["updates"])
        self._aged = int(state["staleness_count"])
        self._age_sum = int(state["staleness_sum"])
        self._age_most = int(state["staleness_most"])
        self._read_at = ints_by_rank(state, _READ_AT)
        self._kept = set(self._read_at)
