"""Policy `dgc` against a naive form of its algorithm, and its limits.

Each step sends what algorithm 2 sends, bit for bit, ties and zeros included. sent + v = the sum of
velocities. A share of 1 is plain SGD with masking and momentum SGD without. The share falls as
published. Gradients are clipped to one worker's part of the norm. Replicas of a synchronous cluster
are bit-identical. A restored policy continues bit for bit. Double momentum is refused.

Left out: accuracy (tests/simulated).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_api.spec import Spec
from dlion_core.codecs import ValueCodec, decode_gradient
from dlion_core.policies.catalogue import parameters_of
from dlion_core.policies.factory import build
from dlion_core.policies.gradient.dgc import DeepCompression
from dlion_core.policies.gradient.gradient_selectors import OutgoingPayloads
from dlion_core.policies.interface import Layout
from dlion_core.policies.parameters import DgcParameters
from example_counts import examples
from policy_cluster import LEARNING_RATE, Cluster, linear_gradient, spec

Vector = NDArray[np.float32]
PEERS = [Rank(1), Rank(2)]
seeds = st.integers(0, 2**32)
shares = st.sampled_from([0.01, 0.1, 0.5, 1.0])
layouts = st.lists(st.integers(1, 80), min_size=1, max_size=4).map(
    lambda sizes: Layout(tuple(f"v{number}" for number in range(len(sizes))), tuple(sizes))
)


def arrived(sent: OutgoingPayloads, size: int) -> Vector:
    """The vector that every peer decodes, which also counts at the sender."""
    own_D = sent.own.weighted(np.float32(1))
    for peer in PEERS:
        payload = sent.payloads.get(peer)
        there_D = (
            np.zeros(size, np.float32)
            if payload is None
            else decode_gradient(payload, size).weighted(np.float32(1))
        )
        np.testing.assert_array_equal(there_D, own_D)
    return own_D


def whole_numbers(rng: np.random.Generator, size: int) -> Vector:
    """With a momentum of one half, sums of velocities are exact. Many ties, half of them zeros."""
    return (rng.integers(-5, 6, size) * (rng.random(size) < 0.5)).astype(np.float32)


def naive_threshold(part: Vector, share: float) -> float:
    falling = sorted((abs(float(value)) for value in part), reverse=True)
    return falling[max(1, math.ceil(share * len(falling))) - 1]


@pytest.mark.parametrize("masking", [True, False])
@given(seed=seeds, layout=layouts, share=shares, momentum=st.sampled_from([0.0, 0.5, 0.9]))
@settings(deadline=None, max_examples=examples(50))
def test_a_step_sends_the_entries_of_the_algorithm(
    seed: int, layout: Layout, share: float, momentum: float, *, masking: bool
) -> None:
    rng = np.random.default_rng(seed)
    parameters = DgcParameters(share=share, momentum=momentum, masking=masking, warmup_stages=0)
    policy = DeepCompression(layout, ValueCodec.FLOAT32, parameters)
    u_D, v_D = (np.zeros(layout.size, np.float32) for _ in range(2))
    for _ in range(8):
        gradient_D = whole_numbers(rng, layout.size)
        u_D = np.float32(momentum) * u_D + gradient_D
        v_D = v_D + u_D
        sent_D = np.zeros(layout.size, np.float32)
        for where in layout.slices():
            threshold = naive_threshold(v_D[where], share)
            for at in range(where.start, where.stop):
                if abs(v_D[at]) >= threshold and v_D[at] != 0:
                    sent_D[at], v_D[at] = v_D[at], 0
                    if masking:
                        u_D[at] = 0
        ours_D = arrived(policy.prepare(gradient_D, PEERS, {Rank(1): 0}), layout.size)
        np.testing.assert_array_equal(ours_D, sent_D)


@pytest.mark.parametrize("codec", list(ValueCodec))
@given(seed=seeds, layout=layouts, share=shares, stages=st.integers(0, 3))
@settings(deadline=None, max_examples=examples(50))
def test_sent_and_waiting_are_the_sum_of_velocities(
    codec: ValueCodec, seed: int, layout: Layout, share: float, stages: int
) -> None:
    rng = np.random.default_rng(seed)
    parameters = DgcParameters(
        share=share, momentum=0.5, warmup_stages=stages, warmup_every_steps=3
    )
    policy = DeepCompression(layout, codec, parameters)
    owed_D, velocity_D = (np.zeros(layout.size, np.float32) for _ in range(2))
    for step in range(10):
        gradient_D = whole_numbers(rng, layout.size)
        owed_D += np.float32(0.5) * velocity_D + gradient_D
        peers = PEERS if step % 4 else []
        own_D = policy.prepare(gradient_D, peers, {}).own.weighted(np.float32(1))
        owed_D -= own_D
        state = policy.state()
        np.testing.assert_array_equal(state["dgc_gathered_D"], owed_D)
        velocity_D = np.array(state["dgc_velocity_D"], np.float32)
        assert not velocity_D[own_D != 0].any()  # momentum factor masking


@given(seed=seeds, layout=layouts)
@settings(deadline=None, max_examples=examples(30))
def test_a_share_of_one_is_plain_or_momentum_sgd(seed: int, layout: Layout) -> None:
    rng = np.random.default_rng(seed)
    masked, unmasked = (
        DeepCompression(
            layout, ValueCodec.FLOAT32, DgcParameters(share=1.0, momentum=0.9, masking=masking)
        )
        for masking in (True, False)
    )
    velocity_D = np.zeros(layout.size, np.float32)
    for _ in range(6):
        gradient_D = rng.standard_normal(layout.size).astype(np.float32)
        velocity_D = np.float32(0.9) * velocity_D + gradient_D
        plain_D = arrived(masked.prepare(gradient_D, PEERS, {}), layout.size)
        np.testing.assert_array_equal(plain_D, gradient_D)
        momentum_D = arrived(unmasked.prepare(gradient_D, PEERS, {}), layout.size)
        np.testing.assert_array_equal(momentum_D, velocity_D)


def job(parameters: dict[str, object], *, codec: str = "float32", momentum: float = 0.0) -> Spec:
    """A job whose optimizer has that momentum."""
    exchange: dict[str, object] = {"policy": "dgc", "codec": codec, "parameters": parameters}
    built = spec(exchange=exchange, synchronization={"mode": "synchronous"})
    optimizer = replace(built.trainer.optimizer, momentum=momentum)
    return replace(built, trainer=replace(built.trainer, optimizer=optimizer))


def test_a_cluster_of_share_one_without_masking_is_momentum_sgd_on_the_joint_batch() -> None:
    parameters: dict[str, object] = {"share": 1, "masking": False, "momentum": 0.5}
    cluster, joint = (Cluster(job(parameters), [2, 5, 3]) for _ in range(2))
    weights_D = joint.replicas[Rank(0)].weights_D.copy()
    velocity_D = np.zeros_like(weights_D)
    cluster.lockstep(12)
    for _ in range(12):
        batches = [joint.batch(rank) for rank in joint.ranks]
        x_BD = np.concatenate([x for x, _ in batches])
        y_B = np.concatenate([y for _, y in batches])
        velocity_D = np.float32(0.5) * velocity_D + linear_gradient(weights_D, x_BD, y_B)[0]
        weights_D -= LEARNING_RATE * velocity_D
    for replica in cluster.replicas.values():
        np.testing.assert_allclose(replica.weights_D, weights_D, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_replicas_stay_bit_identical(codec: str) -> None:
    cluster = Cluster(job({"share": 0.1, "warmupEverySteps": 2}, codec=codec), [2, 5, 3])
    cluster.lockstep(15)
    first, *others = cluster.replicas.values()
    assert len(first.descents()) == 15
    for other in others:
        np.testing.assert_array_equal(first.weights_D, other.weights_D)


def test_the_share_falls_as_published() -> None:
    layout = Layout(("w",), (1000,))
    policy = DeepCompression(layout, ValueCodec.FLOAT32, DgcParameters(warmup_every_steps=2))
    kept = []
    for step in range(12):
        gradient_D = np.random.default_rng(step).standard_normal(1000).astype(np.float32)
        kept.append(np.count_nonzero(arrived(policy.prepare(gradient_D, PEERS, {}), 1000)))
    assert kept == [252, 252, 64, 64, 16, 16, 4, 4, 1, 1, 1, 1]


@pytest.mark.parametrize(("peers", "norm"), [([], 6.0), (PEERS[:1], 6 / 2**0.5), (PEERS, 3.4641)])
def test_a_gradient_is_clipped_to_one_workers_part(peers: list[Rank], norm: float) -> None:
    parameters = DgcParameters(share=1.0, clip_norm=6.0)
    policy = DeepCompression(Layout(("w",), (4,)), ValueCodec.FLOAT32, parameters)
    gradient_D = np.array([8, 0, -6, 0], np.float32)
    sent_D = policy.prepare(gradient_D, peers, {}).own.weighted(np.float32(1))
    np.testing.assert_allclose(sent_D, gradient_D * norm / 10, rtol=1e-5)
    short_D = np.array([0, 1, 1, 0], np.float32)  # below the limit: unchanged
    sent_D = policy.prepare(short_D, peers, {}).own.weighted(np.float32(1))
    np.testing.assert_array_equal(sent_D, short_D)


@given(seed=seeds, layout=layouts)
@settings(deadline=None, max_examples=examples(30))
def test_a_policy_restored_in_mid_run_continues_bit_for_bit(seed: int, layout: Layout) -> None:
    rng = np.random.default_rng(seed)
    parameters = DgcParameters(share=0.02, warmup_every_steps=2, clip_norm=5.0)
    policy, restored = (DeepCompression(layout, ValueCodec.FLOAT16, parameters) for _ in range(2))
    for step in range(12):
        gradient_D = rng.standard_normal(layout.size).astype(np.float32)
        if step == 3:
            restored.restore({"iteration": 3, **policy.state()})
        first = policy.prepare(gradient_D, PEERS, {})
        if step >= 3:
            second = restored.prepare(gradient_D, PEERS, {})
            assert bytes(first.payloads[PEERS[0]]) == second.payloads[PEERS[0]]


def test_a_gradient_that_is_not_finite_is_refused_and_leaves_no_trace() -> None:
    policy = DeepCompression(Layout(("w",), (3,)), ValueCodec.FLOAT32, DgcParameters())
    with pytest.raises(ValueError, match="NaN or infinite"):
        policy.prepare(np.array([1, np.nan, 0], np.float32), PEERS, {})
    assert not any(np.any(value) for value in policy.state().values())


def test_momentum_here_and_in_the_optimizer_is_refused() -> None:
    layout = Layout(("w",), (3,))
    with pytest.raises(SpecError, match="momentum: 0"):
        build(job({}, momentum=0.9), Rank(0), layout, [Rank(0)])
    build(job({"momentum": 0}, momentum=0.9), Rank(0), layout, [Rank(0)])
    build(job({}), Rank(0), layout, [Rank(0)])


@pytest.mark.parametrize("wrong", [{"share": 0}, {"momentum": 1}, {"clipNorm": -1}, {"ratio": 1}])
def test_parameters_out_of_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        parameters_of(spec(exchange={"policy": "dgc", "parameters": wrong}))
