"""Which peers a worker waits for before its next local step.

Called by `gradient_exchange`, `delayed_gradients` and `peer_machine`. One rule covers all four
modes: a peer *lags* if its last finished iteration is below own - slack. The worker waits while
more than `spare` peers lag.

| mode | slack | spare | update |
|---|---|---|---|
| synchronous | 0 | 0 | once, when all contributions of the iteration have arrived |
| backup | 0 | backupWorkers | once, when all but the spare ones have arrived |
| bounded | maxStaleness | 0 | at the end of the local step, with what has arrived |
| asynchronous | none | 0 | at the end of the local step, with what has arrived |

A peer that joins after this worker's first step is not waited for until it reports an iteration
within one of the bound. So a restarted worker can compile and catch up without blocking others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_api.names import Rank


@dataclass(frozen=True)
class SyncRule:
    """Parameters of a mode. `slack` None: no peer ever lags."""

    slack: int | None
    spare: int
    barrier: bool
    """Whether an update waits for the peers, or is made when the local step ends."""


def sync_rule(mode: str, *, max_staleness: int, backup_workers: int) -> SyncRule:
    """Return the rule of a mode of the manifest's `synchronization`.

    Raises:
        ValueError: unknown mode.
    """
    match mode:
        case "synchronous":
            return SyncRule(slack=0, spare=0, barrier=True)
        case "backup":
            return SyncRule(slack=0, spare=backup_workers, barrier=True)
        case "bounded":
            return SyncRule(slack=max_staleness, spare=0, barrier=False)
        case "asynchronous":
            return SyncRule(slack=None, spare=0, barrier=False)
    msg = f"synchronization.mode {mode!r}; allowed: synchronous, bounded, backup, asynchronous"
    raise ValueError(msg)


class SyncPhase(StrEnum):
    """Phase of a worker between two local steps."""

    STEPPING = "Stepping"  # the next local step may start or is running
    HELD = "Held"  # the last local step is done; waiting for peers


class SyncSignal(StrEnum):
    """Event that may change the phase."""

    STEP_DONE = "StepDone"
    HEARD = "Heard"
    JOINED = "Joined"
    LEFT = "Left"


TRANSITIONS: Final[Mapping[tuple[SyncPhase, SyncSignal], tuple[SyncPhase, SyncPhase]]] = {
    # from, signal: to (if enough peers keep up), to (if too many lag)
    (SyncPhase.STEPPING, SyncSignal.STEP_DONE): (SyncPhase.STEPPING, SyncPhase.HELD),
    (SyncPhase.STEPPING, SyncSignal.HEARD): (SyncPhase.STEPPING, SyncPhase.STEPPING),
    (SyncPhase.STEPPING, SyncSignal.JOINED): (SyncPhase.STEPPING, SyncPhase.STEPPING),
    (SyncPhase.STEPPING, SyncSignal.LEFT): (SyncPhase.STEPPING, SyncPhase.STEPPING),
    (SyncPhase.HELD, SyncSignal.HEARD): (SyncPhase.STEPPING, SyncPhase.HELD),
    (SyncPhase.HELD, SyncSignal.JOINED): (SyncPhase.STEPPING, SyncPhase.HELD),
    (SyncPhase.HELD, SyncSignal.LEFT): (SyncPhase.STEPPING, SyncPhase.HELD),
}
"""A started step stays allowed when peers join or leave. A step must not end while held."""


@dataclass
class _SyncPeer:
    finished: int
    in_step: bool


class Synchronizer:
    """Tracks finished iterations and decides whether this worker may continue."""

    def __init__(self, sync_rule: SyncRule, *, iteration: int = 0) -> None:
        self.rule = sync_rule
        self.own = iteration
        """The last local step done."""
        self.phase = SyncPhase.STEPPING
        self._stepped = False
        self._peers: dict[Rank, _SyncPeer] = {}

    @property
    def active(self) -> list[Rank]:
        """Members except this worker, in rank order."""
        return sorted(self._peers)

    @property
    def stepped(self) -> bool:
        """Whether a local step was done since this worker started."""
        return self._stepped

    def finished(self, rank: Rank) -> int:
        """Return the last iteration that the member is known to have finished."""
        return self._peers[rank].finished

    def in_step(self) -> list[Rank]:
        """Return the members that are waited for, in rank order."""
        return [rank for rank in self.active if self._peers[rank].in_step]

    def waiting_for(self) -> frozenset[Rank]:
        """Return the lagging peers if they block this worker."""
        return self._lagging() if self.phase is SyncPhase.HELD else frozenset()

    def next_iteration(self) -> int:
        """Return the next iteration.

        It is one more than the last. If all members in step continued without this worker, it is
        their current iteration, so this worker catches up at once.
        """
        finished = [peer.finished for peer in self._peers.values() if peer.in_step]
        if self.rule.slack is not None and finished:
            slowest = min(finished)
            if slowest > self.own + self.rule.slack + 1:
                return slowest + 1
        return self.own + 1

    def step_done(self, iteration: int) -> bool:
        """Record a local step; return whether the worker may continue at once.

        Raises:
            ValueError: the worker was held, or the iteration does not increase (a bug of the
                driver).
        """
        if self.phase is SyncPhase.HELD or iteration <= self.own:
            msg = (
                f"local step {iteration} done in phase {self.phase} after step {self.own}; allowed:"
                f" a later step, once waiting_for() is empty (now {sorted(self._lagging())})"
            )
            raise ValueError(msg)
        self.own, self._stepped = iteration, True
        return self._signal(SyncSignal.STEP_DONE)

    def heard(self, rank: Rank, iteration: int) -> bool:
        """Record that a member finished an iteration; return whether this releases the worker."""
        peer = self._peers.get(rank)
        if peer is None:
            return False
        peer.finished = max(peer.finished, iteration)
        slack = self.rule.slack
        peer.in_step |= slack is None or peer.finished >= self.own - slack - 1
        return self._signal(SyncSignal.HEARD)

    def joined(self, rank: Rank, iteration: int) -> bool:
        """Record that a member joined or returned; return whether this releases the worker."""
        self._peers[rank] = _SyncPeer(finished=iteration, in_step=not self._stepped)
        return self._signal(SyncSignal.JOINED)

    def left(self, rank: Rank) -> bool:
        """Record that a member left; return whether this releases the worker."""
        self._peers.pop(rank, None)
        return self._signal(SyncSignal.LEFT)

    def _signal(self, signal: SyncSignal) -> bool:
        was = self.phase
        keeping_up, lagging = TRANSITIONS[was, signal]
        self.phase = lagging if len(self._lagging()) > self.rule.spare else keeping_up
        moved_on = signal is SyncSignal.STEP_DONE or was is SyncPhase.HELD
        return moved_on and self.phase is SyncPhase.STEPPING

    def _lagging(self) -> frozenset[Rank]:
        slack = self.rule.slack
        if slack is None:
            return frozenset()
        return frozenset(
            rank
            for rank, peer in self._peers.items()
            if peer.in_step and peer.finished < self.own - slack
        )
