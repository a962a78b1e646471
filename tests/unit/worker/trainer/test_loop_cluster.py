"""Tests of training loops of workers that vanish and return.

Workers run in lock step. One or two vanish, also the lowest rank, and return while messages are in
flight. They join the others at an iteration, and all weights stay bit-identical after every step.
No worker stops permanently, even if only one is left that trains. Under `dlion`, whose replicas
differ, no worker waits while a latecomer adopts a state.

Before `minSites` sites have joined, no worker begins, however many workers of one site have. Each
step reports the number of passes through the data. Workers that the coordinator stops finish a
round of local steps if its end is close.

Loop, entrance, inbox and policies are real; `loop_cluster` replaces TensorFlow and the network.
Threads and delays are real and short, so schedules differ from run to run. The seed determines
which workers are killed.

Left out: a worker that vanishes after only some peers have its gradient; one that has just joined
and is all that is left for other latecomers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.measurements import LinkDelivery, SentBytes
from dlion_core.policies.interface import Message, MessageKind
from dlion_worker.trainer import admission, loop
from loop_cluster import Network, Node, synchronous_job

WORKERS, KILLS, NAP_S, DELAY_S = 4, 4, 0.003, 0.003
STATE_S = 3.0
"""Longer than any delay of a message by busy threads."""


def _wait(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


def differing(nodes: list[Node]) -> list[int]:
    known: dict[int, set[str]] = {}
    for node in nodes:
        for iteration, weights_hash in node.hashes.copy().items():
            known.setdefault(iteration, set()).add(weights_hash)
    return sorted(iteration for iteration, hashes in known.items() if len(hashes) > 1)


def test_a_step_reports_the_passes_through_the_data() -> None:
    """A thousand samples (`loop_cluster`), a global batch each step."""
    job = synchronous_job(1, 5)
    node = Node(job, Rank(0), Network(random.Random(0), 0.0), 1, 0.0).start()
    node.thread.join(60)
    assert node.error is None
    batch = job.spec.batching.global_batch_size.initial
    epochs = [step.epochs for step in node.steps]
    assert epochs == [iteration * batch / 1000 for iteration in range(1, 6)]


def test_bytes_sent_after_the_last_step_are_reported_to_the_sidecar() -> None:
    """Only the last report of links has them; earlier bytes come with a step."""
    node = Node(synchronous_job(1, 2), Rank(0), Network(random.Random(0), 0.0), 1, 0.0).start()
    node.thread.join(60)
    assert node.error is None
    sent: list[LinkDelivery] = []
    delivery = LinkDelivery(Rank(1), 10, 5, 0.5, 3, SentBytes(state_bytes=1000))
    parts: Any = node.loop._parts
    parts.exchange.take_deliveries = lambda: [delivery]
    parts.sidecar.send = lambda *records: sent.extend(records)
    node.loop.report_links()
    assert sent == []
    node.loop.report_links(now=True)
    assert sent == [delivery]


class StoppedWithinRound(Node):
    """It is asked to stop after its sixth step; rounds end after the fifth and the tenth."""

    asked_at = 6

    def _note(self, step: Any) -> None:
        super()._note(step)
        if step.iteration == self.asked_at:
            self.ask_to_stop()


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_are_asked_to_stop_finish_their_round_and_are_equal(seed: int) -> None:
    """All stop in the same round, at different steps of it."""
    job = synchronous_job(3, 10_000_000, policy="adaptive", localSteps=5)
    network = Network(random.Random(seed), DELAY_S)
    nodes = [StoppedWithinRound(job, Rank(r), network, 1, NAP_S) for r in range(3)]
    for node in nodes:
        node.asked_at = 6 + (node.rank + seed) % 3
        node.start()
    for node in nodes:
        node.thread.join(30)
    assert [node.error for node in nodes] == [None] * 3
    assert [max(node.hashes) for node in nodes] == [10] * 3
    assert len({node.replica.weights_D.tobytes() for node in nodes}) == 1


class StopsOnceAnotherIsFurther(Node):
    """Both are asked to stop when it is at the end of a round, and `other` is within the next."""

    other: Node

    def _note(self, step: Any) -> None:
        super()._note(step)
        if step.iteration == 5:
            _wait(lambda: max(self.other.hashes) > 5, "the other's next round")
            self.ask_to_stop()
            self.other.ask_to_stop()


@pytest.mark.parametrize("policy", ["adaptive", "localsgd", "sparseloco"])
def test_a_worker_within_a_round_ends_with_the_last_one_of_a_peer_that_has_stopped(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FINISH_ROUND_WITHIN_S", 60.0)  # until the announcement is there
    job = synchronous_job(2, 10_000_000, policy=policy, localSteps=5)
    network = Network(random.Random(0), DELAY_S)
    stopping = StopsOnceAnotherIsFurther(job, Rank(0), network, 1, NAP_S)
    stopping.other = other = Node(job, Rank(1), network, 1, NAP_S)
    for node in (stopping, other):
        node.start()
    for node in (stopping, other):
        node.thread.join(30)
    assert [stopping.error, other.error] == [None, None]
    assert stopping.replica.last_round is None
    last = other.replica.last_round
    assert last is not None
    assert last.iteration == stopping.progress.iteration == 5
    assert other.progress.own_samples - last.samples_since == stopping.progress.own_samples
    assert last.anchor_D.tobytes() == stopping.replica.weights_D.tobytes()
    assert other.progress.iteration > 5, "its checkpoint continues from its own last step"
    assert other.replica.weights_D.tobytes() != last.anchor_D.tobytes()


@pytest.mark.parametrize("policy", ["adaptive", "localsgd", "sparseloco"])
def test_a_worker_that_took_over_a_state_has_no_round_to_end_with(policy: str) -> None:
    """It has no anchor before its first step, and a peer may stop at that iteration."""
    job = synchronous_job(2, 10_000_000, policy=policy, localSteps=5)
    node = Node(job, Rank(0), Network(random.Random(0), DELAY_S), 1, NAP_S)
    node.machine.take_over(10)
    assert node.machine.round_at(10) is None


def test_a_long_round_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FINISH_ROUND_WITHIN_S", 0.1)
    job = synchronous_job(2, 10_000_000, policy="localsgd", localSteps=10_000)
    network = Network(random.Random(0), DELAY_S)
    nodes = [Node(job, Rank(r), network, 1, NAP_S).start() for r in range(2)]
    _wait(lambda: all(len(node.hashes) > 5 for node in nodes), "some steps")
    for node in nodes:
        node.ask_to_stop()
    for node in nodes:
        node.stop()
    assert [node.error for node in nodes] == [None] * 2


@pytest.mark.parametrize(("last", "made", "least"), [(7, 7, 6), (12, 10, 10)])
def test_a_round_is_finished_unless_the_run_ends_within_it(
    last: int, made: int, least: int
) -> None:
    """A worker that knows of the other's end makes no more steps of a round that no worker
    finishes.
    """
    job = synchronous_job(2, last, policy="adaptive", localSteps=5)
    network = Network(random.Random(0), DELAY_S)
    nodes = [StoppedWithinRound(job, Rank(r), network, 1, NAP_S).start() for r in range(2)]
    for node in nodes:
        node.thread.join(30)
    assert [node.error for node in nodes] == [None] * 2
    steps = [max(node.hashes) for node in nodes]
    assert max(steps) == made
    assert min(steps) >= least


CASES = [(0, "full"), (1, "full"), (2, "dlion")]


@pytest.mark.parametrize(("seed", "policy"), CASES)
def test_a_worker_that_returns_has_the_weights_of_the_others(seed: int, policy: str) -> None:
    job, rng = synchronous_job(WORKERS, 10_000_000, policy=policy), random.Random(seed)
    network = Network(rng, DELAY_S)
    nodes = {Rank(r): Node(job, Rank(r), network, 1, NAP_S).start() for r in range(WORKERS)}
    try:
        for kill in range(KILLS):
            dead = [Rank(0)] if kill == 0 else rng.sample(sorted(nodes), rng.choice([1, 2]))
            for rank in dead:
                nodes[rank].kill()
            time.sleep(0.05 * rng.random())
            for rank in dead:
                nodes[rank] = Node(job, rank, network, kill + 2, NAP_S).start()
            deadline_s = time.monotonic() + 30
            while not all(len(nodes[rank].hashes) > 10 for rank in dead):
                assert time.monotonic() < deadline_s, f"seed {seed}: {dead} did not return"
                time.sleep(0.01)
            different = differing(list(nodes.values())) if policy == "full" else []
            assert not different, f"seed {seed}, after kill {kill} of {dead}"
    finally:
        for node in nodes.values():
            node.kill()
    assert not [node.error for node in nodes.values() if node.error is not None]


@pytest.mark.parametrize(("workers", "lost"), [(2, 1), (3, 2)])
def test_a_latecomer_joins_the_only_worker_left_although_it_jumps_ahead(
    workers: int, lost: int
) -> None:
    """Alone, it is faster than a question. So a later iteration is named, and it jumps there."""
    job, rng = synchronous_job(workers, 10_000_000), random.Random(workers)
    network = Network(rng, 3 * DELAY_S)
    nodes = {Rank(r): Node(job, Rank(r), network, 1, NAP_S / 3).start() for r in range(workers)}
    try:
        for kill in range(KILLS):
            _wait(lambda: all(len(node.hashes) > 3 for node in nodes.values()), f"kill {kill}")
            dead = rng.sample(sorted(nodes), lost)
            for rank in dead:
                nodes[rank].kill()
            for rank in dead:
                nodes[rank] = Node(job, rank, network, kill + 2, NAP_S / 3).start()
        _wait(lambda: all(len(node.hashes) > 10 for node in nodes.values()), "after the last")
        assert not differing(list(nodes.values()))
    finally:
        for node in nodes.values():
            node.kill()
    assert not [node.error for node in nodes.values() if node.error is not None]


@pytest.mark.parametrize(("seed", "policy"), CASES)
def test_no_worker_waits_permanently_when_others_vanish_while_they_join(
    seed: int, policy: str
) -> None:
    """At any moment one of two workers trains, and the other joins and vanishes."""
    job, rng = synchronous_job(2, 10_000_000, policy=policy), random.Random(seed)
    network, every = Network(rng, DELAY_S), []
    nodes = {Rank(r): Node(job, Rank(r), network, 1, NAP_S).start() for r in range(2)}
    try:
        for kill in range(4 * KILLS):
            _wait(lambda: any(node.is_training for node in nodes.values()), f"kill {kill}")
            remaining = rng.choice(sorted(rank for rank, node in nodes.items() if node.is_training))
            (leaving,) = nodes.keys() - {remaining}
            if nodes[
                remaining
            ].hashes:  # else it may lack the last steps of the worker that vanishes
                every.append(nodes[leaving])
            nodes[leaving].kill()
            nodes[leaving] = Node(job, leaving, network, kill + 2, NAP_S).start()
            time.sleep(0.04 * rng.random())
        _wait(lambda: all(len(node.hashes) > 10 for node in nodes.values()), "after the last")
        assert policy != "full" or not differing([*every, *nodes.values()])
    finally:
        for node in nodes.values():
            node.kill()
    assert not [node.error for node in nodes.values() if node.error is not None]


@pytest.mark.parametrize(("workers", "policy"), [(2, "dlion"), (4, "dlion"), (4, "full")])
def test_the_others_continue_while_a_state_is_transferred(workers: int, policy: str) -> None:
    """Policies with equal replicas are the exception."""
    job, rng = synchronous_job(workers, 10_000_000, policy=policy), random.Random(workers)
    network = Network(rng, DELAY_S, state_s=STATE_S)
    nodes = [Node(job, Rank(r), network, 1, NAP_S).start() for r in range(workers)]
    try:
        _wait(lambda: all(len(node.hashes) > 20 for node in nodes), "the beginning")
        nodes[0].kill()
        remaining, done = nodes[1:], len(nodes[1].steps)
        nodes[0] = Node(job, Rank(0), network, 2, NAP_S).start()
        _wait(lambda: len(nodes[0].hashes) > 10, "it is back")
        longest_s = max(step.waited_s for node in remaining for step in node.steps[done:])
        assert (longest_s < 0.8 * STATE_S) == (policy == "dlion")
        first = min(nodes[0].hashes)
        assert all(first in node.hashes for node in remaining)
    finally:
        for node in nodes:
            node.kill()
    assert not [node.error for node in nodes if node.error is not None]


def test_an_impossible_message_does_not_stop_others_from_catching_up() -> None:
    job, rng = synchronous_job(3, 10_000_000, policy="dlion"), random.Random(3)
    network = Network(rng, DELAY_S, state_s=STATE_S / 4)
    nodes = [Node(job, Rank(r), network, 1, NAP_S).start() for r in range(3)]
    try:
        _wait(lambda: all(len(node.hashes) > 20 for node in nodes), "the beginning")
        nodes[0].kill()
        nodes[0] = Node(job, Rank(0), network, 2, NAP_S).start()
        _wait(lambda: bool(nodes[0].inbox.first_steps()), "it hears the others")
        far = Message(MessageKind.GRADIENT, 10**12, local_batch_size=1, payload=b"nonsense")
        network.send(Rank(1), Rank(0), far)
        _wait(lambda: len(nodes[0].hashes) > 10, "it is back")
    finally:
        for node in nodes:
            node.kill()
    assert not [node.error for node in nodes if node.error is not None]


def test_a_site_with_two_workers_counts_once_for_the_quorum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`startDeadlineSeconds` is over, and the last worker completes the `minSites` sites."""
    looks: list[float] = []

    def an_hour_later() -> float:
        looks.append(3600.0 * len(looks))
        return looks[-1]

    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=an_hour_later))
    job = synchronous_job({"a": 2, "b": 2}, 10_000_000, min_sites=2, deadline_s=1)
    network = Network(random.Random(0), DELAY_S)
    nodes = [Node(job, Rank(r), network, 1, NAP_S).start() for r in range(2)]
    try:
        _wait(lambda: all(len(node.inbox.answers) == 1 for node in nodes), "linked")
        looked = len(looks)
        _wait(
            lambda: len(looks) > looked + 4 or any(node.is_training for node in nodes),
            "looked again",
        )
        assert not any(node.is_training for node in nodes)
        nodes.append(Node(job, Rank(2), network, 1, NAP_S).start())
        _wait(lambda: all(len(node.hashes) > 3 for node in nodes), "without the last of site b")
    finally:
        for node in nodes:
            node.kill()
    assert not [node.error for node in nodes if node.error is not None]
