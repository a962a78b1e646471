"""Standing still while fewer than `minSites` sites are joined: one way for trainer and simulator.

Called by `hearing`, with every event of the exchange, and by `loop` and `simulation.worker`, before
each local step. Whether the sites are enough is `policies.quorum`'s to say. A worker holds still at
once, so that nothing is trained that is thrown away later; people are told of it only where it has
lasted as long as a silence on a link may, so that a link that breaks for a moment is no news.

Back with enough sites it goes on from where it is if nobody of them has trained meanwhile. If some
have, it is behind, and comes in anew, as after a restart (`entrance`): the driver's business.

While it holds still its policy hears nothing of peers that come: they may train already, and are
neither to get weights from here nor to count on this worker. Where it goes on the policy hears it
all then, in order; where it comes in anew nobody does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.reasons import EventReason
from dlion_worker.exchange.deadline import HEARTBEAT_S, SPAN_FLOOR
from dlion_worker.policies.interface import (
    Event,
    MemberJoined,
    MemberLeft,
    MessageArrived,
    MessageKind,
    Refuse,
)
from dlion_worker.policies.quorum import Quorum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlion_api.names import Rank
    from dlion_api.spec import Job
    from dlion_worker.policies.interface import Instruction
    from dlion_worker.trainer.reporting import Reporter
    from dlion_worker.trainer.stopping import JobProgress

PATIENCE_S = SPAN_FLOOR * HEARTBEAT_S
"""For so long it may be a link that broke for a moment."""


class Standstill:
    """Whether one worker holds still. With `minSites: 1` it never does, and tells peers nothing."""

    def __init__(
        self,
        job: Job,
        reporter: Reporter,
        progress: JobProgress,
        *,
        carry_out: Callable[[Iterable[Instruction]], None],
        due: Callable[[float], object] = lambda _after_s: None,
    ) -> None:
        """`carry_out`: sends and refuses. `due(after_s)`: `look` is to be called then, where
        nothing else calls it."""
        self._job, self._reporter, self._progress = job, reporter, progress
        self._least_sites = job.spec.min_sites
        self._carry_out, self._due = carry_out, due
        self._quorum = self._new_quorum()
        self._kept: list[Event] = []
        """What the policy is to hear if this worker goes on."""
        self._newcomers: set[Rank] = set()
        """Peers that have come since it holds still."""
        self._released: list[Event] = []
        self._lost_s: float | None = None
        """Since when this worker has made no step for want of a quorum."""
        self._is_told = False
        self.is_behind = False
        """Whether there is a quorum again, of whom some have trained meanwhile."""

    def _new_quorum(self, version: int = 0) -> Quorum:
        return Quorum(
            self._reporter.rank,
            self._reporter.incarnation,
            least_sites=self._least_sites,
            site_of=lambda rank: self._job.worker(rank).site,
            version=version,
        )

    @property
    def holds(self) -> bool:
        """Whether this worker has stopped for want of a quorum and has not gone on since."""
        return self._quorum.is_still

    def begin_anew(self) -> None:
        """It comes in anew: what it knew of its peers' links they tell again."""
        self._quorum = self._new_quorum(self._quorum.version)
        self._kept, self._newcomers, self._released = [], set(), []
        self.is_behind = False

    # ---- what has happened ---------------------------------------------------------------------

    def take(self, event: Event) -> bool:
        """Hears of one event; whether it is for nobody else, or not now. `look` is to follow each
        batch of them, and `released` each one."""
        is_reach = isinstance(event, MessageArrived) and event.message.kind is MessageKind.REACH
        if self._least_sites == 1:
            if isinstance(event, MessageArrived) and is_reach:
                self._carry_out([Refuse(event.sender, "REACH, where minSites is 1")])
            return is_reach
        self._carry_out(self._quorum.handle(event))
        is_kept = self._quorum.is_still and self._keep(event)
        if self._quorum.is_still:
            self._decide()
        return is_reach or is_kept

    def _keep(self, event: Event) -> bool:
        """Whether the policy is not to hear it now."""
        match event:
            case MemberJoined(rank=rank):
                self._newcomers.add(rank)
            case MemberLeft(rank=rank) if rank in self._newcomers:
                self._newcomers.discard(rank)
                self._kept = [one for one in self._kept if _peer_of(one) != rank]
                return True
            case MessageArrived(message=message) if message.kind is MessageKind.REACH:
                return False
            case MessageArrived(sender=sender, message=message):
                if sender not in self._newcomers and message.kind is not MessageKind.MEET:
                    return False
            case _:
                return False
        self._kept.append(event)
        return True

    def released(self) -> list[Event]:
        """What the policy is to hear now, in order, before anything that comes later."""
        released, self._released = self._released, []
        return released

    # ---- what follows --------------------------------------------------------------------------

    def look(self) -> None:
        """Finds out whether there is a quorum, and tells peers and people what is new."""
        if self._least_sites == 1:
            return
        if not self._quorum.is_met():
            self._lost()
        elif self._lost_s is not None and not self._quorum.is_still:
            self._back()
        self._carry_out(self._quorum.news())

    def may_step(self) -> bool:
        """Whether the next local step may begin, as far as the quorum is concerned."""
        self.look()
        return not self._quorum.is_still

    def _decide(self) -> None:
        """Goes on as soon as it may: of all that holds still somebody has to be the first.

        What it knows it hands on before: so whoever hears that it has gone on knew as much, and
        has gone on as well.
        """
        if self.is_behind or not self._quorum.is_met():
            return
        self._carry_out(self._quorum.news())
        if self._quorum.others_went_on():
            self.is_behind = True
            return
        self._quorum.is_still = False
        self._released += self._kept
        self._kept, self._newcomers = [], set()
        self._carry_out(self._quorum.news())

    def _lost(self) -> None:
        now_s = self._reporter.now_s()
        self._quorum.is_still = True
        if self._lost_s is None:
            self._lost_s = now_s
            self._due(PATIENCE_S)
        if not self._is_told and round(now_s - self._lost_s, 6) >= PATIENCE_S:
            self._is_told = True
            self._say(EventReason.QUORUM_LOST, "this worker holds still", warning=True)

    def _back(self) -> None:
        self._lost_s = None
        if self._is_told:
            self._is_told = False
            self._say(EventReason.QUORUM_BACK, "this worker trains on")

    def _say(self, reason: EventReason, what: str, *, warning: bool = False) -> None:
        sites = sorted(self._quorum.sites())
        words = (
            f"{len(sites)} of at least {self._least_sites} sites (minSites) are joined with this "
            f"side ({', '.join(sites)}): {what}"
        )
        self._reporter.event(reason, words, iteration=self._progress.iteration, warning=warning)


def _peer_of(event: Event) -> Rank | None:
    match event:
        case MemberJoined(rank=rank) | MessageArrived(sender=rank):
            return rank
    return None
