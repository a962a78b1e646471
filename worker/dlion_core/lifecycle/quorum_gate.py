"""Pauses training while fewer than `minSites` sites are connected; for trainer and simulator.

`event_dispatcher` passes every exchange event; `loop` and `worker` ask before each local step.
`policies.partitions.quorum` decides whether there is a quorum. When it returns, training continues,
unless some of its workers trained meanwhile: then this worker rejoins, as after a restart
(`admission`).
"""

from collections.abc import Callable

from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.links.deadline import HEARTBEAT_S, MIN_MISSED_HEARTBEATS
from dlion_core.policies.interface import (
    Event,
    MemberJoined,
    MemberLeft,
    MessageArrived,
    MessageKind,
    RejectMessage,
)
from dlion_core.policies.partitions.quorum import SiteQuorum

REPORT_AFTER_S = MIN_MISSED_HEARTBEATS * HEARTBEAT_S
"""A shorter loss of quorum is not reported: it may be a brief link failure."""


class QuorumGate:
    """Whether one worker is paused. With `minSites: 1` it never is, and sends peers nothing."""

    def __init__(
        self,
        instructions: InstructionExecutor,
        *,
        due: Callable[[float], object] = lambda _after_s: None,
    ) -> None:
        """`due(after_s)` schedules a call of `update`, where nothing else calls it."""
        self._job, self._reporter = instructions.parts.job, instructions.parts.reporter
        self._progress, self._carry_out = instructions.progress, instructions.carry_out
        self._min_sites, self._due = self._job.spec.min_sites, due
        self._quorum = self._new_quorum()
        self._withheld: list[Event] = []
        """Events withheld from the policy until training continues."""
        self._newcomers: set[Rank] = set()
        """Peers that linked while the gate was closed."""
        self._released: list[Event] = []
        self._lost_s: float | None = None
        """Time of the loss of the quorum."""
        self._is_reported = False
        self.is_behind = False
        """Whether the quorum is back and some of it have trained meanwhile."""

    def _new_quorum(self, version: int = 0) -> SiteQuorum:
        return SiteQuorum(
            self._reporter.rank,
            self._reporter.incarnation,
            min_sites=self._min_sites,
            site_of=lambda rank: self._job.worker(rank).site,
            version=version,
        )

    @property
    def is_closed(self) -> bool:
        """Whether training is paused for lack of a quorum."""
        return self._quorum.is_halted

    def reset(self) -> None:
        """Forget peers' links before rejoining; they report them again."""
        self._quorum = self._new_quorum(self._quorum.version)
        self._withheld, self._newcomers, self._released = [], set(), []
        self.is_behind = False

    # ---- events --------------------------------------------------------------------------------

    def take(self, event: Event) -> bool:
        """Process one event. Return whether the policy must not receive it now. Call `released`
        after each event and `update` after each batch."""
        is_reach = isinstance(event, MessageArrived) and event.message.kind is MessageKind.REACH
        if self._min_sites == 1:
            if isinstance(event, MessageArrived) and is_reach:
                self._carry_out([RejectMessage(event.sender, "REACH, where minSites is 1")])
            return is_reach
        self._carry_out(self._quorum.handle(event))
        is_withheld = self._quorum.is_halted and self._withhold(event)
        if self._quorum.is_halted:
            self._decide()
        return is_reach or is_withheld

    def _withhold(self, event: Event) -> bool:
        """Withhold the event if the policy must not receive it now; return whether.

        New peers may train already: they must neither get weights from this worker nor count on it.
        Rejoining drops their events.
        """
        match event:
            case MemberJoined(rank=rank):
                self._newcomers.add(rank)
            case MemberLeft(rank=rank) if rank in self._newcomers:
                self._newcomers.discard(rank)
                self._withheld = [event for event in self._withheld if _peer_of(event) != rank]
                return True
            case MessageArrived(message=message) if message.kind is MessageKind.REACH:
                return False
            case MessageArrived(sender=sender, message=message):
                if sender not in self._newcomers and message.kind is not MessageKind.MEET:
                    return False
            case _:
                return False
        self._withheld.append(event)
        return True

    def released(self) -> list[Event]:
        """Return the events for the policy to process now, before any later one."""
        released, self._released = self._released, []
        return released

    # ---- decisions -----------------------------------------------------------------------------

    def update(self) -> None:
        """Check for a quorum, and report changes to peers and as events."""
        if self._min_sites == 1:
            return
        if not self._quorum.is_met():
            self._lost()
        elif self._lost_s is not None and not self._quorum.is_halted:
            self._back()
        self._carry_out(self._quorum.pending_messages())

    def may_step(self) -> bool:
        """Whether the quorum allows the next local step."""
        self.update()
        return not self._quorum.is_halted

    def _decide(self) -> None:
        """Continue as soon as possible: one of the paused workers has to be the first.

        It first sends what it knows. A peer that learns that this worker continued then has the
        same information, and continues, too.
        """
        if self.is_behind or not self._quorum.is_met():
            return
        self._carry_out(self._quorum.pending_messages())
        if self._quorum.others_kept_training():
            self.is_behind = True
            return
        self._quorum.is_halted = False
        self._released += self._withheld
        self._withheld, self._newcomers = [], set()
        self._carry_out(self._quorum.pending_messages())

    def _lost(self) -> None:
        now_s = self._reporter.now_s()
        self._quorum.is_halted = True  # at once, so that no work is discarded later
        if self._lost_s is None:
            self._lost_s = now_s
            self._due(REPORT_AFTER_S)
        if not self._is_reported and round(now_s - self._lost_s, 6) >= REPORT_AFTER_S:
            self._is_reported = True
            self._report(EventReason.QUORUM_LOST, "this worker pauses training", warning=True)

    def _back(self) -> None:
        self._lost_s = None
        if self._is_reported:
            self._is_reported = False
            self._report(EventReason.QUORUM_BACK, "this worker continues training")

    def _report(self, reason: EventReason, consequence: str, *, warning: bool = False) -> None:
        sites = sorted(self._quorum.sites())
        message = (
            f"{len(sites)} of at least {self._min_sites} sites (minSites) are joined with this "
            f"side ({', '.join(sites)}): {consequence}"
        )
        self._reporter.event(reason, message, iteration=self._progress.iteration, warning=warning)


def _peer_of(event: Event) -> Rank | None:
    match event:
        case MemberJoined(rank=rank) | MessageArrived(sender=rank):
            return rank
    return None
