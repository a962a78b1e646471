"""Which workers share the batch. Pure.

Owns the membership that the trainer reported last, and the peers' reports of steps. Called by
`ResourceController`.
"""

from collections.abc import Collection

from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.spec import Job


class ActiveWorkers:
    """The workers of a run, as one sidecar knows them."""

    def __init__(self, job: Job, rank: Rank) -> None:
        self._rank = rank
        self._all_ranks = frozenset(worker.rank for worker in job.workers())
        self.membership: Membership | None = None
        self.peers: tuple[Member, ...] = ()
        """The other present workers."""
        self.has_begun = False
        """Whether this worker or a peer is known to have made a step of this run."""
        self._stepped: dict[Rank, int] = {}
        """The newest incarnation of each peer that reported a step before the run was known to have
        begun."""

    def set_membership(
        self, membership: Membership, linked_lost: Collection[Rank] = frozenset()
    ) -> None:
        """Take the membership. A peer's report may have come before it.

        A worker in `linked_lost` has lost its coordinator only. It trains on, with a share of the
        batch, so the others must count it: else all shares would exceed the global batch. They do
        while a peer's link to it is cut, too: that peer does not know whether the worker lives.
        """
        self.membership = membership
        self.peers = tuple(
            member
            for member in membership.members
            if member.identity.rank != self._rank
            and (
                member.state is MemberState.READY
                or (member.state is MemberState.LOST and member.identity.rank in linked_lost)
            )
        )
        self.has_begun |= any(map(self._has_stepped, self.peers))

    def report_iteration(self, rank: Rank, incarnation: int, iteration: int) -> bool:
        """Take a peer's iteration; return whether the run is known to have begun only now.

        A suspended run that resumes has the ranks of before. A late report of an earlier
        incarnation, or of a peer that is not ready, does not count.
        """
        if self.has_begun or iteration == 0:
            return False
        self._stepped[rank] = max(incarnation, self._stepped.get(rank, 0))
        self.has_begun = any(m.identity.rank == rank and self._has_stepped(m) for m in self.peers)
        return self.has_begun

    def _has_stepped(self, peer: Member) -> bool:
        # The membership may be the older of the two: the peer has restarted since.
        is_current = self._stepped.get(peer.identity.rank, -1) >= peer.incarnation
        return is_current and peer.state is MemberState.READY

    def ranks(self) -> list[Rank]:
        """The workers that share the batch: before the first step all that may still join, later
        those present. When a suspended run resumes, all are lost until they join, in any order."""
        if self.membership is None:
            return []
        if self.has_begun:
            return [self._rank, *(member.identity.rank for member in self.peers)]
        states = {member.identity.rank: member.state for member in self.membership.members}
        ended = {rank for rank, state in states.items() if state is MemberState.FINISHED}
        return sorted((self._all_ranks | states.keys()) - ended | {self._rank})

    def incarnation(self) -> int:
        """This worker's incarnation in the membership; 0 before it joined."""
        own = None if self.membership is None else self.membership.member(self._rank)
        return 0 if own is None else own.incarnation

    def is_revoked(self, rank: Rank) -> bool:
        return self.membership is not None and self.membership.is_revoked(rank)
