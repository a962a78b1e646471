"""Survivors of a lost worker agree on its last steps; for trainer and simulator.

In lock step all workers make the same updates. A worker that is lost while it sends a step may
have reached some peers only. So each survivor asks the others which step they received last, and
reports the loss to the policy only once it has all of these steps. A survivor that has more
forwards them. Until then the survivor may compute, but it does not complete a step that lacks the
lost worker's contribution.

A survivor that is still linked with the lost worker answers when it loses the link as well. If the
worker evidently still trains, only the requester's link is down: then it answers at once. It also
waits for the answers of those that the requester has lost since: what they forward would not reach
the requester.

Events of a worker that returns meanwhile are withheld until the others agree.

Source: the flush that precedes a new view in virtual synchrony (Birman and Joseph, Exploiting
Virtual Synchrony in Distributed Systems, 1987), without a coordinator.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.policies.catalogue import may_step_concurrently
from dlion_core.policies.interface import (
    STEP_KINDS,
    Event,
    IterationReplayed,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
)

KEPT_STEPS = 2
"""Steps of each peer that are kept, and the next one. A peer that waits for this worker cannot be
further ahead."""

_KINDS = frozenset(
    {MessageKind.MISSED_STEPS_REQUEST, MessageKind.FORWARDED_STEP, MessageKind.MISSED_STEPS_SENT}
)
_MISSED_STEPS = struct.Struct("<IIQ")
_FORWARDED = struct.Struct("<IBI")


@dataclass(frozen=True)
class MissedSteps:
    """A request for a lost worker's steps; the payload of its message, and of the answer."""

    rank: Rank
    """The lost worker."""
    round: int
    """Number of the request."""
    after_iteration: int
    """The last own step that the requester has received from the lost worker; 0: none."""

    def encode(self) -> bytes:
        return _MISSED_STEPS.pack(self.rank, self.round, self.after_iteration)

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> MissedSteps:
        """Raises: ContractError."""
        if len(payload) != _MISSED_STEPS.size:
            raise ContractError(
                f"missed steps of {len(payload)} bytes; allowed: {_MISSED_STEPS.size} bytes"
            )
        rank, number, iteration = _MISSED_STEPS.unpack(payload)
        return cls(Rank(rank), number, iteration)


def forwarded_step(origin: Rank, step: Message) -> Message:
    head = _FORWARDED.pack(origin, step.kind, step.local_batch_size)
    return Message(
        MessageKind.FORWARDED_STEP, step.iteration, payload=b"".join((head, step.payload))
    )


def decode_forwarded_step(message: Message) -> MessageArrived:
    """Return the forwarded step, as received from its origin. Raises: ContractError."""
    payload = memoryview(message.payload)
    if len(payload) < _FORWARDED.size:
        raise ContractError(
            f"FORWARDED_STEP of {len(payload)} bytes; allowed: {_FORWARDED.size} on"
        )
    origin, kind, batch_size = _FORWARDED.unpack_from(payload)
    if kind not in STEP_KINDS or batch_size < 1:
        raise ContractError(
            f"FORWARDED_STEP of kind {kind} with {batch_size} samples; allowed: GRADIENT, PROGRESS"
            " with 1 sample or more"
        )
    step = Message(
        MessageKind(kind), message.iteration, batch_size, payload=payload[_FORWARDED.size :]
    )
    return MessageArrived(Rank(origin), step)


@dataclass(frozen=True)
class _Request:
    """A peer's open request."""

    missed: MissedSteps
    own_step: int
    """The requester's own last step."""


@dataclass
class _LostWorker:
    """A worker whose loss the policy does not know yet."""

    round: int = 0
    awaited: set[Rank] = field(default_factory=set)
    withheld: list[Event] = field(default_factory=list)


class DepartureAgreement:
    """Passes one worker's events to the policy, each loss only after the agreement."""

    def __init__(self, instructions: InstructionExecutor, process: Callable[[Event], None]) -> None:
        """`process(event)` passes an event on. Where replicas may differ, it gets all at once."""
        spec = instructions.parts.job.spec
        self._worker = instructions.parts.job.worker
        self._is_enabled = may_step_concurrently(spec) and spec.exchange.topology == "allToAll"
        self._send, self._carry_out = instructions.send, instructions.carry_out
        self._progress, self._process = instructions.progress, process
        self.reset()

    def reset(self) -> None:
        """Forget everything before rejoining; peers report their links again."""
        self._training: set[Rank] = set()
        """Peers that have sent an own step since their link came up."""
        self._steps: dict[Rank, dict[int, Message]] = {}
        """The latest own steps of each peer, also of lost ones."""
        self._last: dict[Rank, int] = {}
        self._lost: dict[Rank, _LostWorker] = {}
        self._requests: dict[Rank, dict[Rank, _Request]] = {}
        """Open requests: by lost worker, then by requester."""
        self._lost_by: dict[Rank, dict[Rank, int]] = {}
        """The workers that each peer has asked about, with its own last step then."""

    @property
    def is_pending(self) -> bool:
        """Whether the policy does not know yet that some worker was lost."""
        return bool(self._lost)

    def handle(self, event: Event) -> None:
        """Take one event, and pass on what is due."""
        match event:
            case MessageArrived(message=message) if message.kind in _KINDS:
                self._handle_message(event)
            case MessageArrived(sender=rank) | MemberJoined(rank=rank) if rank in self._lost:
                self._lost[rank].withheld.append(event)
            case MemberLeft(rank=rank) if self._is_enabled:
                self._left(rank)
            case _:
                if self._is_enabled:
                    self._record(event)
                self._process(event)

    def release(self) -> None:
        """Pass on all losses at once: the run is over, so peers may no longer answer."""
        for lost in self._lost.values():
            lost.awaited = set()
        self._settle()

    def _left(self, rank: Rank) -> None:
        self._training.discard(rank)
        self._lost_by.pop(rank, None)
        for requests in self._requests.values():
            requests.pop(rank, None)
        if rank in self._lost:  # it returned and left again
            self._lost[rank].withheld.clear()
            return
        self._lost[rank] = _LostWorker()
        # Ask about the others again, too: the survivor that has just left may have forwarded their
        # steps to some peers only.
        # First about the one that has just left: so peers know whose forwards this worker misses.
        for each in (rank, *(self._lost.keys() - {rank})):
            self._ask(each)
        self._answer()
        self._settle()

    def _ask(self, rank: Rank) -> None:
        lost = self._lost[rank]
        lost.round += 1
        lost.awaited = set(self._training)
        missed = MissedSteps(rank, lost.round, self._last.get(rank, 0))
        for peer in sorted(lost.awaited):
            self._send_about(MessageKind.MISSED_STEPS_REQUEST, peer, missed)

    def _send_about(self, kind: MessageKind, peer: Rank, missed: MissedSteps) -> None:
        self._send(peer, Message(kind, self._progress.iteration, payload=missed.encode()))

    def _record(self, event: Event) -> None:
        match event:
            case LocalStepDone(iteration=iteration) | IterationReplayed(iteration=iteration):
                for steps in self._steps.values():
                    for old in [at for at in steps if at <= iteration - KEPT_STEPS]:
                        del steps[old]
            case MessageArrived(sender=sender, message=message):
                if message.is_own_step:
                    if sender not in self._training:
                        self._training.add(sender)
                        self._steps[sender] = {}
                    self._keep(sender, message)
                    self._answer()

    def _keep(self, origin: Rank, step: Message) -> None:
        steps = self._steps.setdefault(origin, {})
        steps[step.iteration] = step
        if len(steps) > KEPT_STEPS + 1:  # it does not wait: it must not fill the memory
            del steps[min(steps)]
        self._last[origin] = step.iteration

    # ---- messages --------------------------------------------------------------------------------

    def _handle_message(self, event: MessageArrived) -> None:
        sender, message = event.sender, event.message
        try:
            if not self._is_enabled:
                raise ContractError(f"{message.kind.name}, where replicas may differ")
            match message.kind:
                case MessageKind.MISSED_STEPS_REQUEST:
                    missed = MissedSteps.decode(message.payload)
                    self._worker(missed.rank)
                    request = _Request(missed, own_step=message.iteration)
                    self._requests.setdefault(missed.rank, {})[sender] = request
                    self._lost_by.setdefault(sender, {})[missed.rank] = request.own_step
                    self._answer()
                case MessageKind.FORWARDED_STEP:
                    self._take_forwarded(decode_forwarded_step(message))
                case _:
                    self._take_answer(sender, MissedSteps.decode(message.payload))
        except LookupError as error:
            text = f"{message.kind.name} of a worker that this job cannot have: {error}"
            self._carry_out([RejectMessage(sender, text)])
        except ContractError as error:
            self._carry_out([RejectMessage.of(sender, error)])

    def _answer(self) -> None:
        """Answer the requests about workers that are lost here as well, or that train on."""
        due = [
            (rank, requester, request)
            for rank, requests in self._requests.items()
            for requester, request in requests.items()
            if not self._may_send_more(rank, requester, request)
        ]
        for rank, requester, request in due:
            del self._requests[rank][requester]
            for iteration, step in sorted(self._steps.get(rank, {}).items()):
                if iteration > request.missed.after_iteration:
                    self._send(requester, forwarded_step(rank, step))
            # Messages of one link arrive in order, so the requester has them before this one.
            self._send_about(MessageKind.MISSED_STEPS_SENT, requester, request.missed)
        self._requests = {rank: asked for rank, asked in self._requests.items() if asked}

    def _may_send_more(self, rank: Rank, requester: Rank, request: _Request) -> bool:
        """Whether more steps of `rank` with the requester's contributions may arrive here."""
        if rank not in self._training:
            return self._awaits_for(rank, requester)
        # Only their link is down if it lost the requester, too, or made a step that needed one of
        # the requester's steps after its last.
        is_cut = requester in self._lost_of(rank)
        return not is_cut and self._last[rank] <= request.own_step + 1

    def _awaits_for(self, rank: Rank, requester: Rank) -> bool:
        """Whether a peer that the requester has lost may still forward steps of `rank` here.

        It waits only where its own losses are among those of the requester. This makes cycles rare:
        they need several broken links and an outdated `_lost_by`.
        """
        theirs = self._lost_of(requester)
        lost = self._lost.get(rank)
        return lost is not None and self._lost.keys() <= theirs and bool(lost.awaited & theirs)

    def _lost_of(self, peer: Rank) -> set[Rank]:
        """What that peer has asked about and still misses: it has completed no step since."""
        last = self._last.get(peer, 0)
        asked = self._lost_by.get(peer, {})
        return {rank for rank, own_step in asked.items() if last <= own_step + 1}

    def _take_answer(self, sender: Rank, answer: MissedSteps) -> None:
        lost = self._lost.get(answer.rank)
        if lost is not None and lost.round == answer.round:
            lost.awaited.discard(sender)
            self._answer()
            self._settle()

    def _take_forwarded(self, arrived: MessageArrived) -> None:
        origin, step = arrived.sender, arrived.message
        furthest = self._progress.iteration + 1  # with this worker's steps it can make no later one
        if origin in self._lost and self._last.get(origin, 0) < step.iteration <= furthest:
            self._keep(origin, step)
            self._process(arrived)

    def _settle(self) -> None:
        """Pass on the losses that are agreed on, and what was withheld since."""
        self._answer()
        for rank in [rank for rank, lost in self._lost.items() if not lost.awaited]:
            lost = self._lost.pop(rank)
            self._process(MemberLeft(rank))
            for event in lost.withheld:
                self.handle(event)
        self._answer()
