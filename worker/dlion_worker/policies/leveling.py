"""Where workers go on whose iterations ran apart while they were cut off from each other.

Called by `folding`. Far apart neither would ever count on the other again, so the side that is
behind takes up at the iteration where the other is.

Source: the project's definition.
"""

from __future__ import annotations

from dlion_api.names import Rank

LARGEST_LEAP = 1_000_000
"""Iterations: a peer that says that it is further ahead is not followed."""

LEVEL_STEPS = 2
"""After so many steps at whose end a peer was not ahead the two are level again."""


class Leveling:
    """Which peers have trained apart, and how far each linked peer is."""

    def __init__(self, slack: int | None) -> None:
        """`slack`: how far a peer may be behind without being waited for; None: any."""
        self._slack = slack
        self._finished: dict[Rank, int] = {}
        """The last iteration that each linked peer is known to have done."""
        self._met: dict[Rank, int] = {}
        """Peers that trained apart, each with the level steps after which it is not followed."""
        self._returned: dict[Rank, int] = {}
        """Links that came up while this worker trained and on which nothing has been said of what
        the peer holds, each with the level steps after which they are as others."""

    def joined(self, peer: Rank, iteration: int, *, trains: bool) -> None:
        """A link stands, with who has done that iteration; `trains`: this worker does already."""
        self._finished[peer] = iteration
        if trains:
            self._returned[peer] = 1 + LEVEL_STEPS

    def left(self, peer: Rank) -> None:
        """A link is gone."""
        for known in (self._finished, self._met, self._returned):
            known.pop(peer, None)

    def done(self, peer: Rank, iteration: int) -> None:
        """That peer has done that iteration."""
        self._finished[peer] = max(iteration, self._finished.get(peer, 0))

    def told(self, peer: Rank) -> None:
        """It has said what it holds: where its link has just come up, it may have trained apart."""
        if self._returned.pop(peer, None):
            self._met[peer] = LEVEL_STEPS

    def stepped(self, iteration: int) -> None:
        """A peer that counts on this worker is no further than that before it has heard of it."""
        for peer, left in list(self._returned.items()):
            if left <= 1:
                del self._returned[peer]
            elif abs(self._finished[peer] - iteration) <= 1 + (self._slack or 0):
                self._returned[peer] = left - 1
        for peer, left in list(self._met.items()):
            if self._slack is not None and self._finished[peer] > iteration + self._slack:
                self._met[peer] = LEVEL_STEPS
            elif left > 1:
                self._met[peer] = left - 1
            else:
                del self._met[peer]

    def next_iteration(self, usual: int) -> int:
        """`usual`; but where a peer that came back has done that one already, and as many more as
        need no waiting for, the one after that peer's."""
        if self._slack is None:
            return usual
        ahead = [
            at
            for at in (self._finished[peer] for peer in self._met)
            if usual + self._slack <= at <= usual + LARGEST_LEAP
        ]
        return max(ahead) + 1 if ahead else usual
