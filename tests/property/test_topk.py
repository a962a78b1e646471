"""Policy `topk` against a naive reference that sorts, and the accounts of its error feedback.

Sent entries are those of a full sort, ties and zeros included. On every link sent + residual = sum
of gradients, exactly. No budget is exceeded. Members that leave take their residual along. A
restored policy continues bit for bit. If all links carry the same, replicas of a synchronous
cluster are bit-identical.

Left out: accuracy (tests/simulated).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, decode_gradient, max_kept_entries
from dlion_core.policies.catalogue import parameters_of
from dlion_core.policies.gradient.gradient_selectors import OutgoingPayloads
from dlion_core.policies.gradient.topk import TopK
from example_counts import examples
from policy_cluster import Cluster, spec

Vector = NDArray[np.float32]
PEERS = [Rank(1), Rank(2), Rank(3)]
residuals = st.sampled_from(["none", "shared", "perLink"])
shares = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])
seeds = st.integers(0, 2**32)


def whole_numbers(rng: np.random.Generator, size: int) -> Vector:
    """Small numbers, whose sums are exact; many ties, half of them zeros."""
    value_D = rng.integers(-5, 6, size) * (rng.random(size) < 0.5)
    return value_D.astype(np.float32)


def naive_largest(value_D: Vector, count: int) -> Vector:
    """By a full sort: first by magnitude, then by place."""
    order = sorted(range(value_D.size), key=lambda at: (-abs(float(value_D[at])), at))
    kept_D = np.zeros_like(value_D)
    for at in order[:count]:
        kept_D[at] = value_D[at]
    return kept_D


def arrived(sent: OutgoingPayloads, peer: Rank, size: int) -> Vector:
    """The vector that this peer decodes; zeros without a message."""
    if peer not in sent.payloads:
        return np.zeros(size, np.float32)
    return decode_gradient(sent.payloads[peer], size).weighted(np.float32(1))


def budgets(rng: np.random.Generator, peers: Sequence[Rank], size: int) -> dict[Rank, int]:
    """Some links unbounded, some too narrow for anything."""
    return {peer: int(rng.integers(0, 5 * size)) for peer in peers if rng.random() < 0.8}


@given(seed=seeds, size=st.integers(1, 300), share=shares.filter(bool), residual=residuals)
@settings(deadline=None)
def test_a_share_is_that_of_a_full_sort(seed: int, size: int, share: float, residual: str) -> None:
    rng = np.random.default_rng(seed)
    policy = TopK(size, ValueCodec.FLOAT32, share, residual)
    waiting_D = np.zeros(size, np.float32)
    for _ in range(6):
        gradient_D = whole_numbers(rng, size)
        waiting_D = gradient_D if residual == "none" else waiting_D + gradient_D
        kept_D = naive_largest(waiting_D, max(1, int(share * size)))
        sent = policy.prepare(gradient_D, PEERS, budgets(rng, PEERS, size))
        for peer in PEERS:
            np.testing.assert_array_equal(arrived(sent, peer, size), kept_D)
        own_D = gradient_D if residual == "perLink" else kept_D
        np.testing.assert_array_equal(sent.own.weighted(np.float32(1)), own_D)
        waiting_D = waiting_D - kept_D


@pytest.mark.parametrize("codec", list(ValueCodec))
@given(seed=seeds, size=st.integers(1, 300), share=shares)
@settings(deadline=None, max_examples=examples(50))
def test_on_every_link_sent_and_residual_are_the_sum_of_gradients(
    codec: ValueCodec, seed: int, size: int, share: float
) -> None:
    """Per link, since its peer last joined; members leave and return, budgets change."""
    rng = np.random.default_rng(seed)
    policy = TopK(size, codec, share, "perLink")
    owed: dict[Rank, Vector] = {}
    for _ in range(12):
        peers = [peer for peer in PEERS if rng.random() < 0.8]
        for peer in set(owed) - set(peers):
            policy.forget(peer)
            del owed[peer]
        gradient_D = whole_numbers(rng, size)
        sent = policy.prepare(gradient_D, peers, budgets(rng, peers, size))
        np.testing.assert_array_equal(sent.own.value_K, gradient_D)
        state = policy.state()
        for peer in peers:
            owed[peer] = owed.get(peer, np.zeros(size, np.float32)) + gradient_D
            owed[peer] -= arrived(sent, peer, size)
            np.testing.assert_array_equal(state[f"topk_residual_D_of_{peer}"], owed[peer])
        assert len(state) == len(peers)


@pytest.mark.parametrize("codec", list(ValueCodec))
@given(seed=seeds, size=st.integers(1, 300), share=shares)
@settings(deadline=None, max_examples=examples(50))
def test_a_shared_residual_gives_all_the_same_and_keeps_the_rest(
    codec: ValueCodec, seed: int, size: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    policy = TopK(size, codec, share, "shared")
    owed_D = np.zeros(size, np.float32)
    for _ in range(12):
        peers = [peer for peer in PEERS if rng.random() < 0.7]
        gradient_D = rng.standard_normal(size).astype(np.float32)
        room = budgets(rng, peers, size)
        owed_D += gradient_D
        sent = policy.prepare(gradient_D, peers, room)
        own_D = sent.own.weighted(np.float32(1))
        for peer in peers:
            np.testing.assert_array_equal(arrived(sent, peer, size), own_D)
        owed_D = owed_D - own_D
        kept_D = np.asarray(policy.state()["topk_residual_D"], np.float32)
        assert np.allclose(kept_D, owed_D, atol=1e-5)
        if not peers:
            assert not owed_D.any()


@given(seed=seeds, size=st.integers(1, 300), residual=residuals)
@settings(deadline=None, max_examples=examples(50))
def test_each_link_carries_the_entries_that_fit_its_budget(
    seed: int, size: int, residual: str
) -> None:
    rng = np.random.default_rng(seed)
    policy = TopK(size, ValueCodec.FLOAT16, 0.0, residual)
    for _ in range(6):
        room = budgets(rng, PEERS, size)
        sent = policy.prepare(rng.standard_normal(size).astype(np.float32), PEERS, room)
        most = 2**30
        fits = {p: max_kept_entries(room.get(p, most), size, ValueCodec.FLOAT16) for p in PEERS}
        if residual == "shared":
            fits = dict.fromkeys(PEERS, min(fits.values()))
        for peer in PEERS:
            assert len(sent.payloads.get(peer, b"")) <= room.get(peer, most)
            kept = np.count_nonzero(arrived(sent, peer, size))
            assert kept == fits[peer] if residual == "none" else kept <= fits[peer]


@given(seed=seeds, residual=residuals, share=shares)
@settings(deadline=None, max_examples=examples(30))
def test_a_policy_restored_in_mid_run_continues_bit_for_bit(
    seed: int, residual: str, share: float
) -> None:
    rng = np.random.default_rng(seed)
    size = 100
    policy, restored = (TopK(size, ValueCodec.FLOAT16, share, residual) for _ in range(2))
    for iteration in range(8):
        gradient_D = rng.standard_normal(size).astype(np.float32)
        room = budgets(rng, PEERS, size)
        first = policy.prepare(gradient_D, PEERS, room)
        if iteration >= 4:
            assert comparable(first) == comparable(restored.prepare(gradient_D, PEERS, room))
        if iteration == 3:
            restored.restore({"iteration": 4, **policy.state()})


def comparable(sent: OutgoingPayloads) -> tuple[Mapping[Rank, bytes], bytes]:
    """Messages in a form that can be compared."""
    payloads = {peer: bytes(payload) for peer, payload in sent.payloads.items()}
    return payloads, sent.own.weighted(np.float32(1)).tobytes()


@pytest.mark.parametrize("residual", ["none", "shared"])
@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_replicas_stay_bit_identical_if_all_links_carry_the_same(residual: str, codec: str) -> None:
    job = spec(
        exchange={
            "policy": "topk",
            "codec": codec,
            "parameters": {"share": 0.2, "residual": residual},
        },
        synchronization={"mode": "synchronous"},
    )
    cluster = Cluster(job, [2, 5, 3])
    cluster.lockstep(15)
    first, *others = cluster.replicas.values()
    assert len(first.descents()) == 15
    for other in others:
        np.testing.assert_array_equal(first.weights_D, other.weights_D)


def test_without_residual_a_worker_without_peers_takes_its_whole_gradient() -> None:
    gradient_D = np.arange(9, dtype=np.float32)
    for residual in ("none", "shared", "perLink"):
        sent = TopK(9, ValueCodec.FLOAT32, 0.1, residual).prepare(gradient_D, [], {})
        np.testing.assert_array_equal(sent.own.weighted(np.float32(1)), gradient_D)


@pytest.mark.parametrize("residual", ["none", "shared", "perLink"])
def test_a_gradient_that_is_not_finite_is_refused_and_leaves_no_trace(residual: str) -> None:
    policy = TopK(3, ValueCodec.FLOAT32, 0.5, residual)
    with pytest.raises(ValueError, match="NaN or infinite"):
        policy.prepare(np.array([1, np.inf, 0], np.float32), PEERS, {})
    for value in policy.state().values():
        assert not np.any(value)


@pytest.mark.parametrize("wrong", [{"share": 1.5}, {"residual": "all"}, {"shares": 0.1}])
def test_parameters_out_of_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        parameters_of(spec(exchange={"policy": "topk", "parameters": wrong}))
