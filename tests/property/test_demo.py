"""Policy `demo` against its algorithm written from the paper, and its limits.

Several workers and steps give the weights of a reference, plain and with the sign. The reference
keeps each momentum as entries and transforms it with SciPy. With all coefficients sent it is plain
SGD on the joint batch. Unsent coefficients stay, for any codec. Each chunk sends its k largest
coefficients. Replicas stay bit-identical. A restored policy continues bit for bit. Hostile messages
are refused and block no worker. Double momentum and modes other than lock step are refused.

Left out: the transform (tests/unit/core/codecs/test_cosines.py), whole jobs (tests/simulated).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dct, idct

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_core.codecs import CosineTransform, ValueCodec, decode_gradient, encode_whole
from dlion_core.policies.catalogue import parameters_of
from dlion_core.policies.factory import build
from dlion_core.policies.gradient.demo import DecoupledMomentum
from dlion_core.policies.gradient.entries import chunks_of
from dlion_core.policies.interface import (
    ApplyGradient,
    Layout,
    LocalStepDone,
    MemberJoined,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
)
from dlion_core.policies.parameters import DemoParameters
from example_counts import examples
from policy_cluster import LEARNING_RATE, Cluster, linear_gradient, spec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dlion_api.spec import Spec
    from dlion_core.policies.interface import PolicyMachine

    Vector = NDArray[np.float64]

ME, ONE = Rank(0), Rank(1)
PEERS = [Rank(1), Rank(2)]
LAYOUT = Layout(("a", "b", "c"), (9, 16, 3))
seeds = st.integers(0, 2**32)


def job(*, codec: str = "float32", optimizer: float = 0.0, **parameters: object) -> Spec:
    """A job whose optimizer has that momentum."""
    found = spec(exchange={"policy": "demo", "codec": codec, "parameters": parameters})
    trainer = replace(found.trainer, optimizer=replace(found.trainer.optimizer, momentum=optimizer))
    return replace(found, trainer=trainer)


def naive_chunks(layout: Layout, length: int) -> list[slice]:
    return [
        slice(start, min(start + length, where.stop))
        for where in layout.slices()
        for start in range(where.start, where.stop, length)
    ]


def fast_components(momentum_D: Vector, layout: Layout, length: int, kept: int) -> Vector:
    """The k largest coefficients of each chunk, as the paper's ExtractFastComponents."""
    fast_D = np.zeros_like(momentum_D)
    for where in naive_chunks(layout, length):
        coefficient = dct(momentum_D[where], norm="ortho")
        largest = np.argsort(-np.abs(coefficient), kind="stable")[:kept]
        fast_D[where][largest] = coefficient[largest]
    return fast_D


def inverse(coefficient_D: Vector, layout: Layout, length: int) -> Vector:
    value_D = np.zeros_like(coefficient_D)
    for where in naive_chunks(layout, length):
        value_D[where] = idct(coefficient_D[where], norm="ortho")
    return value_D


@pytest.mark.parametrize("step", ["plain", "sign"])
@pytest.mark.parametrize(("chunk", "kept", "beta"), [(4, 1, 0.9), (8, 3, 0.5), (64, 5, 0.999)])
def test_steps_are_those_of_the_paper(step: str, chunk: int, kept: int, beta: float) -> None:
    """The reference keeps each worker's momentum as entries, and averages all of them by
    samples."""
    sizes, steps = [2, 5, 3], 12
    found = job(chunk=chunk, coefficients=kept, momentum=beta, step=step)
    cluster, naive = (Cluster(found, sizes, layout=LAYOUT, seed=3) for _ in "ab")
    cluster.lockstep(steps)
    weights_D = naive.replicas[ME].weights_D.astype(np.float64)
    momentum = {rank: np.zeros(LAYOUT.size) for rank in naive.ranks}
    for _ in range(steps):
        mean_D = np.zeros(LAYOUT.size)
        for rank in naive.ranks:
            gradient_D, _ = linear_gradient(weights_D.astype(np.float32), *naive.batch(rank))
            momentum[rank] = beta * momentum[rank] + gradient_D
            fast_D = fast_components(momentum[rank], LAYOUT, chunk, kept)
            momentum[rank] -= inverse(fast_D, LAYOUT, chunk)
            mean_D += sizes[rank] / sum(sizes) * fast_D
        update_D = inverse(mean_D, LAYOUT, chunk)
        weights_D -= LEARNING_RATE * (np.sign(update_D.round(12)) if step == "sign" else update_D)
    for replica in cluster.replicas.values():
        np.testing.assert_allclose(replica.weights_D, weights_D, rtol=1e-4, atol=1e-5)


def test_with_all_coefficients_it_is_sgd_on_the_joint_batch() -> None:
    """Nothing stays in the momentum."""
    cluster, joint = (Cluster(job(chunk=4, coefficients=4), [2, 5, 3]) for _ in range(2))
    weights_D = joint.replicas[ME].weights_D.copy()
    cluster.lockstep(10)
    for _ in range(10):
        batches = [joint.batch(rank) for rank in joint.ranks]
        x_BD = np.concatenate([x for x, _ in batches])
        y_B = np.concatenate([y for _, y in batches])
        weights_D -= LEARNING_RATE * linear_gradient(weights_D, x_BD, y_B)[0]
    for replica in cluster.replicas.values():
        np.testing.assert_allclose(replica.weights_D, weights_D, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("codec", list(ValueCodec))
@given(seed=seeds, beta=st.sampled_from([0.0, 0.5, 0.999]), kept=st.integers(1, 5))
@settings(max_examples=examples(15), deadline=None)
def test_unsent_coefficients_stay(codec: ValueCodec, seed: int, beta: float, kept: int) -> None:
    rng = np.random.default_rng(seed)
    parameters = DemoParameters(momentum=beta, chunk=4, coefficients=kept)
    policy = DecoupledMomentum(LAYOUT, codec, parameters)
    transform = CosineTransform(chunks_of(LAYOUT, 4))
    most = sum(min(kept, where.stop - where.start) for where in naive_chunks(LAYOUT, 4))
    kept_D = np.zeros(LAYOUT.size, np.float32)
    for _ in range(8):
        gradient_D = rng.standard_normal(LAYOUT.size).astype(np.float32)
        whole_D = np.float32(beta) * kept_D + transform.coefficients(gradient_D)
        outgoing = policy.prepare(gradient_D, PEERS, {PEERS[0]: 0})
        payload = outgoing.payloads[PEERS[0]]
        assert payload is outgoing.payloads[PEERS[1]]
        there = decode_gradient(payload, LAYOUT.size)
        there_D = there.weighted(np.float32(1))
        assert np.count_nonzero(there_D) <= most
        np.testing.assert_array_equal(outgoing.own.weighted(np.float32(1)), there_D)
        kept_D = np.asarray(policy.state()["demo_momentum_D"], np.float32)
        np.testing.assert_array_equal(kept_D, whole_D - there_D)


@pytest.mark.parametrize("codec", ["float32", "float16", "int2"])
def test_replicas_stay_bit_identical(codec: str) -> None:
    cluster = Cluster(job(codec=codec, chunk=8), [2, 5, 3], layout=LAYOUT)
    cluster.lockstep(15)
    first, *others = cluster.replicas.values()
    assert len(first.descents()) == 15
    for other in others:
        np.testing.assert_array_equal(first.weights_D, other.weights_D)


def test_a_lost_worker_blocks_no_other() -> None:
    cluster = Cluster(job(), [2, 3, 2], layout=LAYOUT)
    cluster.lockstep(3)
    cluster.step(ME)
    cluster.leave(Rank(2))
    for _ in range(3):
        for rank in (ME, ONE):
            if cluster.may_step(rank):
                cluster.step(rank)
        cluster.deliver_all()
    first, second = cluster.replicas[ME], cluster.replicas[ONE]
    assert first.iteration > 4
    assert abs(first.iteration - second.iteration) <= 1


@given(seed=seeds)
@settings(max_examples=examples(15), deadline=None)
def test_a_policy_restored_in_mid_run_continues_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parameters = DemoParameters(chunk=8)
    policy, restored = (DecoupledMomentum(LAYOUT, ValueCodec.FLOAT16, parameters) for _ in range(2))
    for step in range(8):
        gradient_D = rng.standard_normal(LAYOUT.size).astype(np.float32)
        if step == 3:
            restored.restore({"iteration": 3, **policy.state()})
        first = policy.prepare(gradient_D, PEERS, {})
        if step >= 3:
            second = restored.prepare(gradient_D, PEERS, {})
            assert bytes(first.payloads[PEERS[0]]) == second.payloads[PEERS[0]]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 3e38])
def test_a_gradient_that_is_not_finite_is_refused_and_leaves_no_trace(wrong: float) -> None:
    """3e38 is finite, but the sum of a chunk of it is not."""
    policy = DecoupledMomentum(LAYOUT, ValueCodec.FLOAT32, DemoParameters())
    with pytest.raises(ValueError, match="NaN or infinite"):
        policy.prepare(np.full(LAYOUT.size, wrong, np.float32), PEERS, {})
    assert not np.any(policy.state()["demo_momentum_D"])


# ---- hostile messages ----------------------------------------------------------------------------


def machine() -> PolicyMachine:
    built = build(job(chunk=8), ME, LAYOUT, [ME, ONE])
    built.handle(MemberJoined(ONE))
    return built


def whole(value: float, size: int = LAYOUT.size) -> bytes:
    return bytes(encode_whole(np.full(size, value, np.float32), ValueCodec.FLOAT32))


def some(index: int) -> bytes:
    """One entry at that place: a header, its value, its gap."""
    header = np.array([1, 1, 3, 0], np.uint8).tobytes() + bytes(4)
    sizes = np.array([LAYOUT.size, 1], np.uint32).tobytes()
    return header + sizes + np.float32(1).tobytes() + np.uint16(index).tobytes()


def test_some_is_one_entry() -> None:
    assert decode_gradient(some(7), LAYOUT.size).index_K == [7]


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"xyz", "3 bytes"),
        (whole(1, LAYOUT.size + 1), "a model of 29 entries"),
        (whole(1)[:-1], "bytes"),
        (whole(1).replace(np.float32(1).tobytes(), np.float32(np.nan).tobytes()), "NaN"),
        (some(LAYOUT.size), "positions"),
        (whole(3e37), "coefficient of 3e+37; allowed: +-2.13e+37"),
    ],
)
def test_an_invalid_message_is_refused_and_blocks_no_worker(payload: bytes, words: str) -> None:
    """The update is made without it, and is finite."""
    built = machine()
    built.handle(LocalStepDone(1, np.ones(LAYOUT.size, np.float32), 4, 0.5))
    assert built.waiting_for() == {ONE}
    message = Message(MessageKind.GRADIENT, 1, 4, payload=payload)
    refusal, update = built.handle(MessageArrived(ONE, message))
    assert isinstance(refusal, RejectMessage)
    assert words in refusal.reason
    assert isinstance(update, ApplyGradient)
    assert np.isfinite(update.gradient_D).all()
    assert not built.waiting_for()


def test_the_largest_finite_coefficients_are_not_applied() -> None:
    built = machine()
    message = Message(MessageKind.GRADIENT, 1, 100, payload=whole(2.1e37))
    assert built.handle(MessageArrived(ONE, message)) == []
    instructions = built.handle(LocalStepDone(1, np.ones(LAYOUT.size, np.float32), 1, 0.5))
    (update,) = (one for one in instructions if isinstance(one, ApplyGradient))
    assert np.abs(update.gradient_D).max() == pytest.approx(1)
    assert [one.peer for one in instructions if isinstance(one, RejectMessage)] == [ONE]


# ---- the manifest --------------------------------------------------------------------------------


def test_momentum_here_and_in_the_optimizer_is_refused() -> None:
    with pytest.raises(SpecError, match="momentum: 0"):
        build(job(optimizer=0.9), ME, LAYOUT, [ME])
    build(job(optimizer=0.9, momentum=0), ME, LAYOUT, [ME])
    build(job(), ME, LAYOUT, [ME])


@pytest.mark.parametrize("mode", ["bounded", "backup", "asynchronous"])
def test_other_modes_than_lock_step_are_refused(mode: str) -> None:
    found = job()
    found = replace(found, synchronization=replace(found.synchronization, mode=mode))
    with pytest.raises(SpecError, match=r"spec\.synchronization\.mode"):
        parameters_of(found)


@pytest.mark.parametrize(
    "wrong", [{"momentum": 1}, {"chunk": 0}, {"chunk": 1025}, {"coefficients": 0}, {"step": "both"}]
)
def test_parameters_out_of_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        parameters_of(job(**wrong))
