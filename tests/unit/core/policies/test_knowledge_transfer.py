"""Tests of knowledge transfer: requests for weights, as numbered timelines of three workers (period
2).

Left out: the effect of a merge on accuracy (tests/simulated, the runner).
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_core.codecs import ValueCodec, decode_loss, encode_loss, encode_whole
from dlion_core.policies import factory
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    AverageWeights,
    Flat,
    Instruction,
    Layout,
    LocalStepDone,
    Message,
    MessageKind,
    RejectMessage,
    SendMessage,
    SendWeights,
)
from dlion_core.policies.knowledge_transfer import DirectKnowledgeTransfer
from dlion_core.policies.synchronization import Synchronizer, SyncRule
from policy_cluster import spec

A, B, C = Rank(0), Rank(1), Rank(2)
SIZE = 3


class Worker:
    """Rank 0 with peers 1 and 2. The value of its weights is the number of its steps."""

    def __init__(
        self,
        policy: str = "best2all",
        *,
        peers: tuple[Rank, ...] = (B, C),
        in_lock_step: bool = True,
    ) -> None:
        knowledge = {"policy": policy, "everySteps": 2, "lambda": 0.75, "lossWindow": 2}
        job = spec(exchange={"codec": "float32"}, knowledge_transfer=knowledge)
        self.weights_D = np.zeros(SIZE, np.float32)
        context = PolicyContext(job, A, (A, *peers), Layout(("w",), (SIZE,)), replica=self)
        self.transfer = DirectKnowledgeTransfer(
            context, job.knowledge_transfer, in_lock_step=in_lock_step
        )
        self.finished = dict.fromkeys(peers, 0)
        self.iteration = 0

    @property
    def resting_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        return self.weights_D.copy()

    @property
    def peers(self) -> Synchronizer:
        peers = Synchronizer(SyncRule(slack=None))
        for rank, iteration in self.finished.items():
            peers.joined(rank, iteration)
        return peers

    def steps(self, *losses: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for loss in losses:
            self.iteration += 1
            instructions += self.transfer.step_done(self.iteration, loss, self.peers)
            self.weights_D += 1  # the update after the step
        return instructions

    def loss(self, sender: Rank, iteration: int, loss: float) -> list[Instruction]:
        self.finished[sender] = max(self.finished[sender], iteration)
        message = Message(MessageKind.LOSS, iteration, payload=encode_loss(loss))
        self.transfer.loss_arrived(sender, message)
        return self.transfer.decide(self.peers)

    def weights(self, sender: Rank, iteration: int) -> list[Instruction]:
        payload = encode_whole(np.full(SIZE, 7, np.float32), ValueCodec.FLOAT32)
        message = Message(MessageKind.WEIGHTS, iteration, payload=payload)
        return self.transfer.weights_arrived(sender, message)

    def requested(self, sender: Rank, iteration: int) -> list[Instruction]:
        return self.transfer.weights_requested(
            sender, Message(MessageKind.WEIGHTS_REQUEST, iteration)
        )


def requested_ranks(instructions: list[Instruction]) -> list[int]:
    return [
        one.peer
        for one in instructions
        if isinstance(one, SendMessage) and one.message.kind is MessageKind.WEIGHTS_REQUEST
    ]


def test_the_mean_of_recent_losses_is_shared_every_period() -> None:
    worker = Worker()
    assert worker.steps(9.0) == []
    instructions = worker.steps(1.0)
    assert [
        (one.peer, decode_loss(one.message.payload))
        for one in instructions
        if isinstance(one, SendMessage)
    ]
    assert {
        one.peer: decode_loss(one.message.payload)
        for one in instructions
        if isinstance(one, SendMessage)
    } == {
        1: 5.0,
        2: 5.0,
    }


def test_best2all_asks_the_best_and_merges_its_weights() -> None:
    worker = Worker()
    worker.steps(3.0, 3.0)  # 1. own loss 3
    assert requested_ranks(worker.loss(C, 2, 1.0)) == []  # 2. B's loss is still missing
    assert requested_ranks(worker.loss(B, 2, 2.0)) == [2]  # 3. C is best
    (mix,) = worker.weights(C, 2)  # 4.
    assert isinstance(mix, AverageWeights)
    assert (mix.fraction, mix.sender) == (0.75, 2)
    np.testing.assert_array_equal(mix.weights_D, 7)
    assert worker.weights(C, 2) == []  # 5. only once


def test_the_best_worker_sends_no_request() -> None:
    worker = Worker()
    worker.loss(B, 2, 2.0)
    worker.loss(C, 2, 1.0)
    assert requested_ranks(worker.steps(0.5, 0.5)) == []


@pytest.mark.parametrize(("own", "expected"), [(3.0, [2]), (1.5, []), (0.5, [])])
def test_with_best2worst_only_the_worst_worker_asks(own: float, expected: list[int]) -> None:
    worker = Worker("best2worst")
    worker.loss(B, 2, 2.0)
    worker.loss(C, 2, 1.0)
    assert requested_ranks(worker.steps(own, own)) == expected


def test_of_equal_workers_the_lowest_rank_is_best() -> None:
    worker = Worker()
    worker.loss(B, 2, 1.0)
    worker.loss(C, 2, 1.0)
    assert requested_ranks(worker.steps(1.0, 1.0)) == []
    other = Worker()
    other.loss(B, 2, 1.0)
    other.loss(C, 2, 1.0)
    assert requested_ranks(other.steps(2.0, 2.0)) == [1]


def test_a_lost_loss_message_is_not_awaited() -> None:
    worker = Worker()
    worker.steps(3.0, 3.0)
    worker.loss(C, 2, 1.0)
    worker.finished[B] = 3  # B is past the period, and its loss is missing
    assert requested_ranks(worker.transfer.decide(worker.peers)) == [2]


def test_a_slow_peer_holds_the_choice_for_one_period_at_most() -> None:
    worker = Worker()
    worker.steps(3.0, 3.0)  # B is at 0 and stays there
    worker.loss(C, 2, 1.0)
    assert requested_ranks(worker.steps(3.0)) == []
    assert requested_ranks(worker.steps(3.0)) == [
        2
    ]  # at the end of the next period: with the known losses


def test_a_slow_worker_uses_the_latest_loss_of_a_fast_one() -> None:
    worker = Worker()
    worker.loss(B, 2, 9.0)
    worker.loss(B, 8, 1.0)
    worker.loss(C, 6, 2.0)
    assert requested_ranks(worker.steps(3.0, 3.0)) == [1]


def test_if_the_best_leaves_the_period_is_skipped() -> None:
    worker = Worker()
    worker.steps(3.0, 3.0)
    worker.loss(B, 2, 2.0)
    worker.loss(C, 2, 1.0)
    worker.transfer.left(C)
    del worker.finished[C]
    with pytest.raises(ContractError, match="not requested"):
        worker.weights(C, 2)
    worker.loss(B, 4, 1.0)
    assert requested_ranks(worker.steps(3.0, 3.0)) == [1]  # and the next period runs without it


def test_while_an_answer_is_pending_no_request_is_sent_for_one_period() -> None:
    worker = Worker()
    for iteration, expected in ((2, [2]), (4, []), (6, [2])):
        worker.loss(B, iteration, 2.0)
        worker.loss(C, iteration, 1.0)
        assert requested_ranks(worker.steps(3.0, 3.0)) == expected
    assert worker.weights(C, 2) == []  # too late: ignored without harm
    assert len(worker.weights(C, 6)) == 1


def test_an_undecided_period_is_skipped_when_weights_change_for_another_reason() -> None:
    worker = Worker()
    worker.steps(3.0, 3.0)
    worker.loss(B, 2, 2.0)
    worker.transfer.suspend()
    assert requested_ranks(worker.loss(C, 2, 1.0)) == []
    worker.transfer.resume()
    worker.loss(B, 4, 2.0)
    worker.loss(C, 4, 1.0)
    assert requested_ranks(worker.steps(3.0, 3.0)) == [C]  # and the next period runs


def answered(instructions: list[Instruction]) -> list[tuple[int, int, float | None]]:
    """The recipient, the iteration and the weights of each answer."""
    answers = [one for one in instructions if isinstance(one, SendWeights)]
    assert len(answers) == len(instructions)
    return [
        (one.peer, one.iteration, None if one.weights_D is None else float(one.weights_D[0]))
        for one in answers
    ]


def test_a_request_is_answered_once_per_period_with_the_weights_at_its_end() -> None:
    worker = Worker()
    worker.steps(1.0, 1.0, 1.0)
    assert answered(worker.requested(B, 2)) == [(B, 2, 1.0)]  # before the update of iteration 2
    assert worker.requested(B, 2) == []
    assert answered(worker.requested(C, 2)) == [(C, 2, 1.0)]
    worker.steps(1.0, 1.0)
    assert answered(worker.requested(B, 4)) == [(B, 4, 3.0)]
    assert worker.requested(B, 2) == []


def test_weights_of_a_period_before_the_last_are_not_available() -> None:
    worker = Worker()
    worker.steps(1.0, 1.0, 1.0, 1.0)
    assert worker.requested(B, 2) == []


def test_without_a_barrier_the_answer_has_the_weights_when_all_losses_had_arrived() -> None:
    worker = Worker(in_lock_step=False)
    worker.steps(1.0, 1.0, 1.0)
    worker.loss(B, 2, 2.0)
    assert worker.loss(C, 2, 3.0) == []  # after step 3: this worker is the best
    worker.steps(1.0)
    assert answered(worker.requested(B, 2)) == [(B, 2, 3.0)]


def test_without_a_barrier_an_earlier_request_gets_the_present_weights() -> None:
    worker = Worker(in_lock_step=False)
    worker.steps(1.0, 1.0, 1.0)
    assert answered(worker.requested(B, 2)) == [(B, 2, None)]


def test_a_best_worker_that_is_periods_ahead_answers_with_its_present_weights() -> None:
    worker = Worker(in_lock_step=False)
    worker.steps(*[1.0] * 6)
    assert answered(worker.requested(B, 2)) == [(B, 2, None)]
    assert answered(worker.requested(B, 4)) == [(B, 4, None)]  # decided without B, which was behind


@pytest.mark.parametrize("in_lock_step", [True, False])
def test_weights_from_before_another_change_are_not_sent(in_lock_step: bool) -> None:
    worker = Worker(in_lock_step=in_lock_step)
    worker.steps(1.0, 1.0, 1.0)
    worker.loss(B, 2, 2.0)
    worker.loss(C, 2, 3.0)
    worker.transfer.suspend()
    assert worker.requested(B, 2) == []
    assert worker.steps(3.0) == []  # a period ends meanwhile: no peer hears of it
    worker.loss(B, 4, 1.0)
    assert worker.loss(C, 4, 2.0) == []
    worker.transfer.resume()
    assert worker.requested(B, 4) == []
    worker.loss(B, 6, 1.0)
    worker.loss(C, 6, 2.0)
    assert requested_ranks(worker.steps(3.0, 3.0)) == [B]


def test_a_restarted_worker_answers_for_no_earlier_period() -> None:
    worker, again = Worker(in_lock_step=False), Worker(in_lock_step=False)
    worker.steps(1.0, 1.0, 1.0)
    again.transfer.restore(worker.transfer.state())
    assert again.requested(B, 2) == []


def test_an_answer_that_is_periods_late_is_not_merged() -> None:
    worker = Worker()
    worker.steps(3.0, 3.0)
    worker.loss(B, 2, 2.0)
    assert requested_ranks(worker.loss(C, 2, 1.0)) == [C]
    for iteration in (4, 6):
        worker.loss(B, iteration, 2.0)
        worker.loss(C, iteration, 1.0)
        assert requested_ranks(worker.steps(0.5, 0.5)) == []  # now this worker is the best
    assert worker.weights(C, 2) == []


@pytest.mark.parametrize(("in_lock_step", "then"), [(True, 1.0), (False, 3.0)])
def test_the_merge_uses_the_difference_of_weights_at_the_period_end(
    in_lock_step: bool, then: float
) -> None:
    """With a barrier this is step 2. Without one it is when all losses have arrived, after three
    steps.
    """
    worker = Worker(in_lock_step=in_lock_step)
    worker.steps(3.0, 3.0, 3.0)
    worker.loss(B, 2, 2.0)
    assert requested_ranks(worker.loss(C, 2, 1.0)) == [C]
    worker.steps(3.0)
    (mix,) = worker.weights(C, 2)
    assert isinstance(mix, AverageWeights)
    assert mix.since_D is not None
    np.testing.assert_array_equal(mix.since_D, then)


def test_a_pending_merge_is_cancelled_when_weights_change_for_another_reason() -> None:
    worker = Worker()
    worker.steps(3.0, 3.0)
    worker.loss(B, 2, 2.0)
    assert requested_ranks(worker.loss(C, 2, 1.0)) == [C]
    worker.transfer.suspend()
    assert worker.weights(C, 2) == []
    assert worker.requested(B, 2) == []


def test_an_invalid_message_is_refused() -> None:
    worker = Worker()
    worker.steps(1.0, 1.0)
    with pytest.raises(ContractError, match="not finished here"):
        worker.requested(B, 4)
    with pytest.raises(ContractError, match="multiples"):
        worker.requested(B, 3)
    with pytest.raises(ContractError, match="not requested"):
        worker.weights(B, 2)
    with pytest.raises(ContractError, match="finite"):
        worker.loss(B, 2, float("nan"))


def test_weights_of_another_model_are_refused() -> None:
    worker = Worker()
    worker.loss(B, 2, 1.0)
    worker.loss(C, 2, 2.0)
    assert requested_ranks(worker.steps(3.0, 3.0)) == [1]
    payload = encode_whole(np.ones(SIZE + 1, np.float32), ValueCodec.FLOAT32)
    with pytest.raises(ContractError, match="model of 4"):
        worker.transfer.weights_arrived(B, Message(MessageKind.WEIGHTS, 2, payload=payload))


def test_losses_survive_a_restart() -> None:
    worker = Worker()
    worker.steps(3.0, 5.0, 7.0)
    restored = Worker()
    restored.transfer.restore(worker.transfer.state())
    restored.iteration = 3
    for one in (worker, restored):
        instructions = one.steps(9.0)
        losses = [
            decode_loss(step.message.payload)
            for step in instructions
            if isinstance(step, SendMessage) and step.message.kind is MessageKind.LOSS
        ]
        assert losses == [8.0, 8.0]


def test_without_a_policy_nothing_is_shared() -> None:
    assert Worker("none").steps(1.0, 1.0) == []


def test_a_single_worker_sends_no_request() -> None:
    assert Worker(peers=()).steps(1.0, 1.0) == []


class Measured(Worker):
    """Like `Worker`, but measures weights: the test gives the loss for their first entry."""

    def __init__(self, losses: dict[float, float], *, untrained: float | None = None) -> None:
        self.losses, self.untrained_loss = losses, untrained
        super().__init__()

    def loss_of(self, weights_D: Flat | None) -> float | None:
        return self.losses[float((self.weights_D if weights_D is None else weights_D)[0])]


OWN, THEIRS = 2.0, 7.0
"""The first entry of the weights: after two steps, and of the answer."""


def merged(
    first: float, own: float, theirs: float, *, untrained: float | None = None
) -> list[Instruction]:
    """Return the effect of the weights of loss `theirs` on a worker of loss `first`.

    `untrained`: loss of its weights before it took over a peer's.
    """
    worker = Measured({OWN: own, THEIRS: theirs}, untrained=untrained)
    worker.steps(first, own)
    worker.loss(C, 2, 9.0)
    assert requested_ranks(worker.loss(B, 2, min(0.0, 2 * own))) == [B]
    return worker.weights(B, 2)


@pytest.mark.parametrize("own", [0.1, 1.0, 1.9])
def test_weights_that_are_far_worse_than_untrained_ones_are_not_merged(own: float) -> None:
    (refusal,) = merged(2.4, own, 4.9)
    assert isinstance(refusal, RejectMessage)
    assert (refusal.peer, refusal.kind) == (B, PeerRefusal.IMPLAUSIBLE)
    assert "claimed a loss of 0, but its weights have 4.9 on samples held out here" in str(refusal)
    assert not refusal.is_violation, "its samples may differ"


@pytest.mark.parametrize(
    ("first", "own", "theirs"),
    [
        (2.4, 1.0, 0.8),
        (2.4, 1.0, 1.9),
        (2.4, 2.5, 2.6),
        (-1, -5, -3),
        (1.6, 1.1, 1.62),  # of an honest worker, after 21 steps
    ],
)
def test_weights_that_are_somewhat_worse_here_are_merged(
    first: float, own: float, theirs: float
) -> None:
    (merge,) = merged(first, own, theirs)
    assert isinstance(merge, AverageWeights)


@pytest.mark.parametrize("theirs", [2.6, 4.9, math.nan])
def test_a_worker_without_a_loss_of_its_own_compares_with_its_first(theirs: float) -> None:
    """A loss of the program may be no number for its present weights, as the log of 0."""
    worker = Measured({OWN: math.nan, THEIRS: theirs})
    worker.steps(2.4, 2.4)
    worker.loss(C, 2, 9.0)
    worker.loss(B, 2, 0.0)
    (instruction,) = worker.weights(B, 2)
    assert isinstance(instruction, AverageWeights if theirs < 4.8 else RejectMessage)


@pytest.mark.parametrize("theirs", [1.32, 3.3])
def test_a_worker_that_took_over_weights_compares_with_its_untrained_ones(theirs: float) -> None:
    """Its first loss is of trained weights: twice that would refuse weights of honest workers."""
    (instruction,) = merged(0.457, 0.4, theirs, untrained=1.6)
    assert isinstance(instruction, AverageWeights if theirs < 3.2 else RejectMessage)


@pytest.mark.parametrize("policy", ["dlion", "full"])
def test_a_worker_that_joins_again_keeps_the_loss_of_its_untrained_weights(policy: str) -> None:
    job = spec(exchange={"policy": policy}, knowledge_transfer={"policy": "best2all"})
    machine = factory.build(job, A, Layout(("w",), (SIZE,)), (A, B))
    machine.handle(LocalStepDone(1, np.ones(SIZE, np.float32), 8, 2.3))
    machine = machine.restarted()
    machine.take_over(9)
    machine.handle(LocalStepDone(10, np.ones(SIZE, np.float32), 8, 0.1))
    assert machine.state()["loss_first"] == 2.3


@pytest.mark.parametrize("loss", [-1e300, -2001.0])
def test_an_impossible_loss_is_refused(loss: float) -> None:
    worker = Worker()
    worker.steps(2.0, 1.0)
    with pytest.raises(CallerError, match=r"loss -.*; allowed: -2000 on") as error:
        worker.loss(B, 2, loss)
    assert error.value.kind is PeerRefusal.IMPLAUSIBLE


@pytest.mark.parametrize("losses", [(0.02, 0.01), (0.5, -0.4), (3000.0, 800.0), (0.0, 0.0)])
def test_a_loss_that_becomes_negative_at_the_peer_first_is_accepted(
    losses: tuple[float, float],
) -> None:
    worker = Worker()
    worker.steps(*losses)
    worker.loss(C, 2, 9.0)
    assert requested_ranks(worker.loss(B, 2, -0.6)) == [B]


def test_an_impossible_loss_before_the_first_step_does_not_count() -> None:
    worker = Worker()
    worker.loss(B, 2, -1e300)
    worker.loss(C, 2, 3.0)
    assert requested_ranks(worker.steps(2.0, 1.0)) == []


def test_if_losses_are_negative_a_peers_loss_may_be_too() -> None:
    worker = Worker()
    worker.steps(-3.0, -4.0)
    worker.loss(C, 2, -3.0)
    assert requested_ranks(worker.loss(B, 2, -40.0)) == [B]
    with pytest.raises(CallerError, match="allowed: -4000 on"):
        worker.loss(B, 2, -1e300)
