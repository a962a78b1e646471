"""Tests of Max N: the entries that it sends on each link, and when it waits.

Left out: its selection against a naive reference over many gradients (tests/property).
"""

from __future__ import annotations

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_core.codecs import HEADER_BYTES, ValueCodec, coded_bytes, decode_gradient
from dlion_core.policies.gradient.gradient_selectors import MaxN, WholeGradient
from dlion_core.policies.interface import Layout

ONE, TWO, THREE = Rank(1), Rank(2), Rank(3)
LAYOUT = Layout(("kernel", "bias"), (3000, 1000))
SIZE = LAYOUT.size


def some_gradient(seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    rng = np.random.default_rng(seed)
    gradient_D = rng.standard_normal(SIZE).astype(np.float32)
    gradient_D[3000:] *= 1e-4  # small, but important within its variable
    return gradient_D


def test_each_link_gets_the_entries_that_it_can_carry() -> None:
    budgets = {ONE: 200, TWO: 2000, THREE: 7000}
    sent = MaxN(LAYOUT, ValueCodec.FLOAT16).prepare(some_gradient(), [ONE, TWO, THREE], budgets)
    kept = {}
    for peer, budget in budgets.items():
        payload = sent.payloads[peer]
        assert 0.97 * budget <= len(payload) <= budget
        index_K = decode_gradient(payload, SIZE).index_K
        assert index_K is not None
        kept[peer] = set(index_K.tolist())
    assert kept[ONE] < kept[TWO] < kept[THREE]
    assert any(index >= 3000 for index in kept[ONE])  # relative to the largest of each variable


def test_a_link_that_carries_everything_or_has_no_budget_gets_everything() -> None:
    gradient_D = some_gradient()
    whole = coded_bytes(SIZE, SIZE, ValueCodec.FLOAT32)
    policy = MaxN(LAYOUT, ValueCodec.FLOAT32)
    sent = policy.prepare(gradient_D, [ONE, TWO], {TWO: whole})
    assert sent.payloads[ONE] is sent.payloads[TWO]
    np.testing.assert_array_equal(decode_gradient(sent.payloads[ONE], SIZE).value_K, gradient_D)


def test_links_with_equal_budgets_share_one_payload() -> None:
    policy = MaxN(LAYOUT, ValueCodec.FLOAT16)
    sent = policy.prepare(some_gradient(), [ONE, TWO], {ONE: 900, TWO: 900})
    assert sent.payloads[ONE] is sent.payloads[TWO]


def test_a_link_whose_budget_is_below_the_floor_waits_until_it_fits() -> None:
    policy = MaxN(LAYOUT, ValueCodec.FLOAT32, floor_percent=50)
    sizes = []
    for iteration in range(40):
        payloads = policy.prepare(some_gradient(iteration), [ONE], {ONE: 100}).payloads
        sizes.append(len(payloads[ONE]) if ONE in payloads else 0)
    assert max(sizes) > 100
    assert all(sum(sizes[: end + 1]) <= 100 * (end + 1) for end in range(40))


def test_a_budget_of_zero_sends_nothing() -> None:
    policy = MaxN(LAYOUT, ValueCodec.FLOAT32)
    for _ in range(3):
        assert policy.prepare(some_gradient(), [ONE], {ONE: 0}).payloads == {}


def test_a_flat_gradient_of_zeros_sends_nothing_on_a_tight_link() -> None:
    policy = MaxN(LAYOUT, ValueCodec.FLOAT16)
    zeros_D = np.zeros(SIZE, np.float32)
    assert policy.prepare(zeros_D, [ONE], {ONE: 500}).payloads == {}


def test_the_saved_budget_of_a_link_survives_a_restart_but_not_the_loss_of_its_peer() -> None:
    policy = MaxN(LAYOUT, ValueCodec.FLOAT32)
    policy.prepare(some_gradient(), [ONE], {ONE: HEADER_BYTES})
    restored = MaxN(LAYOUT, ValueCodec.FLOAT32)
    restored.restore(policy.state())
    assert restored.state() == policy.state() == {"saved_bytes_1": HEADER_BYTES}
    restored.forget(ONE)
    assert restored.state() == {}


@pytest.mark.parametrize("codec", list(ValueCodec))
def test_a_whole_gradient_counts_here_the_same_as_at_the_peers(codec: ValueCodec) -> None:
    sent = WholeGradient(codec).prepare(some_gradient(), [ONE, TWO], {ONE: 10})
    assert sent.payloads[ONE] is sent.payloads[TWO]
    arrived = decode_gradient(sent.payloads[ONE], SIZE)
    np.testing.assert_array_equal(sent.own.value_K, arrived.value_K)
