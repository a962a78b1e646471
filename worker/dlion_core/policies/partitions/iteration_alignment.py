"""Align iterations of workers that trained apart.

Used by `partition_merge`. With iterations far apart, workers would never wait for each other again.
So the side that is behind continues at the other side's iteration.

Source: the project's definition.
"""

from dlion_api.names import Rank

MAX_FOLLOWED_LEAD = 1_000_000
"""A peer that reports more iterations ahead than this is not followed."""

ALIGNED_STEPS = 2
"""Two workers are aligned after this many steps at whose end the peer was not ahead."""


class IterationAlignment:
    """Tracks peers that trained apart and the iteration of each linked peer."""

    def __init__(self, slack: int | None) -> None:
        """`slack`: iterations that a peer may be behind without blocking; None: any number."""
        self._slack = slack
        self._finished: dict[Rank, int] = {}
        """The last iteration that each linked peer is known to have done."""
        self._met: dict[Rank, int] = {}
        """Peers that trained apart, with the remaining aligned steps until they are not followed.
        """
        self._returned: dict[Rank, int] = {}
        """Peers with a link that came up during training, and no version vector yet. The value
        counts down the steps until they are treated as other peers."""

    def joined(self, peer: Rank, iteration: int, *, trains: bool) -> None:
        """A link is up. `iteration`: the last of the peer. `trains`: this worker already trains."""
        self._finished[peer] = iteration
        if trains:
            self._returned[peer] = 1 + ALIGNED_STEPS

    def left(self, peer: Rank) -> None:
        for known in (self._finished, self._met, self._returned):
            known.pop(peer, None)

    def step_finished(self, peer: Rank, iteration: int) -> None:
        self._finished[peer] = max(iteration, self._finished.get(peer, 0))

    def vector_received(self, peer: Rank) -> None:
        """The peer sent its version vector. If its link has just come up, it may have trained
        apart."""
        if self._returned.pop(peer, None):
            self._met[peer] = ALIGNED_STEPS

    def stepped(self, iteration: int) -> None:
        """Record an own step, and count down the alignment of peers. A peer that waits for this
        worker cannot be further ahead until it receives this step."""
        for peer, left in list(self._returned.items()):
            if left <= 1:
                del self._returned[peer]
            elif abs(self._finished[peer] - iteration) <= 1 + (self._slack or 0):
                self._returned[peer] = left - 1
        for peer, left in list(self._met.items()):
            if self._slack is not None and self._finished[peer] > iteration + self._slack:
                self._met[peer] = ALIGNED_STEPS
            elif left > 1:
                self._met[peer] = left - 1
            else:
                del self._met[peer]

    def next_iteration(self, usual: int) -> int:
        """Return `usual`, or the iteration after that of a returned peer that is ahead. The peer
        counts as ahead if it has finished `usual` plus the slack."""
        if self._slack is None:
            return usual
        ahead = [
            at
            for at in (self._finished[peer] for peer in self._met)
            if usual + self._slack <= at <= usual + MAX_FOLLOWED_LEAD
        ]
        return max(ahead) + 1 if ahead else usual
