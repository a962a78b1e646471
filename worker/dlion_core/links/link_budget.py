"""How much a link may queue and have in flight. Shared by real and simulated links."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dlion_api.names import Rank
from dlion_core.policies.interface import Message, MessageKind

UNBUDGETED_WINDOW_BYTES = 8 * 2**20
"""The window of a link whose rate has not been measured."""

MIN_BUDGET_BYTES = 256
"""Minimum budget: a link must carry something to be measured. More would take a narrow link longer
than its share of a step, and delay all workers that wait for it."""

BACKLOG_BUDGETS = 1.5
"""Maximum backlog of a link when a gradient is added, in budgets.

Keeps the link busy through a step half as long again as usual. Stays below the window's two
budgets, because after a drop the new rate has to clear the whole backlog.
"""

SIMILAR_FRACTION = 0.1
"""Links whose sizes differ by less than this get the same, so that what they carry is selected and
coded once. What a link is given too little of is made up for with the next gradient."""


class QueueRule(StrEnum):
    """What to do with gradients that the peer cannot take in time."""

    KEEP = "keep"  # drop nothing; the synchronisation policy limits the queue
    NEWEST = "newest"  # a newer gradient replaces one that has not been started

    def drops(self, message: Message) -> bool:
        """Whether a newer message of this kind replaces one that has not been started."""
        return self is QueueRule.NEWEST and message.kind is MessageKind.GRADIENT


@dataclass(frozen=True)
class LinkBudget:
    """One link's budget in bytes per iteration; None if its rate is unknown."""

    budget_bytes: int | None = None

    @property
    def window_bytes(self) -> int:
        """Two budgets: the limit for bytes sent and not acknowledged if round trips are short."""
        if self.budget_bytes is None:
            return UNBUDGETED_WINDOW_BYTES
        return 2 * max(MIN_BUDGET_BYTES, self.budget_bytes)

    def sendable_bytes(self, held_bytes: int) -> int | None:
        """The largest gradient to add to `held_bytes` of backlog; None: no limit."""
        if self.budget_bytes is None:
            return None
        budget_bytes = max(MIN_BUDGET_BYTES, self.budget_bytes)
        return max(0, min(budget_bytes, int(BACKLOG_BUDGETS * budget_bytes) - held_bytes))


def equalize_similar(sendable_bytes: Mapping[Rank, int]) -> dict[Rank, int]:
    """Reduce sizes that differ little to the smallest of them.

    >>> equalize_similar({Rank(0): 1000, Rank(1): 950, Rank(2): 600})
    {0: 950, 1: 950, 2: 600}
    """
    level: dict[Rank, int] = {}
    group: list[Rank] = []
    for rank in sorted(sendable_bytes, key=lambda rank: (-sendable_bytes[rank], rank)):
        if group and sendable_bytes[rank] < (1 - SIMILAR_FRACTION) * sendable_bytes[group[0]]:
            group = []
        group.append(rank)
        level.update(dict.fromkeys(group, sendable_bytes[rank]))
    return {rank: level[rank] for rank in sendable_bytes}
