"""Which peers a worker waits for before its next local step.

Called by `peer_machine`. One rule covers all four
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

from dataclasses import dataclass

from dlion_api.names import Rank
from dlion_api.spec.policies import Synchronization


@dataclass(frozen=True)
class SyncRule:
    """Parameters of a mode. `slack` None: no peer ever lags."""

    slack: int | None
    spare: int = 0
    barrier: bool = False
    """Whether an update waits for the peers, or is made when the local step ends."""

    @property
    def max_lead(self) -> int | None:
        """The most iterations by which a peer in step can be ahead of this worker, as it waits for
        it; None: any number."""
        return None if self.slack is None or self.spare else self.slack + 1


def sync_rule(settings: Synchronization) -> SyncRule:
    """Return the rule of the manifest's `synchronization`."""
    return {
        "synchronous": SyncRule(slack=0, barrier=True),
        "backup": SyncRule(slack=0, spare=settings.backup_workers, barrier=True),
        "bounded": SyncRule(slack=settings.max_staleness),
        "asynchronous": SyncRule(slack=None),
    }[settings.mode]


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
        self.stepped = False
        """Whether a local step was done since this worker started."""
        self._is_held = False
        """Whether the next local step waits for peers."""
        self._peers: dict[Rank, _SyncPeer] = {}
        """Peers in rank order."""
        self._lagging: frozenset[Rank] = frozenset()
        """Updated peer by peer: with hundreds of peers, each of their messages reads it."""

    @property
    def active(self) -> list[Rank]:
        """Members except this worker, in rank order."""
        return list(self._peers)

    def finished(self, rank: Rank) -> int:
        """Return the last iteration that the member is known to have finished."""
        return self._peers[rank].finished

    def in_step(self) -> list[Rank]:
        """Return the members that are waited for, in rank order."""
        return [rank for rank, peer in self._peers.items() if peer.in_step]

    def waiting_for(self) -> frozenset[Rank]:
        """Return the lagging peers if they block this worker."""
        return self._lagging if self._is_held else frozenset()

    def next_iteration(self) -> int:
        """Return the iteration after the last, or the current one of all members in step if they
        continued without this worker."""
        finished = [peer.finished for peer in self._peers.values() if peer.in_step]
        if self.rule.slack is not None and finished:
            slowest = min(finished)
            if slowest > self.own + self.rule.slack + 1:
                return slowest + 1
        return self.own + 1

    def step_done(self, iteration: int) -> None:
        """Record a local step. Raises ValueError if the worker was held, or the iteration does not
        increase (a bug of the driver)."""
        if self._is_held or iteration <= self.own:
            raise ValueError(
                f"local step {iteration} done after step {self.own}; allowed: a later step, once"
                f" waiting_for() is empty (now {sorted(self.waiting_for())})"
            )
        self.own, self.stepped, self._is_held = iteration, True, True
        self._update_lagging()

    def heard(self, rank: Rank, iteration: int) -> None:
        peer = self._peers.get(rank)
        if peer is None:
            return
        peer.finished = max(peer.finished, iteration)
        slack = self.rule.slack
        peer.in_step |= slack is None or peer.finished >= self.own - slack - 1
        if self._lags(peer) != (rank in self._lagging):
            self._lagging ^= {rank}
        self._release_if_enough_keep_up()

    def joined(self, rank: Rank, iteration: int) -> None:
        self._peers[rank] = _SyncPeer(finished=iteration, in_step=not self.stepped)
        self._peers = dict(sorted(self._peers.items()))
        self._update_lagging()

    def left(self, rank: Rank) -> None:
        self._peers.pop(rank, None)
        self._update_lagging()

    def _update_lagging(self) -> None:
        self._lagging = frozenset(rank for rank, peer in self._peers.items() if self._lags(peer))
        self._release_if_enough_keep_up()

    def _release_if_enough_keep_up(self) -> None:
        """A released worker stays released when peers join or leave before its next step."""
        self._is_held = self._is_held and len(self._lagging) > self.rule.spare

    def _lags(self, peer: _SyncPeer) -> bool:
        slack = self.rule.slack
        return slack is not None and peer.in_step and peer.finished < self.own - slack
