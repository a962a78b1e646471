"""What a worker that comes late and those who train already say to each other.

Owns the `MEET` messages and the choice of the iteration to come in at; pure. `entrance` drives it.

A latecomer asks every peer: are you in (training), and how far? At a barrier it also names an
iteration F ahead of all. Whoever hears that counts on it from then on: nobody finishes F without
its gradient. The answer says which local step the peer has done *now*; if that is before F for
every peer, then all will hold at F with equal weights, those of F - 1, and the latecomer gets
everybody's gradient of F. If one was past it already, a later F is named, by which the earlier one
is given up. Several latecomers may do so at once.

Where an update is all that changes equal weights, the latecomer takes a state as soon as
everybody's gradient of F - 1 has come. If it is that of F - 1 the latecomer computes its gradient
of F beside the others, who wait for the transfer alone; else it takes that of one held at F.

One that trains alone has nobody to make the iterations before F with: it goes on at F at once, with
the weights that it has (`Synchronizer.next_iteration`). So those held at F may be of an earlier
update than that of F - 1.

Who holds still for want of a quorum says so, and answers once more when it goes on: whoever comes
waits for that, or for others that train, and takes no state from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.policies.interface import Message, MessageKind

FIRST_MARGIN = 2
"""Iterations ahead that are named first; doubled each time that somebody was faster."""

LARGEST_MARGIN = 1024

WHOLE_S = 8.0
"""So long one that comes in where others train waits for links with all: they come up one after
another, each within a dialler's longest wait. Whom it is not linked with trains without it."""

ALONE_S = 60.0
"""And so long for anybody that trains, before it goes on from its own weights."""


class Role(IntEnum):
    """The payload of a `MEET`: one byte."""

    ASK = 0
    OUT = 1  # an answer: not in the run yet
    IN = 2  # an answer: training
    STILL = 3  # an answer: in the run, but it holds still for want of a quorum


@dataclass(frozen=True)
class Answer:
    """What a peer has answered."""

    asked: int
    """The iteration that it was asked to meet at; 0: it was only asked who it is."""
    done: int
    """Its last local step; of one that is not in, the iteration of its checkpoint."""
    role: Role

    @property
    def is_in(self) -> bool:
        """Whether it trains."""
        return self.role is Role.IN

    @property
    def is_still(self) -> bool:
        """Whether it holds still, and is to be waited for."""
        return self.role is Role.STILL


def ask(iteration: int = 0) -> Message:
    """The question; `iteration` is the one to meet at, 0 for none."""
    return Message(MessageKind.MEET, iteration, payload=bytes([Role.ASK]))


def answer(asked: int, *, done: int, role: Role) -> Message:
    """The answer to `ask(asked)`."""
    return Message(MessageKind.MEET, done, weights_version=asked, payload=bytes([role]))


def read(message: Message) -> int | Answer:
    """The iteration that is asked for, or the answer. Raises: ContractError."""
    payload = bytes(message.payload)
    if len(payload) != 1 or payload[0] not in set(Role):
        allowed = ", ".join(str(int(role)) for role in Role)
        raise ContractError(f"MEET with payload {payload[:8]!r}; allowed: one byte of {allowed}")
    role = Role(payload[0])
    if role is Role.ASK:
        return message.iteration
    return Answer(message.weights_version, message.iteration, role)


def as_progress(asked: int) -> Message | None:
    """What the policies are to hear of a question: its sender has finished all before `asked`."""
    return Message(MessageKind.PROGRESS, asked - 1) if asked > 1 else None


class Meeting:
    """One latecomer's way to an iteration that everybody holds at."""

    def __init__(self) -> None:
        self.iteration = 0
        """The one named last."""
        self._margin = FIRST_MARGIN
        self._tried = 0
        self._asked: dict[Rank, tuple[int, int]] = {}

    def to_ask(
        self, lives: Mapping[Rank, int], answers: Mapping[Rank, Answer], *, heard: int = 0
    ) -> tuple[Rank, ...]:
        """Peers to be asked for `iteration`, which is chosen anew where somebody was past it.

        `lives` are the linked peers, each with a number that changes when its link was down.
        `heard`: how far one of them is known to be, if not by an answer.
        """
        inside = [a for peer, a in answers.items() if peer in lives and a.is_in]
        late = any(a.asked == self.iteration and a.done >= self.iteration for a in inside)
        if self.iteration == 0 or late:
            self.iteration = max([heard, *(a.done for a in inside)]) + self._margin
            self._margin = min(LARGEST_MARGIN, 2 * self._margin)
        wanted = {peer: (life, self.iteration) for peer, life in lives.items()}
        asked_now = tuple(sorted(p for p, want in wanted.items() if self._asked.get(p) != want))
        self._asked = wanted
        return asked_now

    def agreed(self, linked: Collection[Rank], answers: Mapping[Rank, Answer]) -> bool:
        """Whether every peer has said that it will not pass `iteration` without this worker."""
        return all(
            (known := answers.get(peer)) is not None
            and known.asked == self.iteration
            and (known.done < self.iteration or not known.is_in)
            for peer in linked
        )

    def tries_beside(self, inside: Collection[Rank], heard_before: Collection[Rank]) -> bool:
        """Whether a state of F - 1 is to be asked for before anybody is held at F: `heard_before`
        are the peers whose step F - 1 has come, so that each will have that state as soon as the
        others' steps have come there. Once for each F."""
        if self._tried == self.iteration or not set(inside) <= set(heard_before):
            return False
        self._tried = self.iteration
        return True

    def holds(self, updated: int) -> bool:
        """Whether weights whose last update was of that iteration are those that everybody who has
        sent a gradient of `iteration` holds at it; not if its own update has been made as well."""
        return updated < self.iteration
