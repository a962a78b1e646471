"""Whom a worker waits for before its next local step.

Called by `machine`, `delayed` and `peer_machine`. One rule covers all four modes: a peer *lags*
when the last iteration it has finished is below own - slack, and the worker is held while more than
`spare` peers lag.

| mode | slack | spare | update |
|---|---|---|---|
| synchronous | 0 | 0 | once, when all contributions of the iteration are in |
| backup | 0 | backupWorkers | once, when all but the spare ones are in |
| bounded | maxStaleness | 0 | at the end of the local step, with what has arrived |
| asynchronous | none | 0 | at the end of the local step, with what has arrived |

A peer that comes after this worker's first step is not waited for until it has been heard within
one iteration of the bound: a restarted worker compiles and catches up without holding anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_api.names import Rank


@dataclass(frozen=True)
class Rule:
    """A mode's knobs. `slack` None: nobody lags, however far behind."""

    slack: int | None
    spare: int
    barrier: bool
    """Whether an iteration's update waits for the peers, or is made as the local step ends."""


def rule(mode: str, *, max_staleness: int, backup_workers: int) -> Rule:
    """The rule of a mode of the manifest's `synchronization`.

    Raises:
        ValueError: no such mode.
    """
    match mode:
        case "synchronous":
            return Rule(slack=0, spare=0, barrier=True)
        case "backup":
            return Rule(slack=0, spare=backup_workers, barrier=True)
        case "bounded":
            return Rule(slack=max_staleness, spare=0, barrier=False)
        case "asynchronous":
            return Rule(slack=None, spare=0, barrier=False)
    msg = f"synchronization.mode {mode!r}; allowed: synchronous, bounded, backup, asynchronous"
    raise ValueError(msg)


class Phase(StrEnum):
    """Where a worker stands between two local steps."""

    STEPPING = "Stepping"  # the next local step may begin, or is under way
    HELD = "Held"  # the last local step is done, and peers must be heard first


class Signal(StrEnum):
    """What may move a worker from one phase to another."""

    STEP_DONE = "StepDone"
    HEARD = "Heard"
    JOINED = "Joined"
    LEFT = "Left"


TRANSITIONS: Final[Mapping[tuple[Phase, Signal], tuple[Phase, Phase]]] = {
    # from, signal: to (where enough peers are up with us), to (where too many lag)
    (Phase.STEPPING, Signal.STEP_DONE): (Phase.STEPPING, Phase.HELD),
    (Phase.STEPPING, Signal.HEARD): (Phase.STEPPING, Phase.STEPPING),
    (Phase.STEPPING, Signal.JOINED): (Phase.STEPPING, Phase.STEPPING),
    (Phase.STEPPING, Signal.LEFT): (Phase.STEPPING, Phase.STEPPING),
    (Phase.HELD, Signal.HEARD): (Phase.STEPPING, Phase.HELD),
    (Phase.HELD, Signal.JOINED): (Phase.STEPPING, Phase.HELD),
    (Phase.HELD, Signal.LEFT): (Phase.STEPPING, Phase.HELD),
}
"""A step that was begun stays allowed whoever comes or goes; a step may not end while held."""


@dataclass
class _Peer:
    finished: int
    in_step: bool


class Synchronizer:
    """Who has finished what, and whether that lets this worker go on."""

    def __init__(self, rule: Rule, *, iteration: int = 0) -> None:
        self.rule = rule
        self.own = iteration
        """The last local step done."""
        self.phase = Phase.STEPPING
        self._stepped = False
        self._peers: dict[Rank, _Peer] = {}

    @property
    def active(self) -> list[Rank]:
        """Members but this worker, in rank order."""
        return sorted(self._peers)

    @property
    def stepped(self) -> bool:
        """Whether a local step has been done since this worker started."""
        return self._stepped

    def finished(self, rank: Rank) -> int:
        """The last iteration which that member is known to have finished."""
        return self._peers[rank].finished

    def in_step(self) -> list[Rank]:
        """Members that are counted on, in rank order."""
        return [rank for rank in self.active if self._peers[rank].in_step]

    def waiting_for(self) -> frozenset[Rank]:
        """The peers that lag, if they hold this worker."""
        return self._lagging() if self.phase is Phase.HELD else frozenset()

    def next_iteration(self) -> int:
        """One more than the last; but where all who are in step went on without this worker, the
        iteration that they are at, so that it is level with them at once."""
        finished = [peer.finished for peer in self._peers.values() if peer.in_step]
        if self.rule.slack is not None and finished:
            slowest = min(finished)
            if slowest > self.own + self.rule.slack + 1:
                return slowest + 1
        return self.own + 1

    def step_done(self, iteration: int) -> bool:
        """This worker's local step; whether it may go on at once.

        Raises:
            ValueError: it was held, or the iteration does not rise. The driver is wrong.
        """
        if self.phase is Phase.HELD or iteration <= self.own:
            msg = (
                f"local step {iteration} done in phase {self.phase} after step {self.own}; allowed:"
                f" a later step, once waiting_for() is empty (now {sorted(self._lagging())})"
            )
            raise ValueError(msg)
        self.own, self._stepped = iteration, True
        return self._signal(Signal.STEP_DONE)

    def heard(self, rank: Rank, iteration: int) -> bool:
        """A member has finished that iteration; whether this releases the worker."""
        peer = self._peers.get(rank)
        if peer is None:
            return False
        peer.finished = max(peer.finished, iteration)
        slack = self.rule.slack
        peer.in_step |= slack is None or peer.finished >= self.own - slack - 1
        return self._signal(Signal.HEARD)

    def joined(self, rank: Rank, iteration: int) -> bool:
        """A member is there, anew; whether this releases the worker."""
        self._peers[rank] = _Peer(finished=iteration, in_step=not self._stepped)
        return self._signal(Signal.JOINED)

    def left(self, rank: Rank) -> bool:
        """A member is gone; whether this releases the worker."""
        self._peers.pop(rank, None)
        return self._signal(Signal.LEFT)

    def _signal(self, signal: Signal) -> bool:
        was = self.phase
        together, lagging = TRANSITIONS[was, signal]
        self.phase = lagging if len(self._lagging()) > self.rule.spare else together
        moved_on = signal is Signal.STEP_DONE or was is Phase.HELD
        return moved_on and self.phase is Phase.STEPPING

    def _lagging(self) -> frozenset[Rank]:
        slack = self.rule.slack
        if slack is None:
            return frozenset()
        return frozenset(
            rank
            for rank, peer in self._peers.items()
            if peer.in_step and peer.finished < self.own - slack
        )
