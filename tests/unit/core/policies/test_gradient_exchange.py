"""Tests of the exchange of gradients by one worker, as short timelines of steps, messages and
members.

They cover weights of contributions, recipients, late and early contributions, members that join and
leave, invalid messages, and checkpoints.

Left out: arithmetic of Max N (test_gradient_selectors.py), knowledge transfer
(test_knowledge_transfer.py), random schedules (tests/property).
"""

from __future__ import annotations

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_api.spec.policies import OPEN_POLICIES
from dlion_core.codecs import ValueCodec, decode_gradient, encode_loss, encode_whole
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    ApplyGradient,
    BudgetsChanged,
    Instruction,
    IterationReplayed,
    Layout,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    PolicyMachine,
    RejectMessage,
    SendMessage,
)
from naive_codecs import encode_sparse
from policy_cluster import Cluster, spec
from weighing_cluster import View

LAYOUT = Layout(("w",), (4,))
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)
FULL = {"policy": "full", "codec": "float32"}


def machine(
    mode: str = "synchronous",
    *,
    exchange: dict[str, object] | None = None,
    backup: int = 0,
    joined: bool = True,
) -> PolicyMachine:
    synchronization: dict[str, object] = {"mode": mode, "maxStaleness": 1}
    if backup:
        synchronization["backupWorkers"] = backup
    built = build(
        spec(exchange=exchange or FULL, synchronization=synchronization),
        ME,
        LAYOUT,
        [ME, ONE, TWO],
    )
    if joined:
        built.handle(MemberJoined(ONE))
        built.handle(MemberJoined(TWO))
    return built


def own(iteration: int, value: float = 1.0, batch: int = 10) -> LocalStepDone:
    return LocalStepDone(iteration, np.full(4, value, np.float32), batch, loss=0.5)


def gradient(sender: Rank, iteration: int, value: float, batch: int = 10) -> MessageArrived:
    payload = encode_whole(np.full(4, value, np.float32), ValueCodec.FLOAT32)
    return MessageArrived(
        sender, Message(MessageKind.GRADIENT, iteration, local_batch_size=batch, payload=payload)
    )


def progress(sender: Rank, iteration: int, batch: int = 10) -> MessageArrived:
    return MessageArrived(sender, Message(MessageKind.PROGRESS, iteration, local_batch_size=batch))


def value_of(instructions: list[Instruction]) -> float:
    """The one value of the one update among these instructions."""
    (update,) = [one for one in instructions if isinstance(one, ApplyGradient)]
    assert np.ptp(update.gradient_D) == 0
    return float(update.gradient_D[0])


def sent(instructions: list[Instruction]) -> dict[int, MessageKind]:
    return {one.peer: one.message.kind for one in instructions if isinstance(one, SendMessage)}


def test_synchronous_mode_updates_once_with_the_samples_of_all_workers() -> None:
    worker = machine()
    instructions = worker.handle(own(1, 1.0, batch=10))
    assert sent(instructions) == {1: MessageKind.GRADIENT, 2: MessageKind.GRADIENT}
    assert not any(isinstance(one, ApplyGradient) for one in instructions)
    assert worker.handle(gradient(ONE, 1, 2.0, batch=30)) == []
    assert worker.waiting_for() == {2}
    instructions = worker.handle(gradient(TWO, 1, 4.0, batch=60))
    assert value_of(instructions) == pytest.approx((10 * 1 + 30 * 2 + 60 * 4) / 100)
    assert isinstance(instructions[0], ApplyGradient)
    assert instructions[0].samples == 100


def test_dlion_ratio_weights_as_published() -> None:
    worker = machine(exchange={**FULL, "weighting": "dlion_ratio"})
    worker.handle(own(1, 1.0, batch=10))
    worker.handle(gradient(ONE, 1, 2.0, batch=30))
    instructions = worker.handle(gradient(TWO, 1, 4.0, batch=60))
    assert value_of(instructions) == pytest.approx((1 + 3 * 2 + 6 * 4) / 3)


def test_an_early_contribution_waits_for_its_iteration() -> None:
    worker = machine()
    worker.handle(own(1, 1.0))
    worker.handle(gradient(ONE, 1, 1.0))
    worker.handle(gradient(ONE, 2, 7.0))  # one may be a step ahead
    assert value_of(worker.handle(gradient(TWO, 1, 1.0))) == pytest.approx(1.0)
    worker.handle(own(2, 1.0))
    assert value_of(worker.handle(gradient(TWO, 2, 1.0))) == pytest.approx(3.0)


def test_a_worker_that_left_is_not_awaited_but_its_contribution_counts() -> None:
    worker = machine()
    worker.handle(own(1, 1.0))
    worker.handle(gradient(ONE, 1, 3.0))
    worker.handle(MemberLeft(ONE))
    assert worker.waiting_for() == {2}
    assert value_of(worker.handle(MemberLeft(TWO))) == pytest.approx(2.0)
    assert value_of(worker.handle(own(2, 5.0))) == pytest.approx(
        5.0
    )  # alone: the whole batch is its own


def test_a_gradient_that_is_late_for_its_barrier_is_dropped() -> None:
    worker = machine()
    worker.handle(own(1, 1.0))
    worker.handle(MemberLeft(TWO))
    worker.handle(gradient(ONE, 1, 1.0))
    worker.handle(MemberJoined(TWO))
    worker.handle(gradient(TWO, 1, 9.0))  # the others have continued without it
    worker.handle(gradient(TWO, 2, 1.0))
    worker.handle(own(2, 1.0))
    assert value_of(worker.handle(gradient(ONE, 2, 1.0))) == pytest.approx(1.0)


def test_backup_mode_updates_without_the_slowest_and_adds_it_later() -> None:
    worker = machine("backup", backup=1)
    worker.handle(own(1, 3.0))
    assert value_of(worker.handle(gradient(ONE, 1, 3.0))) == pytest.approx(2.0)  # two thirds
    assert worker.waiting_for() == frozenset()
    worker.handle(gradient(TWO, 1, 9.0))  # late: one third goes into the next update
    worker.handle(own(2, 3.0))
    assert value_of(worker.handle(gradient(ONE, 2, 3.0))) == pytest.approx(2.0 + 3.0)


@pytest.mark.parametrize("mode", ["bounded", "asynchronous"])
def test_other_modes_update_at_each_step_with_the_received_gradients(mode: str) -> None:
    worker = machine(mode)
    assert value_of(worker.handle(own(1, 3.0))) == pytest.approx(1.0)
    assert worker.handle(gradient(ONE, 1, 3.0, batch=20)) == []
    assert worker.handle(gradient(TWO, 1, 6.0, batch=10)) == []
    expected = (10 * 3.0 + 20 * 3.0 + 10 * 6.0) / 40
    assert value_of(worker.handle(own(2, 3.0))) == pytest.approx(expected)
    assert value_of(worker.handle(own(3, 4.0))) == pytest.approx(1.0)  # nothing was received


def test_a_part_of_a_gradient_is_applied_at_its_positions() -> None:
    worker = machine("asynchronous")
    payload = encode_sparse(
        np.array([1, 3]), np.array([6.0, 9.0], np.float32), 4, ValueCodec.FLOAT32
    )
    worker.handle(
        MessageArrived(ONE, Message(MessageKind.GRADIENT, 1, local_batch_size=10, payload=payload))
    )
    (update,) = [one for one in worker.handle(own(1, 3.0)) if isinstance(one, ApplyGradient)]
    np.testing.assert_allclose(update.gradient_D, [1.0, 3.0, 1.0, 4.0], rtol=1e-6)


def test_without_exchange_each_worker_trains_alone_and_reports_its_progress() -> None:
    worker = machine("synchronous", exchange={"policy": "none"})
    instructions = worker.handle(own(1, 3.0))
    assert sent(instructions) == {1: MessageKind.PROGRESS, 2: MessageKind.PROGRESS}
    assert value_of(instructions) == 3.0
    worker.handle(gradient(ONE, 1, 100.0))
    assert worker.waiting_for() == frozenset()
    assert value_of(worker.handle(own(2, 3.0))) == 3.0


@pytest.mark.parametrize("propagation", ["all", "selective"])
@pytest.mark.parametrize("prioritization", [True, False])
def test_without_prioritization_a_tight_link_gets_the_whole_gradient(
    prioritization: bool, propagation: str
) -> None:
    exchange = {"policy": "dlion", "codec": "float32", "propagation": propagation}
    layout, budget_bytes = Layout(("w",), (1000,)), 400
    worker = build(
        spec(exchange={**exchange, "prioritization": prioritization}), ME, layout, [ME, ONE]
    )
    worker.handle(MemberJoined(ONE))
    worker.handle(BudgetsChanged({ONE: budget_bytes}))
    gradient_D = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    instructions = worker.handle(LocalStepDone(1, gradient_D.copy(), 10, loss=0.5))
    (message,) = [one.message for one in instructions if isinstance(one, SendMessage)]
    assert message.kind is MessageKind.GRADIENT
    assert (message.size_bytes <= budget_bytes) == prioritization
    if prioritization:
        assert 0 < len(decode_gradient(message.payload, 1000).value_K) < 1000
    else:
        np.testing.assert_array_equal(decode_gradient(message.payload, 1000).value_K, gradient_D)


def test_progress_counts_with_its_samples() -> None:
    worker = machine()
    worker.handle(own(1, 4.0))
    worker.handle(progress(ONE, 1))
    assert value_of(worker.handle(progress(TWO, 1, batch=20))) == pytest.approx(1.0)


def test_progress_without_samples_gives_only_the_iteration() -> None:
    worker = machine()
    worker.handle(own(1, 4.0))
    worker.handle(progress(ONE, 1, batch=0))
    assert value_of(worker.handle(progress(TWO, 1, batch=30))) == pytest.approx(1.0)


def test_a_newcomer_receives_the_progress_of_this_worker_at_once() -> None:
    worker = machine("asynchronous", joined=False)
    assert worker.handle(MemberJoined(ONE)) == []
    worker.handle(own(1))
    (progress_sent,) = worker.handle(MemberJoined(TWO))
    assert isinstance(progress_sent, SendMessage)
    assert progress_sent.message == Message(MessageKind.PROGRESS, 1, local_batch_size=0)


def test_two_workers_synchronize_again_after_a_lost_link() -> None:
    cluster = Cluster(spec(exchange=FULL, synchronization={"mode": "synchronous"}), [4, 4])
    cluster.lockstep(2)
    for rank, peer in ((ME, ONE), (ONE, ME)):
        cluster.handle(rank, MemberLeft(peer))
    cluster.step(ME)  # each continues alone
    for rank, peer in ((ME, ONE), (ONE, ME)):
        cluster.handle(rank, MemberJoined(peer))
    cluster.deliver_all()
    cluster.step(ONE)
    cluster.step(ME)
    assert not cluster.may_step(ME)
    cluster.deliver_all()
    cluster.step(ONE)
    cluster.deliver_all()
    assert cluster.may_step(ME)


def test_a_gradient_received_twice_counts_once() -> None:
    worker = machine("asynchronous")
    worker.handle(gradient(ONE, 1, 3.0))
    worker.handle(gradient(ONE, 1, 3.0))
    assert value_of(worker.handle(own(1, 3.0))) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message(MessageKind.GRADIENT, 1, local_batch_size=10, payload=b"xyz"), "3 bytes"),
        (Message(MessageKind.GRADIENT, 1, local_batch_size=0, payload=b"xyz"), "batch of 0"),
        (Message(MessageKind.PROGRESS, 1, local_batch_size=-1), "batch of -1"),
        (Message(MessageKind.PROGRESS, 1, local_batch_size=10**9), "batch of 1000000000"),
        (Message(MessageKind.PROGRESS, 0, local_batch_size=1), "iteration 0"),
        (Message(MessageKind.PROGRESS, 1, local_batch_size=1, payload=b"x"), "payload"),
        (
            Message(
                MessageKind.GRADIENT,
                1,
                local_batch_size=1,
                payload=encode_whole(np.ones(5, np.float32), ValueCodec.FLOAT32),
            ),
            "model of 5",
        ),
    ],
)
def test_an_invalid_message_is_refused_and_changes_nothing(message: Message, words: str) -> None:
    worker = machine("asynchronous")
    (refusal,) = worker.handle(MessageArrived(ONE, message))
    assert isinstance(refusal, RejectMessage)
    assert words in refusal.reason
    assert value_of(worker.handle(own(1, 3.0))) == pytest.approx(1.0)


def test_an_invalid_gradient_delays_no_worker_and_contributes_nothing() -> None:
    worker = machine()
    worker.handle(own(1, 1.0))
    worker.handle(gradient(ONE, 1, 3.0))
    nonsense = Message(MessageKind.GRADIENT, 1, local_batch_size=10, payload=b"nonsense")
    instructions = worker.handle(MessageArrived(TWO, nonsense))
    assert isinstance(instructions[0], RejectMessage)
    assert value_of(instructions) == pytest.approx((1.0 + 3.0) / 2)
    assert not worker.waiting_for()


def test_messages_of_strangers_are_refused() -> None:
    worker = machine()
    for stranger in (Rank(7), ME):
        (refusal,) = worker.handle(gradient(stranger, 1, 1.0))
        assert isinstance(refusal, RejectMessage)


def test_a_worker_never_sends_a_gradient_that_is_not_finite() -> None:
    for policy in ("full", "dlion"):
        worker = machine(exchange={"policy": policy})
        with pytest.raises(ValueError, match="NaN or infinite"):
            worker.handle(own(1, float("nan")))


def test_losses_are_refused_in_a_job_without_knowledge_transfer() -> None:
    worker = machine("asynchronous")
    loss = Message(MessageKind.LOSS, 100, payload=encode_loss(1.0))
    assert worker.handle(MessageArrived(ONE, loss)) == []
    request = Message(MessageKind.WEIGHTS_REQUEST, 100)
    assert worker.handle(MessageArrived(ONE, request)) == []


@pytest.mark.parametrize("mode", ["synchronous", "bounded"])
def test_a_restored_machine_continues_like_the_first(mode: str) -> None:
    first = machine(mode)
    first.handle(own(1, 3.0))
    first.handle(gradient(ONE, 1, 1.0))
    first.handle(gradient(TWO, 1, 2.0))
    second = machine(mode, joined=False)
    second.restore(first.state())
    for rank in (ONE, TWO):
        second.handle(MemberJoined(rank, 1))
    for worker in (first, second):
        assert worker.next_iteration() == 2
    values = []
    for worker in (first, second):
        instructions = worker.handle(own(2, 5.0))
        instructions += worker.handle(gradient(ONE, 2, 1.0))
        instructions += worker.handle(gradient(TWO, 2, 2.0))
        values.append(value_of(instructions))
    assert values[0] == values[1]


def test_a_checkpoint_of_a_waiting_machine_is_the_one_before_the_step() -> None:
    worker = machine()
    worker.handle(own(1, 3.0))
    again = machine(joined=False)
    again.restore(worker.state())
    assert again.next_iteration() == 1
    assert value_of(again.handle(own(1, 3.0))) == 3.0


@pytest.mark.parametrize("policy", sorted(OPEN_POLICIES))
def test_an_open_policy_works_with_an_unannounced_worker(policy: str) -> None:
    more: dict[str, object] = {
        "demo": {"parameters": {"momentum": 0}},
        "dgc": {"parameters": {"momentum": 0}}, "dlion-published": {"weighting": "dlion_ratio"}
    }.get(policy, {})  # fmt: skip
    job = spec(exchange={"policy": policy, "codec": "float32", **more})
    newcomer, weights = Rank(7), View(np.zeros(4, np.float32))
    built = build(job, ME, LAYOUT, [ME, ONE], grows=True, replica=weights)
    theirs = build(job, newcomer, LAYOUT, [ME, ONE, newcomer], grows=True, replica=weights)
    built.handle(own(1))
    built.handle(MemberJoined(newcomer))
    theirs.handle(MemberJoined(ME, iteration=1))
    instructions = theirs.handle(own(2))
    messages = [
        each.message for each in instructions if isinstance(each, SendMessage) and each.peer == ME
    ]
    answers = [built.handle(MessageArrived(newcomer, message)) for message in messages]
    assert messages
    assert not [each for answer in answers for each in answer if isinstance(each, RejectMessage)]
    closed = build(job, ME, LAYOUT, [ME, ONE], replica=weights)
    for message in messages:
        (refusal,) = closed.handle(MessageArrived(newcomer, message))
        assert isinstance(refusal, RejectMessage)


# ---- an iteration made by others -----------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["sample_mean", "dlion_ratio"])
def test_an_iteration_is_passed_with_the_mean_of_the_others(weighting: str) -> None:
    """The worker sends nothing, and passes only after a message of each other worker."""
    passing = machine(exchange={**FULL, "weighting": weighting})
    assert passing.handle(IterationReplayed(1)) == []
    assert passing.waiting_for() == {ONE, TWO}
    assert passing.handle(gradient(ONE, 1, 1.0, batch=30)) == []
    (descend,) = passing.handle(gradient(TWO, 1, 5.0, batch=10))
    assert isinstance(descend, ApplyGradient)
    np.testing.assert_array_equal(descend.gradient_D, np.full(4, 2.0, np.float32))
    assert descend.samples == 40
    assert (passing.waiting_for(), passing.next_iteration()) == (frozenset(), 2)
    instructions = passing.handle(own(2))
    sends = [one for one in instructions if isinstance(one, SendMessage)]
    assert [(send.peer, send.message.iteration) for send in sends] == [(ONE, 2), (TWO, 2)]


def test_an_iteration_that_all_workers_would_pass_is_not_passed() -> None:
    passing = machine()
    passing.handle(IterationReplayed(1))
    assert [passing.handle(MemberLeft(rank)) for rank in (ONE, TWO)] == [[], []]
    assert (passing.waiting_for(), passing.next_iteration()) == (frozenset(), 2)
