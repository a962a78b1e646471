"""Who takes part in a run, as the coordinator streams it to its workers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dlion_api.names import JobKey, Rank, WorkerIdentity


class MemberState(StrEnum):
    """What the coordinator knows of a member."""

    READY = "Ready"  # has joined, its links may be dialled
    LOST = "Lost"  # its stream broke; it may come back as a new incarnation
    FINISHED = "Finished"  # it ended its run in order


@dataclass(frozen=True)
class Member:
    """One worker of the run, in its latest incarnation (every start is a new one)."""

    identity: WorkerIdentity
    incarnation: int
    state: MemberState
    exchange_address: str
    measuring_address: str = ""


@dataclass(frozen=True)
class Membership:
    """One version of the membership; a higher version replaces a lower one whole."""

    version: int
    job: JobKey
    expected_count: int
    members: tuple[Member, ...] = ()

    def member(self, rank: Rank) -> Member | None:
        """The member of that rank, if it has ever joined."""
        return next((m for m in self.members if m.identity.rank == rank), None)

    def ready(self) -> tuple[Member, ...]:
        """Members whose links may be dialled."""
        return tuple(m for m in self.members if m.state is MemberState.READY)
