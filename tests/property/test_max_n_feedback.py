"""Error feedback for Max N (`exchange.residual`): no entry that a link does not carry is lost.

On every link sent + residual = sum of gradients, exactly, while members leave and return and
budgets change. Sent entries are Max N's selection of residual + gradient. No budget is exceeded.
With a shared residual all get the same, and replicas of a synchronous cluster are bit-identical. A
restored policy continues bit for bit.

Left out: Max N's selection itself (test_selection.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, decode_gradient
from dlion_core.policies.gradient.gradient_policies import ResidualMaxN
from dlion_core.policies.gradient.gradient_selectors import MaxN, OutgoingPayloads
from dlion_core.policies.interface import Layout
from example_counts import examples
from policy_cluster import Cluster, spec

Vector = NDArray[np.float32]
PEERS = [Rank(1), Rank(2), Rank(3)]
FLOOR = 5.0
seeds = st.integers(0, 2**32)
layouts = st.lists(st.integers(1, 80), min_size=1, max_size=4).map(
    lambda sizes: Layout(tuple(f"v{number}" for number in range(len(sizes))), tuple(sizes))
)
codecs = st.sampled_from(list(ValueCodec))


def whole_numbers(rng: np.random.Generator, size: int) -> Vector:
    """Whole numbers, whose sums are exact, also in float16; many ties, half of them zeros."""
    return (rng.integers(-5, 6, size) * (rng.random(size) < 0.5)).astype(np.float32)


def arrived(sent: OutgoingPayloads, peer: Rank, size: int) -> Vector:
    """The vector that this peer decodes; zeros without a message."""
    if peer not in sent.payloads:
        return np.zeros(size, np.float32)
    return decode_gradient(sent.payloads[peer], size).weighted(np.float32(1))


def some_peers(rng: np.random.Generator) -> tuple[list[Rank], dict[Rank, int]]:
    """Random peers and their links' budgets: some without, some too narrow."""
    peers = [peer for peer in PEERS if rng.random() < 0.85]
    return peers, {peer: int(rng.integers(0, 600)) for peer in peers if rng.random() < 0.9}


@given(seed=seeds, layout=layouts, codec=codecs)
@settings(deadline=None, max_examples=examples(25))
def test_on_every_link_sent_and_residual_are_the_sum_of_gradients(
    seed: int, layout: Layout, codec: ValueCodec
) -> None:
    rng = np.random.default_rng(seed)
    policy = ResidualMaxN(layout, codec, FLOOR, per_link=True)
    owed: dict[Rank, Vector] = {}
    for _ in range(12):
        peers, budgets = some_peers(rng)
        for gone in set(owed) - set(peers):
            policy.forget(gone)
            del owed[gone]
        gradient_D = whole_numbers(rng, layout.size)
        sent = policy.prepare(gradient_D, peers, budgets)
        np.testing.assert_array_equal(sent.own.value_K, gradient_D)
        for peer in peers:
            owed[peer] = owed.get(peer, np.zeros(layout.size, np.float32)) + gradient_D
            owed[peer] -= arrived(sent, peer, layout.size)
            kept_D = policy.state()[f"max_n_residual_D_of_{peer}"]
            np.testing.assert_array_equal(kept_D, owed[peer])


@given(seed=seeds, layout=layouts, codec=codecs)
@settings(deadline=None, max_examples=examples(25))
def test_a_shared_residual_gives_all_the_same_and_keeps_the_rest(
    seed: int, layout: Layout, codec: ValueCodec
) -> None:
    rng = np.random.default_rng(seed)
    policy = ResidualMaxN(layout, codec, FLOOR, per_link=False)
    owed_D = np.zeros(layout.size, np.float32)
    saved = 0
    for _ in range(12):
        peers, budgets = some_peers(rng)
        gradient_D = whole_numbers(rng, layout.size)
        sent = policy.prepare(gradient_D, peers, budgets)
        own_D = sent.own.weighted(np.float32(1))
        narrowest = min(budgets.values(), default=10**6)
        for peer in peers:
            np.testing.assert_array_equal(arrived(sent, peer, layout.size), own_D)
            assert len(sent.payloads.get(peer, b"")) <= narrowest + saved
        saved = 0 if sent.payloads else saved + narrowest
        owed_D += gradient_D
        owed_D -= own_D
        np.testing.assert_array_equal(policy.state()["max_n_residual_D"], owed_D)
        assert peers or not owed_D.any()


@given(seed=seeds, layout=layouts, codec=codecs)
@settings(deadline=None, max_examples=examples(25))
def test_sent_entries_are_max_ns_choice_of_all_pending_ones(
    seed: int, layout: Layout, codec: ValueCodec
) -> None:
    """Byte for byte, link by link; floats of every size."""
    rng = np.random.default_rng(seed)
    policy = ResidualMaxN(layout, codec, FLOOR, per_link=True)
    naive = {peer: MaxN(layout, codec, FLOOR) for peer in PEERS}
    waiting = {peer: np.zeros(layout.size, np.float32) for peer in PEERS}
    for _ in range(8):
        gradient_D = rng.standard_normal(layout.size).astype(np.float32)
        budgets = {peer: int(rng.integers(0, 600)) for peer in PEERS}
        sent = policy.prepare(gradient_D, PEERS, budgets)
        for peer in PEERS:
            waiting[peer] += gradient_D
            expected = naive[peer].prepare(waiting[peer], [peer], budgets).payloads
            assert bytes(sent.payloads.get(peer, b"")) == bytes(expected.get(peer, b""))
            waiting[peer] -= arrived(sent, peer, layout.size)


@pytest.mark.parametrize("per_link", [True, False])
@given(seed=seeds, layout=layouts)
@settings(deadline=None, max_examples=examples(15))
def test_a_policy_restored_in_mid_run_continues_bit_for_bit(
    per_link: bool, seed: int, layout: Layout
) -> None:
    rng = np.random.default_rng(seed)
    policy, restored = (
        ResidualMaxN(layout, ValueCodec.FLOAT16, 60.0, per_link=per_link) for _ in range(2)
    )
    for step in range(10):
        gradient_D = rng.standard_normal(layout.size).astype(np.float32)
        budgets = {peer: int(rng.integers(0, 200)) for peer in PEERS}
        if step == 4:
            restored.restore({"iteration": 4, **policy.state()})
        first = policy.prepare(gradient_D, PEERS, budgets)
        if step >= 4:
            assert comparable(restored.prepare(gradient_D, PEERS, budgets), PEERS) == comparable(
                first, PEERS
            )
            np.testing.assert_equal(restored.state(), policy.state())


def comparable(sent: OutgoingPayloads, peers: Sequence[Rank]) -> list[bytes]:
    """Messages in a form that can be compared."""
    own = sent.own.weighted(np.float32(1)).tobytes()
    return [own, *(bytes(sent.payloads.get(peer, b"")) for peer in peers)]


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_with_a_shared_residual_replicas_stay_bit_identical(codec: str) -> None:
    exchange: dict[str, object] = {"residual": "shared", "codec": codec}
    cluster = Cluster(spec(exchange=exchange, synchronization={"mode": "synchronous"}), [2, 5, 3])
    for rank in cluster.ranks:
        cluster.budgets(rank, {peer: 30 + 10 * peer for peer in cluster.ranks if peer != rank})
    cluster.lockstep(15)
    first, *others = cluster.replicas.values()
    assert len(first.descents()) == 15
    for other in others:
        np.testing.assert_array_equal(first.weights_D, other.weights_D)


@pytest.mark.parametrize("per_link", [True, False])
def test_a_gradient_that_is_not_finite_is_refused_and_leaves_no_trace(
    per_link: bool,
) -> None:
    policy = ResidualMaxN(Layout(("w",), (3,)), ValueCodec.FLOAT32, FLOOR, per_link=per_link)
    with pytest.raises(ValueError, match="NaN or infinite"):
        policy.prepare(np.array([1, np.nan, 0], np.float32), PEERS, {})
    assert not any(np.any(value) for value in policy.state().values())


def test_the_published_form_keeps_no_residual() -> None:
    published: dict[str, object] = {"policy": "dlion-published", "weighting": "dlion_ratio"}
    spec(exchange=published)
    with pytest.raises(SpecError, match="residual is for policy dlion"):
        spec(exchange={**published, "residual": "perLink"})
