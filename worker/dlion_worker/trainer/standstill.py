"""Standing still while fewer than `minSites` sites are joined: one way for trainer and simulator.

Called by `loop` and `simulation.worker`: every event of the exchange goes through `take`, `look`
follows each batch of them, and `may_step` says whether the next local step may begin. Whether the
sites are enough is `policies.quorum`'s to say. A worker holds still at once, so that nothing is
trained that is thrown away later, and goes on at once; people are told of it only where it has
lasted as long as a silence on a link may, so that a link that breaks for a moment is no news.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.reasons import EventReason
from dlion_worker.exchange.deadline import HEARTBEAT_S, SPAN_FLOOR
from dlion_worker.policies.interface import (
    Event,
    MessageArrived,
    MessageKind,
    QuorumBack,
    QuorumLost,
    Refuse,
)
from dlion_worker.policies.quorum import Quorum

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlion_api.spec import Job
    from dlion_worker.trainer.instructions import Instructions
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
        instructions: Instructions,
        *,
        due: Callable[[float], object] = lambda _after_s: None,
    ) -> None:
        """`due(after_s)`: `look` is to be called then, where nothing else calls it."""
        self._least_sites = job.spec.min_sites
        self._reporter, self._progress = reporter, progress
        self._instructions, self._due = instructions, due
        self._quorum = Quorum(
            reporter.rank,
            reporter.incarnation,
            least_sites=self._least_sites,
            site_of=lambda rank: job.worker(rank).site,
        )
        self._lost_s: float | None = None
        """Since when there is no quorum."""
        self._is_told = False
        self._back: QuorumBack | None = None
        """What the policy was told last since then."""

    @property
    def holds(self) -> bool:
        """Whether this worker has stopped for want of a quorum and has not gone on since."""
        return self._quorum.is_still

    def take(self, event: Event) -> bool:
        """Hears of one event; whether it is for nobody else."""
        if self._least_sites > 1:
            self._instructions.carry_out(self._quorum.handle(event))
        if not (isinstance(event, MessageArrived) and event.message.kind is MessageKind.REACH):
            return False
        if self._least_sites == 1:
            self._instructions.carry_out([Refuse(event.sender, "REACH, where minSites is 1")])
        return True

    def look(self) -> bool:
        """Tells peers and policy what is new; whether there is a quorum."""
        if self._least_sites == 1:
            return True
        is_met = self._quorum.is_met()
        if not is_met:
            self._lost()
        elif self._quorum.is_still:
            self._is_back()
        self._instructions.carry_out(self._quorum.news())
        return is_met

    def may_step(self) -> bool:
        """Whether the next local step may begin, as far as the quorum is concerned. Call it last:
        the policy may wait for peers that it had not waited for before."""
        if not self.look():
            return False
        if self._quorum.is_still:
            if self._instructions.waiting_for():
                return False
            self._go_on()
        return True

    def _lost(self) -> None:
        now_s = self._reporter.now_s()
        if not self._quorum.is_still or self._back is not None:
            self._quorum.is_still, self._back = True, None
            self._instructions.handle(QuorumLost())
        if self._lost_s is None:
            self._lost_s = now_s
            self._due(PATIENCE_S)
        if not self._is_told and round(now_s - self._lost_s, 6) >= PATIENCE_S:
            self._is_told = True
            self._say(EventReason.QUORUM_LOST, "this worker holds still", warning=True)

    def _is_back(self) -> None:
        """Again where it turns out that others went on, or that they held still as well."""
        back = QuorumBack(self._quorum.others_went_on())
        if back != self._back:
            self._back = back
            self._instructions.handle(back)

    def _go_on(self) -> None:
        self._quorum.is_still, self._back, self._lost_s = False, None, None
        self._instructions.carry_out(self._quorum.news())
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
