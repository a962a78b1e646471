"""Translates what arrives from peers into events for the policies.

Before the start it collects the links that are up, keeps early messages and answers other
latecomers. After the start, links come and go as events.
"""

import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from dlion_api.endings import own_reason
from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership, MemberState
from dlion_api.protocol.refusals import PeerRefusal
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.join_barrier import JoinAnswer, JoinRole
from dlion_core.lifecycle.stop_claims import CONFIRM_WITHIN_S, StopClaim
from dlion_core.links.events import ExchangeEvent, LinkDown, LinkUp, Refused, StatePulled
from dlion_core.policies.interface import (
    STEP_KINDS,
    Event,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    TopologyChanged,
)

_MAX_REASON_BYTES = 200
_FORWARDED = re.compile(r"worker (\d{1,9}): ")


DEPARTURE_S = 1.0
"""How long a barrier still waits for a peer that announced that it ends.

Often many peers end at once. The wait is skipped where the manifest no longer has the peer.
"""

MAX_SUPERSEDED_STEPS = 16
"""Steps of a peer that count where one has arrived."""


class StopKind(IntEnum):
    """The meaning of a `STOP` message; sent as its weights version."""

    STOPPED = 0  # the run is over: every worker must finish
    SAVED = 1  # as STOPPED, and the sender has saved its site's model
    LEAVING = 2  # only the sender ends


def stop_message(reason: str, iteration: int, meaning: StopKind = StopKind.STOPPED) -> Message:
    """Build a worker's last message."""
    return Message(
        MessageKind.STOP,
        iteration,
        weights_version=meaning,
        payload=reason.encode()[:_MAX_REASON_BYTES],
    )


@dataclass(frozen=True)
class PeerSteps:
    """Own steps of a peer that have arrived here, as far as the peer reports."""

    samples: int
    last_iteration: int


@dataclass(frozen=True)
class JoinQuestion(MessageArrived):
    """A latecomer's `MEET`, and the epoch of the link that it came on."""

    epoch: int


class StopDoubt(Protocol):
    """`stop_claims.StopDoubts`."""

    def __call__(self, claim: StopClaim, *, stopped: set[Rank], linked: set[Rank]) -> str: ...


def _no_doubt(claim: StopClaim, *, stopped: set[Rank], linked: set[Rank]) -> str:  # noqa: ARG001
    return ""


class EventInbox:
    """What arrives at one worker. Any thread may call `put`, one thread everything else."""

    def __init__(
        self,
        send: Callable[[Rank, Message, int], None],
        membership: Callable[[], Membership | None] = lambda: None,
        *,
        clock_s: Callable[[], float],
    ) -> None:
        """`send(peer, message, epoch)` queues a message on a link; a link that has been reopened
        since that epoch drops it. `membership`: the latest one known."""
        self._send = send
        self._membership = membership
        self._clock_s = clock_s
        self._arrived: deque[ExchangeEvent | TopologyChanged] = deque()
        self._started = False
        self.iteration = 0
        """Before the start: the last iteration contained in this worker's weights."""
        self.early_messages: list[MessageArrived] = []
        """Messages received before the start, in order."""
        self._early_topology: list[Event] = []
        """Before the start: the latest topology change."""
        self.link_epochs: dict[Rank, int] = {}
        """Linked peers, each with the epoch of its link."""
        self.peers_ahead: dict[Rank, int] = {}
        """Peers that trained on while this worker adopted a state, with their link epochs then. It
        must catch up with them once it starts."""
        self.answers: dict[Rank, JoinAnswer] = {}
        """The latest answer of each linked peer to this latecomer."""
        self.stopped: set[Rank] = set()
        """Peers that have finished their last iteration."""
        self.served: set[Rank] = set()
        """Peers that have pulled this worker's final state."""
        self.saved: set[Rank] = set()
        """Peers that have saved their site's model."""
        self.stop_reason: str | None = None
        self.stop_iteration: int | None = None
        """The iteration of the first peer that stopped."""
        self.stop_message: Message | None = None
        """Once this worker has stopped: sent at once to every peer that links."""
        self.on_link_change: Callable[[Rank], None] = lambda _peer: None
        """Called when a peer's link has come up or gone down."""
        self.doubt: StopDoubt = _no_doubt
        """Returns why a peer's stop is not believed; empty: it is."""
        self._doubted: dict[Rank, StopClaim] = {}
        """Stops that others have not confirmed yet."""
        self._alone: set[Rank] = set()
        """Linked peers whose stop was not believed: they have ended, and the run has not."""
        self._heard_steps: Counter[Rank] = Counter()
        """Own steps of each peer, over all links: a broken link undoes none."""
        self._heard_samples: Counter[Rank] = Counter()
        self._last_steps: dict[Rank, int] = {}
        """The iteration of the last one."""
        self.refusals: list[Refused] = []
        self._leaving: set[Rank] = set()
        self._departed: dict[Rank, float] = {}
        """Departed peers that had announced it, with the time until which a barrier waits."""

    @property
    def linked(self) -> set[Rank]:
        return set(self.link_epochs)

    @property
    def members(self) -> set[Rank]:
        """Linked peers but for those that have ended, as far as this worker knows."""
        return self.linked - self._alone

    def put(self, arrival: ExchangeEvent | TopologyChanged) -> None:
        """Add one event; never blocks."""
        self._arrived.append(arrival)

    def start(self, iteration: int) -> list[Event]:
        """Return the latest topology change, the linked members and their early messages. Steps up
        to `iteration` are left out: the initial weights contain them. So is a peer that has ended.
        """
        self.drain()
        self._started = True
        self.discard_steps(iteration)
        early_messages, self.early_messages = self.early_messages, []
        members = self.members
        joined = [MemberJoined(rank, iteration) for rank in sorted(members)]
        theirs = [arrival for arrival in early_messages if arrival.sender in members]
        return [*self._early_topology, *joined, *theirs]

    def reset(self, iteration: int) -> None:
        """Return to the state before the start, with own weights of `iteration`. This worker
        rejoins, and all its links are about to be reopened."""
        self.drain()
        self._started = False
        self.iteration = iteration
        self.early_messages, self._departed, self.peers_ahead = [], {}, {}
        self.answers.clear()

    def discard_steps(self, iteration: int) -> None:
        self.early_messages = [
            arrival
            for arrival in self.early_messages
            if arrival.message.kind not in STEP_KINDS or arrival.message.iteration > iteration
        ]

    def discard_announcements(self) -> None:
        """Drop early announcements of iterations that no worker has made. Once the training peers
        are gone, what latecomers announced to each other is not binding."""
        self.early_messages = [
            arrival
            for arrival in self.early_messages
            if arrival.message.kind is not MessageKind.PROGRESS or arrival.message.local_batch_size
        ]

    def peers_with_step(self, iteration: int) -> set[Rank]:
        """Before the start: peers that have sent their own step of that iteration."""
        return {
            arrival.sender
            for arrival in self.early_messages
            if arrival.message.iteration == iteration and arrival.message.local_batch_size
        }

    def first_steps(self) -> dict[Rank, int]:
        """Before the start: the first own step received from each peer. All its later steps arrive,
        too."""
        firsts: dict[Rank, int] = {}
        for arrival in self.early_messages:
            if arrival.message.is_own_step:
                firsts.setdefault(arrival.sender, arrival.message.iteration)
        return firsts

    def drain(self) -> list[Event]:
        """Return all queued events without waiting."""
        events: list[Event] = []
        while self._arrived:
            events += self._translate(self._arrived.popleft())
        now_s = self._clock_s()
        events += self._settle_stops(now_s)
        due = [
            r for r, due_s in self._departed.items() if due_s <= now_s or self._has_left_for_good(r)
        ]
        return events + self._left(due)

    def take_refusals(self) -> list[Refused]:
        """Return the invalid messages since the last call."""
        taken, self.refusals = self.refusals, []
        return taken

    def _translate(self, arrival: ExchangeEvent | TopologyChanged) -> list[Event]:
        match arrival:
            case TopologyChanged():
                self._early_topology = [arrival]
                return [arrival] if self._started else []
            case LinkUp(peer=peer, epoch=epoch, iteration=iteration):
                self._link_up(peer, epoch)
                self.on_link_change(peer)
                joined = MemberJoined(peer, iteration)
                return [*self._left([peer]), joined] if self._started else []
            case LinkDown(peer=peer):
                self.on_link_change(peer)
                return self._link_down(peer)
            case StatePulled(peer=peer, weights_only=True):
                self.served.add(peer)
            case MessageArrived():
                return self._message(arrival)
        return []

    def _link_up(self, peer: Rank, epoch: int) -> None:
        self.link_epochs[peer] = epoch
        self.answers.pop(peer, None)
        if self.stop_message is not None:
            self._send(peer, self.stop_message, epoch)
        elif not self._started:
            # Sent before any answer on this link: a peer with our answer also has our question.
            self._send(peer, join_barrier.join_request(), epoch)

    def answer(self, question: JoinQuestion, role: JoinRole, *, done: int) -> None:
        """Answer a latecomer's question, on the link that it came on.

        An answer is a promise. It must not reach a peer that returned after its predecessor had
        asked: this worker does not wait for that peer. Once the link has been reopened, it drops
        the answer.
        """
        answer = join_barrier.join_answer(question.message.iteration, done=done, role=role)
        self._send(question.sender, answer, question.epoch)

    def _link_down(self, peer: Rank) -> list[Event]:
        self.link_epochs.pop(peer, None)
        self.answers.pop(peer, None)
        was_alone, was_leaving = peer in self._alone, peer in self._leaving
        for known in (self.stopped, self.served, self._alone, self._leaving):
            known.discard(peer)
        self._doubted.pop(peer, None)
        self.early_messages = [message for message in self.early_messages if message.sender != peer]
        if not self._started or was_alone:
            return []
        if was_leaving:
            # Often all workers end at once; none must continue without the others meanwhile.
            self._departed[peer] = self._clock_s() + DEPARTURE_S
            return []
        return [MemberLeft(peer)]

    def _has_left_for_good(self, departed: Rank) -> bool:
        """Whether a departed peer will not return. It finished, or the manifest now has fewer
        workers than are ready."""
        membership = self._membership()
        if membership is None:
            return False
        member = membership.member(departed)
        has_ended = member is not None and member.state is MemberState.FINISHED
        return has_ended or len(membership.ready()) > membership.expected_count

    def _left(self, peers: list[Rank]) -> list[Event]:
        """Return events of the peers that had departed; they now count as gone."""
        return [MemberLeft(r) for r in peers if self._departed.pop(r, None) is not None]

    def _message(self, arrival: MessageArrived) -> list[Event]:
        match arrival.message.kind:
            case MessageKind.STOP:
                self._stop(arrival)
                return []
            case MessageKind.MEET:
                return self._meet(arrival)
        if arrival.sender in self._alone:
            return []
        if arrival.message.is_own_step:
            self._count_step(arrival.sender, arrival.message.iteration)
            self._heard_samples[arrival.sender] += arrival.message.local_batch_size
        if not self._started:
            self.early_messages.append(arrival)
            return []
        return [arrival]

    def _stop(self, arrival: MessageArrived) -> None:
        meaning = arrival.message.weights_version
        if meaning == StopKind.LEAVING:
            self._leaving.add(arrival.sender)
            return
        sender = arrival.sender
        self.stopped.add(sender)
        if meaning == StopKind.SAVED:
            self.saved.add(sender)
        if self.stop_iteration is not None or sender in self._doubted or sender in self._alone:
            return
        reason = bytes(arrival.message.payload[:_MAX_REASON_BYTES]).decode("utf-8", "replace")
        named = _FORWARDED.match(reason)
        if named is None or Rank(int(named[1])) not in self.stopped:
            # Only the sender's identity is proved. A forwarded reason keeps the name of the first
            # worker if that one has announced it itself.
            reason = f"worker {sender}: {own_reason(reason)}"
        self._doubted[sender] = StopClaim(
            sender,
            reason,
            arrival.message.iteration,
            self._clock_s(),
            self._heard_steps[sender],
        )

    def _count_step(self, peer: Rank, iteration: int) -> None:
        """Count a peer's own step, and some that a newer one has superseded on a narrow link."""
        passed = iteration - self._last_steps.get(peer, iteration - 1)
        self._heard_steps[peer] += max(0, min(passed, MAX_SUPERSEDED_STEPS))
        self._last_steps[peer] = max(iteration, self._last_steps.get(peer, 0))

    def heard_steps(self, peer: Rank) -> int:
        """How many own steps of that peer this worker knows of."""
        return self._heard_steps[peer]

    def peer_steps(self) -> dict[Rank, PeerSteps]:
        """What has arrived of each peer. Any thread may call it."""
        last = self._last_steps.copy()
        return {rank: PeerSteps(self._heard_samples[rank], last[rank]) for rank in last}

    def confirm_stops(self) -> None:
        """This worker must stop itself: what peers announce is true."""
        for claim in self._doubted.values():
            self.stop_reason, self.stop_iteration = claim.reason, claim.iteration
            break

    def _settle_stops(self, now_s: float) -> list[Event]:
        """Believe what is confirmed. A peer whose stop is not has left the run, which continues."""
        events: list[Event] = []
        for sender, claim in list(self._doubted.items()):
            if self.stop_iteration is not None or self.stop_message is not None:
                break
            why = self.doubt(claim, stopped=self.stopped, linked=self.linked)
            if not why:
                self.stop_reason, self.stop_iteration = claim.reason, claim.iteration
            elif now_s >= claim.arrived_s + CONFIRM_WITHIN_S:
                del self._doubted[sender]
                self._alone.add(sender)
                text = f"claims that the run is over ({own_reason(claim.reason)}), but {why}"
                self.refusals.append(Refused(sender, text, kind=PeerRefusal.IMPLAUSIBLE))
                events += [MemberLeft(sender)] if self._started else []
        return events

    def _meet(self, arrival: MessageArrived) -> list[Event]:
        try:
            parsed = join_barrier.parse_message(arrival.message)
        except ContractError as error:
            self.refusals.append(Refused(arrival.sender, str(error)))
            return []
        if isinstance(parsed, JoinAnswer):
            self.answers[arrival.sender] = parsed
            return []
        epoch = self.link_epochs.get(arrival.sender, 0)
        question = JoinQuestion(arrival.sender, arrival.message, epoch)
        if self._started:
            return [question]
        if (progress := join_barrier.as_progress(parsed)) is not None:
            self.early_messages.append(MessageArrived(arrival.sender, progress))
        self.answer(question, JoinRole.OUT, done=self.iteration)
        return []
