"""Tests of replicas.

Knowledge transfer merges weights as (1 - fraction) own + fraction other, and keeps the optimizer's
moments. The merge of two sides does the same and resets the moments. A peer that adopts a state
continues exactly like its donor, and refuses a state that does not fit. The weights of a replica
are not sent to a peer that has equal ones. A state that must include an update is given once it
does, without the values that the policy withholds.

The replica is real and compared with float64 by hand.

Left out: donors and recipients (tests/unit/core/policies/test_knowledge_transfer.py); the packing
of states (test_snapshot.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.spec import Job, load_job
from dlion_core.links.events import StateRequest, StateSnapshot
from dlion_core.policies.weights.local_rounds import LastRound
from dlion_worker.training.evaluation import replica_hash
from dlion_worker.training.model import FlatModel
from dlion_worker.training.optimizer import FlatOptimizer
from dlion_worker.training.programs import builtin
from dlion_worker.training.replica import LocalReplica

FRACTION = 0.75


def job() -> Job:
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "test"},
            "spec": {
                "sites": [{"name": "a", "groups": [{"name": "small", "workers": 2}]}],
                "trainer": {
                    "program": {"builtin": "digits"},
                    "dataset": {"name": "digits"},
                    "optimizer": {"name": "sgd", "learningRate": 0.1, "momentum": 0.9},
                    "stop": {"maxSteps": 1},
                },
            },
        }
    )


@pytest.fixture
def replica() -> LocalReplica:
    return fresh(seed=1)


def fresh(seed: int) -> LocalReplica:
    """A replica that already has moments."""
    model = FlatModel(builtin("digits"), input_shape=(8, 8, 1), class_count=10, seed=seed)
    optimizer = FlatOptimizer(job().spec.trainer.optimizer, model.layout.size)
    made = LocalReplica(job(), Rank(0), model, optimizer)
    apply_gradient(made, iteration=1)
    return made


def apply_gradient(replica: LocalReplica, *, iteration: int) -> None:
    rng = np.random.default_rng(iteration)
    gradient_D = rng.normal(size=replica.model.layout.size).astype(np.float32)
    replica.apply_gradient(
        gradient_D, batch_samples=32, iteration=iteration, samples=32 * iteration
    )


def other_weights(replica: LocalReplica) -> np.ndarray:
    rng = np.random.default_rng(7)
    return rng.normal(size=replica.model.layout.size).astype(np.float32)


def merged(own_D: np.ndarray, other_D: np.ndarray) -> np.ndarray:
    return (1 - FRACTION) * own_D.astype(np.float64) + FRACTION * other_D.astype(np.float64)


def test_a_transfer_merges_weights_and_keeps_moments(replica: LocalReplica) -> None:
    own_D, moments_M = replica.model.weights_D.copy(), replica.optimizer.flat_state().copy()
    other_D = other_weights(replica)

    replica.blend(other_D, FRACTION)

    np.testing.assert_allclose(replica.model.weights_D, merged(own_D, other_D), atol=1e-6)
    assert moments_M[:-2].any()
    np.testing.assert_array_equal(replica.optimizer.flat_state(), moments_M)


def test_two_replicas_that_merge_at_their_resting_weights_are_equal_after_some_steps() -> None:
    """This holds for any moments: a replica takes the weights to which the other's moments lead."""
    one, other = fresh(seed=1), fresh(seed=1)
    for iteration in range(1, 6):
        apply_gradient(one, iteration=iteration)
    asking_D, other_D = one.resting_D, other.resting_D
    apart = abs(one.weights_D - other.weights_D).max()

    one.blend(other_D, 1.0, asking_D)
    for iteration in range(6, 126):
        for each in (one, other):
            apply_gradient(each, iteration=iteration)

    assert apart > 1e-3
    np.testing.assert_allclose(one.weights_D, other.weights_D, atol=0.01 * apart)


def test_a_worker_that_adopts_a_state_continues_like_its_donor(replica: LocalReplica) -> None:
    receiver = fresh(seed=2)
    receiver.restore_from(replica.snapshot_for(StateRequest()))
    assert receiver.iteration == replica.iteration == 1
    for one in (replica, receiver):
        apply_gradient(one, iteration=2)
    np.testing.assert_array_equal(receiver.model.weights_D, replica.model.weights_D)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda one: replace(one, payload=one.payload[4:]), "different programs"),
        (lambda one: replace(one, payload=b"\xff" * len(one.payload)), "not finite"),
        (lambda one: replace(one, iteration=2**63), "of iteration"),
    ],
)
def test_a_state_that_cannot_be_adopted_is_refused_before(
    replica: LocalReplica, damage: Any, text: str
) -> None:
    snapshot, receiver = replica.snapshot_for(StateRequest()), fresh(seed=2)
    before_D = receiver.weights_D.copy()
    receiver.check_state(snapshot)
    with pytest.raises(ContractError, match=text):
        receiver.check_state(damage(snapshot))
    np.testing.assert_array_equal(receiver.weights_D, before_D)


@pytest.mark.parametrize("iteration", [0, 1])
def test_untrained_weights_are_measured_before_a_peers_replace_them(
    replica: LocalReplica, iteration: int
) -> None:
    receiver, rng = fresh(seed=2), np.random.default_rng(3)
    receiver.iteration = iteration
    receiver.measure_on(rng.random((20, 8, 8, 1), np.float32), np.arange(20) % 10)
    before = receiver.loss_of(None)
    receiver.restore_from(replica.snapshot_for(StateRequest()))
    assert receiver.loss_of(None) != before
    assert receiver.untrained_loss == (None if iteration else before)


def test_values_withheld_from_peers_are_not_given_with_a_state(replica: LocalReplica) -> None:
    withheld_D = other_weights(replica)
    replica.withhold(withheld_D)
    receiver = fresh(seed=2)
    receiver.withhold(other_weights(receiver))
    receiver.restore_from(replica.snapshot_for(StateRequest()))
    expected_D = replica.model.weights_D - withheld_D
    np.testing.assert_array_equal(receiver.model.weights_D, expected_D)
    again = fresh(seed=3)
    again.restore_from(receiver.snapshot_for(StateRequest()))
    np.testing.assert_array_equal(again.model.weights_D, expected_D, "what it withheld is void")
    judged = replica.snapshot_for(StateRequest(weights_only=True))
    assert bytes(judged.payload).startswith(replica.model.weights_D.tobytes())


def test_equal_weights_are_not_sent(replica: LocalReplica) -> None:
    peer = fresh(seed=1).state()
    wanted = StateRequest(
        weights_only=True, unless_hash=replica_hash(peer.weights_D, peer.model_state_S)
    )
    given = replica.snapshot_for(wanted)
    assert given == StateSnapshot(1, 32, b"", is_equal=True)
    whole = replica.snapshot_for(replace(wanted, weights_only=False))
    assert len(whole.payload) > 2 * replica.model.weights_D.nbytes, "with the moments"
    apply_gradient(replica, iteration=2)
    assert replica.snapshot_for(wanted) == replica.snapshot_for(StateRequest(weights_only=True))


def test_at_the_end_peers_get_the_last_round_and_training_keeps_its_weights(
    replica: LocalReplica,
) -> None:
    anchor_D = replica.model.weights_D.copy()
    apply_gradient(replica, iteration=2)
    trained_D = replica.model.weights_D.copy()
    replica.end_with(LastRound(iteration=1, samples_since=32, anchor_D=anchor_D))
    own = replica.collected(iteration=2, samples=64)
    assert (own.iteration, own.samples) == (1, 32)
    np.testing.assert_array_equal(own.state.weights_D, anchor_D)
    own_hash = replica_hash(own.state.weights_D, own.state.model_state_S)
    given = replica.snapshot_for(StateRequest(weights_only=True, unless_hash=own_hash))
    assert given == StateSnapshot(1, 32, b"", is_equal=True)
    np.testing.assert_array_equal(replica.model.weights_D, trained_D)


def test_no_state_is_given_between_an_update_and_its_consequences(
    replica: LocalReplica,
) -> None:
    withheld_D = other_weights(replica)
    gradient_D = np.ones(replica.model.layout.size, np.float32)
    with ThreadPoolExecutor() as pool:
        given = []

        def on_updated() -> None:
            given.append(pool.submit(replica.snapshot_for, StateRequest()))
            with pytest.raises(TimeoutError):
                given[0].result(timeout=0.1)
            replica.withhold(withheld_D)

        replica.apply_gradient(
            gradient_D, batch_samples=32, iteration=2, samples=64, on_updated=on_updated
        )
        snapshot = given[0].result(timeout=30)
    expected_D = replica.model.weights_D - withheld_D
    assert bytes(snapshot.payload).startswith(expected_D.tobytes())


def test_a_state_is_given_once_it_includes_the_requested_update(replica: LocalReplica) -> None:
    with ThreadPoolExecutor() as pool:
        given = pool.submit(replica.snapshot_for, StateRequest(at_least=3))
        for iteration in (2, 3):
            with pytest.raises(TimeoutError):
                given.result(timeout=0.05)
            apply_gradient(replica, iteration=iteration)
        snapshot = given.result(timeout=30)
    assert snapshot.iteration == 3
    weights_D = replica.model.weights_D
    assert bytes(snapshot.payload).startswith(weights_D.tobytes())


def test_a_requested_update_may_come_with_a_peers_state(replica: LocalReplica) -> None:
    donor = fresh(seed=2)
    apply_gradient(donor, iteration=5)
    state = donor.snapshot_for(StateRequest())
    with ThreadPoolExecutor() as pool:
        given = pool.submit(replica.snapshot_for, StateRequest(at_least=5))
        with pytest.raises(TimeoutError):
            given.result(timeout=0.05)
        replica.restore_from(state)
        assert given.result(timeout=30).iteration == 5
