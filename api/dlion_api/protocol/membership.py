"""The members of a run, as the coordinator streams them to workers."""

from dataclasses import dataclass
from enum import StrEnum

from dlion_api.names import JobKey, Rank, WorkerIdentity


class MemberState(StrEnum):
    """State of a member at the coordinator."""

    READY = "Ready"  # joined; peers may connect to it
    LOST = "Lost"  # its stream broke; it may return as a new incarnation
    FINISHED = "Finished"  # it ended its run cleanly


@dataclass(frozen=True)
class Member:
    """One worker of the run, in its latest incarnation; each start is a new one."""

    identity: WorkerIdentity
    incarnation: int
    state: MemberState
    exchange_address: str
    measuring_address: str = ""
    revoked: bool = False
    """Whether no peer may connect to it. It then counts as `FINISHED`: no peer waits for it."""


@dataclass(frozen=True)
class Membership:
    """One version of the membership; a higher version replaces a lower one whole."""

    version: int
    job: JobKey
    expected_count: int
    members: tuple[Member, ...] = ()

    def member(self, rank: Rank) -> Member | None:
        """Return the member of that rank, if it has ever joined."""
        return next((m for m in self.members if m.identity.rank == rank), None)

    def ready(self) -> tuple[Member, ...]:
        """Return the members that peers may connect to."""
        return tuple(m for m in self.members if m.state is MemberState.READY)

    def is_revoked(self, rank: Rank) -> bool:
        """Whether no start of that worker may take part."""
        member = self.member(rank)
        return member is not None and member.revoked
