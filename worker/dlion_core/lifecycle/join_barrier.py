"""How a latecomer and the training workers agree on an iteration F to join at. Pure.

`admission` drives it with `MEET` messages. The latecomer proposes an F ahead of all; each peer
promises not to finish F without its gradient, and answers with its current step. If all are before
F, they wait there with the equal weights of F - 1. If one was past F, a later F replaces the
proposal. Several latecomers may negotiate at once. A step far beyond those of most peers is
impossible at a barrier, and does not count: the others would refuse an F after it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.policies.interface import Message, MessageKind
from dlion_core.policies.iteration_guard import MAX_ITERATION, MAX_LEAD

FIRST_MARGIN = 2
"""Margin of the first proposal, in iterations; doubled whenever a peer was faster."""

MAX_MARGIN = 1024

ALL_LINKS_WAIT_S = 8.0
"""Longest wait for links with all peers where others train.

Links come up one after another, each within a client's longest back-off. The run trains on with
peers that are not linked by then.
"""

TRAINING_PEER_WAIT_S = 60.0
"""Longest wait of a rejoining worker for a training peer, before it uses its own weights."""


class JoinRole(IntEnum):
    """The payload of a `MEET` message: one byte."""

    ASK = 0
    OUT = 1  # an answer: not training yet
    IN = 2  # an answer: training
    NO_QUORUM = 3  # an answer: in the run, but paused without a quorum


@dataclass(frozen=True)
class JoinAnswer:
    """A peer's answer."""

    asked: int
    """The proposed iteration; 0 for a question without a proposal."""
    done: int
    """Its last local step; the iteration of its checkpoint if it does not train."""
    role: JoinRole

    @property
    def is_training(self) -> bool:
        return self.role is JoinRole.IN

    @property
    def lacks_quorum(self) -> bool:
        """Whether it is paused without a quorum. It answers again when it continues, and gives no
        state until then."""
        return self.role is JoinRole.NO_QUORUM


def join_request(iteration: int = 0) -> Message:
    """The question; `iteration` is the proposal, 0 for none."""
    return Message(MessageKind.MEET, iteration, payload=bytes([JoinRole.ASK]))


def join_answer(asked: int, *, done: int, role: JoinRole) -> Message:
    """The answer to `join_request(asked)`."""
    return Message(MessageKind.MEET, done, weights_version=asked, payload=bytes([role]))


def parse_message(message: Message) -> int | JoinAnswer:
    """Return the proposed iteration, or the answer. Raises: ContractError."""
    payload = bytes(message.payload)
    if len(payload) != 1 or payload[0] not in set(JoinRole):
        allowed = ", ".join(str(int(role)) for role in JoinRole)
        raise ContractError(f"MEET with payload {payload[:8]!r}; allowed: one byte of {allowed}")
    role = JoinRole(payload[0])
    if role is JoinRole.ASK:
        return message.iteration
    return JoinAnswer(message.weights_version, message.iteration, role)


def as_progress(asked: int) -> Message | None:
    """What a question means to policies: its sender has finished everything before `asked`."""
    return Message(MessageKind.PROGRESS, asked - 1) if asked > 1 else None


class JoinBarrier:
    """One latecomer's negotiation of an iteration at which all peers wait."""

    def __init__(self) -> None:
        self.iteration = 0
        """The latest proposal."""
        self._margin = FIRST_MARGIN
        self._pulled_early = 0
        self._asked: dict[Rank, tuple[int, int]] = {}

    def peers_to_ask(
        self,
        link_epochs: Mapping[Rank, int],
        answers: Mapping[Rank, JoinAnswer],
        *,
        latest_known: int = 0,
    ) -> tuple[Rank, ...]:
        """Return the peers to ask for `iteration`, proposing a later one if any peer passed it.

        `link_epochs`: the linked peers, each with a number that changes when its link is
        re-established. `latest_known`: an iteration that a peer has reached, known from other
        sources than answers.
        """
        inside = _possible([a for p, a in answers.items() if p in link_epochs and a.is_training])
        is_passed = any(a.asked == self.iteration and a.done >= self.iteration for a in inside)
        if self.iteration == 0 or is_passed:
            self.iteration = max([latest_known, *(a.done for a in inside)]) + self._margin
            self._margin = min(MAX_MARGIN, 2 * self._margin)
        wanted = {peer: (life, self.iteration) for peer, life in link_epochs.items()}
        asked_now = tuple(sorted(p for p, want in wanted.items() if self._asked.get(p) != want))
        self._asked = wanted
        return asked_now

    def is_agreed(self, linked: Collection[Rank], answers: Mapping[Rank, JoinAnswer]) -> bool:
        """Whether every peer has promised not to pass `iteration` without this worker."""
        return all(
            (known := answers.get(peer)) is not None
            and known.asked == self.iteration
            and (known.done < self.iteration or not known.is_training)
            for peer in linked
        )

    def should_pull_early(self, inside: Collection[Rank], stepped_before: Collection[Rank]) -> bool:
        """Whether to ask for a state of F - 1 before any peer waits at F. True once for each F.

        `stepped_before`: peers that have sent their step F - 1; each has that state once the
        others' steps arrive there. With it, the latecomer computes its gradient of F while the
        others do, and they wait only for the transfer.
        """
        if self._pulled_early == self.iteration or not set(inside) <= set(stepped_before):
            return False
        self._pulled_early = self.iteration
        return True

    def accepts(self, updated: int) -> bool:
        """Whether weights last updated at iteration `updated` are those that peers hold at F.

        They may be older than F - 1: a worker that trains alone skips to F at once
        (`Synchronizer.next_iteration`). False if the update of F itself has been made.
        """
        return updated < self.iteration


def _possible(inside: list[JoinAnswer]) -> list[JoinAnswer]:
    """Return the answers without those far beyond the lower median of the reported steps."""
    steps = sorted(answer.done for answer in inside)
    median = steps[(len(steps) - 1) // 2] if steps else 0
    return [answer for answer in inside if answer.done <= min(median, MAX_ITERATION) + MAX_LEAD]
