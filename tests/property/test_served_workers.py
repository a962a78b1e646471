"""Workers with a server (`halos`, `quorum-diloco`) that leave, return, restart or send invalid
messages.

A departing worker or server blocks no other, and a returning one takes part again. While single
links break and return, no worker blocks. A change that arrives before its link event is answered.
Invalid messages are refused, answered, and not waited for. So are more samples than a worker can
have processed. A worker that becomes the server again begins from its own weights. A restored
machine continues identically, and does not repeat a sent change.

Left out: the arithmetic of the policies (test_halos, test_quorum_diloco).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import encode_whole
from dlion_core.codecs.values import ValueCodec
from dlion_core.policies.interface import (
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
)
from dlion_core.policies.served.served_worker import Form
from example_counts import examples
from sites_cluster import SitesCluster
from weighing_cluster import own_step
from weights_cluster import comparable, weights_spec

if TYPE_CHECKING:
    from dlion_api.spec import Spec

SIZE = 20
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)
JOBS: dict[str, Spec] = {
    "halos": weights_spec("halos", localSteps=2, accumulate=2),
    "quorum-diloco": weights_spec("quorum-diloco", localSteps=2, overlapSteps=1),
}
seeds = st.integers(0, 2**32)
kinds = st.sampled_from(sorted(JOBS))


def cluster_of(kind: str, seed: int = 0, sites: tuple[int, ...] = (2, 2, 1)) -> SitesCluster:
    sizes = np.random.default_rng(seed).integers(1, 9, sum(sites)).tolist()
    return SitesCluster(JOBS[kind], sizes, sites, seed=seed % 999)


@given(kind=kinds, seed=seeds, turn=st.integers(0, 150), gone=st.integers(0, 4))
@settings(max_examples=examples(80), deadline=None)
def test_a_departing_worker_blocks_no_other(kind: str, seed: int, turn: int, gone: int) -> None:
    cluster = cluster_of(kind, seed)
    rng = np.random.default_rng(seed)
    for _ in range(turn):
        cluster.turn(rng, steps=14)
    cluster.leave(Rank(gone))
    cluster.run_at_least(seed, steps=30)


@given(
    kind=kinds,
    seed=seeds,
    turn=st.integers(0, 150),
    away=st.integers(0, 60),
    gone=st.integers(0, 4),
    resumes=st.booleans(),
)
@settings(max_examples=examples(80), deadline=None)
def test_a_returning_worker_takes_part_again(
    kind: str, seed: int, turn: int, away: int, gone: int, resumes: bool
) -> None:
    cluster = cluster_of(kind, seed)
    rng = np.random.default_rng(seed)
    for _ in range(turn):
        cluster.turn(rng, steps=14)
    rank = Rank(gone)
    kept = cluster.replicas[rank].machine.state() if resumes else None
    cluster.leave(rank)
    for _ in range(away):
        cluster.turn(rng, steps=14)
    cluster.replace_worker(rank, min(cluster.alive), kept)
    begun = cluster.replicas[rank].iteration
    cluster.replicas[rank].instructions.clear()
    cluster.run_at_least(seed, steps=max(40, begun + 20))
    sent = [one for one in cluster.replicas[rank].instructions if isinstance(one, SendMessage)]
    served = rank == ME or any(one.message.kind is MessageKind.WEIGHTS for one in sent)
    assert served or kind == "halos"  # a site's only worker serves itself


@given(kind=kinds, seed=seeds, breaks=st.lists(st.tuples(
    st.integers(0, 4), st.integers(0, 4), st.integers(0, 30)), max_size=6))  # fmt: skip
@settings(max_examples=examples(60), deadline=None)
def test_single_links_that_break_and_return_block_no_worker(
    kind: str, seed: int, breaks: list[tuple[int, int, int]]
) -> None:
    cluster = cluster_of(kind, seed)
    rng = np.random.default_rng(seed)
    down: set[frozenset[int]] = set()
    for one, other, turns in breaks:
        pair = frozenset({one, other})
        if len(pair) == 2 and pair not in down:
            cluster.cut(Rank(one), Rank(other), rng, between=turns)
            down.add(pair)
        for _ in range(turns):
            cluster.turn(rng, steps=10**9)
    for pair in down:
        first, second = sorted(pair)
        cluster.relink(Rank(first), Rank(second))
    now = max(replica.iteration for replica in cluster.replicas.values())
    cluster.run_at_least(seed, steps=now + 20)


@pytest.mark.parametrize("kind", sorted(JOBS))
def test_a_change_before_its_link_event_is_answered(kind: str) -> None:
    cluster = cluster_of(kind, sites=(2,))
    cluster.lockstep(4)
    cluster.handle(ME, MemberLeft(ONE))
    cluster.handle(ONE, MemberLeft(ME))
    cluster.handle(ONE, MemberJoined(ME))
    cluster.links[ME, ONE].clear()
    cluster.links[ONE, ME].clear()
    cluster.handle(ONE, MessageArrived(ME, Message(MessageKind.PROGRESS, 4)))
    while cluster.may_step(ONE) and cluster.replicas[ONE].iteration < 9:
        cluster.step(ONE)
    while cluster.deliver(ONE, ME):
        pass
    cluster.handle(ME, MemberJoined(ONE, cluster.replicas[ONE].iteration))
    cluster.run_at_least(0, steps=30)


def change(values: float = 0.1) -> bytes:
    return bytes(encode_whole(np.full(SIZE, values, np.float32), ValueCodec.FLOAT32))


@pytest.mark.parametrize("kind", sorted(JOBS))
@pytest.mark.parametrize(
    ("version", "batch", "payload", "words"),
    [
        (4 * 4, 2, b"xyz", "3 bytes"),
        (4 * 4, 2, b"", "bytes"),
        (0, 0, change(), "0 samples"),
        (4 * 10**9, 2, change(), "samples"),
        (4 * 4, 5, change(), "samples"),
        (4 * 4, 2, change(1e30), "weights up to"),
        (4 * 4, 2, change(3e38), "weights up to"),
    ],
)
def test_an_invalid_change_is_refused_and_answered(
    kind: str, version: int, batch: int, payload: bytes, words: str
) -> None:
    machine = cluster_of(kind, sites=(3,)).replicas[ME].machine
    instructions = machine.handle(
        MessageArrived(TWO, Message(MessageKind.WEIGHTS, 2, batch, version, payload))
    )
    (refusal,) = [one for one in instructions if isinstance(one, RejectMessage)]
    assert words in refusal.reason
    (answer,) = [one for one in instructions if isinstance(one, SendMessage)]
    assert (answer.peer, answer.message.iteration) == (TWO, 2)
    assert answer.message.weights_version % 4 == 1


@pytest.mark.parametrize("kind", sorted(JOBS))
@pytest.mark.parametrize(
    ("iteration", "samples", "is_refused"), [(9, 1, True), (10, 192, False), (10, 193, True)]
)
def test_changes_count_only_samples_of_possible_iterations(
    kind: str, iteration: int, samples: int, *, is_refused: bool
) -> None:
    """Otherwise a worker that repeats its change would get the whole weight of an outer step."""
    machine = cluster_of(kind, sites=(3,)).replicas[ME].machine
    assert machine.handle(LocalStepDone(1, np.zeros(SIZE, np.float32), 2, 1.0))
    returned = [
        machine.handle(
            MessageArrived(TWO, Message(MessageKind.WEIGHTS, at, 1, 4 * count, change()))
        )
        for at, count in ((9, 192), (iteration, samples))
    ]
    refused = [any(isinstance(one, RejectMessage) for one in each) for each in returned]
    assert refused == [False, is_refused]


@pytest.mark.parametrize("kind", sorted(JOBS))
def test_an_invalid_answer_is_refused_and_not_waited_for(kind: str) -> None:
    cluster = cluster_of(kind, sites=(2,))
    machine = cluster.replicas[ONE].machine
    while cluster.may_step(ONE):
        cluster.step(ONE)
    assert machine.waiting_for() == {ME}
    sent_at = 2
    (refusal,) = machine.handle(
        MessageArrived(ME, Message(MessageKind.WEIGHTS, sent_at, 0, 1, b"?"))
    )
    assert isinstance(refusal, RejectMessage)
    assert not machine.waiting_for()


@pytest.mark.parametrize("kind", sorted(JOBS))
def test_an_unexpected_answer_changes_nothing(kind: str) -> None:
    cluster = cluster_of(kind, sites=(3,))
    cluster.step(ONE)
    weights = bytes(encode_whole(np.ones(SIZE, np.float32), ValueCodec.FLOAT32))
    for sender, at in ((TWO, 2), (ME, 1)):
        message = Message(MessageKind.WEIGHTS, at, 0, 1, weights)
        assert not cluster.replicas[ONE].machine.handle(MessageArrived(sender, message))
    gradient = Message(MessageKind.GRADIENT, 1, 1, 1, weights)
    (refusal,) = cluster.replicas[ONE].machine.handle(MessageArrived(ME, gradient))
    assert isinstance(refusal, RejectMessage)


@given(kind=kinds, seed=seeds, rank=st.sampled_from([ME, ONE]))
@settings(max_examples=examples(20), deadline=None)
def test_a_restored_machine_continues_identically(kind: str, seed: int, rank: Rank) -> None:
    cluster = cluster_of(kind, seed, sites=(2, 1))
    cluster.lockstep(7)
    cluster.deliver_all()
    for one in cluster.replicas.values():
        one.instructions.clear()
    twin = copy.deepcopy(cluster)
    restored = twin.replicas[rank]
    state = restored.machine.state()
    restored.machine = twin.built(restored)
    restored.machine.restore(copy.deepcopy(state))
    twin._may_step.clear()
    for one in (cluster, twin):
        for peer in one.ranks:
            if peer != rank:
                one.handle(rank, MemberLeft(peer))
                one.handle(rank, MemberJoined(peer, 7))
                one.handle(rank, MessageArrived(peer, Message(MessageKind.PROGRESS, 7, 2)))
    assert str(restored.machine.state()) == str(cluster.replicas[rank].machine.state())
    rng = np.random.default_rng(seed)
    sender = ONE if rank == ME else ME
    for iteration in range(8, 14):
        vector_D = (0.01 * rng.standard_normal(SIZE)).astype(np.float32)
        payload = bytes(encode_whole(vector_D, ValueCodec.FLOAT32))
        message = Message(MessageKind.WEIGHTS, iteration, 2, 4 * 2, payload)
        for one in (cluster, twin):
            one.replicas[rank].instructions.clear()
            if not one.replicas[rank].machine.waiting_for():
                one.handle(rank, own_step(iteration, vector_D, 2))
            if iteration % 2 == 0:
                version = 4 * iteration if rank == ME else 1
                one.handle(rank, MessageArrived(sender, replace(message, weights_version=version)))
        assert comparable(cluster.replicas[rank].instructions) == comparable(
            twin.replicas[rank].instructions
        )
    np.testing.assert_array_equal(cluster.weights(), twin.weights())


@pytest.mark.parametrize("kind", sorted(JOBS))
def test_a_sent_change_is_not_sent_again_after_a_restart(kind: str) -> None:
    cluster = cluster_of(kind, sites=(2,))
    one_D = np.ones(SIZE, np.float32)
    for _ in range(2):
        cluster.step(ONE, one_D)
    replica = cluster.replicas[ONE]
    state = replica.machine.state()
    np.testing.assert_array_equal(state["anchor_D"], replica.weights_D)
    assert (state["round_steps"], state["round_samples"]) == (0, 0)


@pytest.mark.parametrize("kind", sorted(JOBS))
def test_a_server_that_returns_begins_from_its_own_weights(kind: str) -> None:
    """It was the server while the lower rank was away. Its weights from then are out of date."""
    cluster = cluster_of(kind, sites=(2,))
    cluster.leave(ME)
    cluster.run_at_least(0, steps=10)
    cluster.replace_worker(ME, ONE)
    cluster.step(ME)
    while cluster.deliver(ME, ONE):
        pass
    cluster.run_at_least(0, steps=30)
    far_D = np.full(SIZE, 50, np.float32)
    for replica in cluster.replicas.values():
        replica.weights_D[:] = far_D
        replica.machine.machine._anchor_D = far_D.copy()
    cluster.leave(ME)
    given_D = cluster.replicas[ONE].machine.machine.model_for(Form.CHANGE)
    np.testing.assert_allclose(given_D, far_D)


@pytest.mark.parametrize("kind", sorted(JOBS))
def test_a_gradient_that_is_not_finite_is_never_used(kind: str) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        cluster_of(kind).step(ME, np.full(SIZE, np.nan, np.float32))
