"""Limits on the iterations that peers report, under every policy.

An iteration that no peer can have reached is refused and changes nothing. Real reports of peers far
ahead are accepted. A result that its sender's own steps do not support is refused too.

A worker that joins again continues at the iteration of the weights that it takes over. Its warm-up
continues; state about its old weights is dropped.

Left out: the handling of a peer that keeps sending such reports (tests/unit/worker/trainer).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, encode_whole
from dlion_core.policies.catalogue import BUILT_IN
from dlion_core.policies.factory import build
from dlion_core.policies.hierarchical.site_messages import RESULT
from dlion_core.policies.interface import (
    Layout,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    PolicyMachine,
    RejectMessage,
)
from dlion_core.policies.iteration_guard import (
    MAX_FOLLOWED_LEAD,
    MAX_FOLLOWED_RATIO,
    MAX_ITERATION,
    MAX_LEAD,
    MAX_PACE_RATIO,
    IterationGuard,
)
from example_counts import examples
from sites_cluster import SitesCluster
from weights_cluster import weights_spec

LAYOUT = Layout(("a",), (20,))
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)
WHOLE = encode_whole(np.ones(20, np.float32), ValueCodec.FLOAT32)


POLICIES = sorted(set(BUILT_IN) - {"dlion-published", "staged"})
"""The first is the machine of `dlion`, the other needs its own topology."""

OF_POLICY = {"demo": {"momentum": 0}, "dgc": {"momentum": 0}, "twostep": {"momentum": 0}}
"""The parameters that the manifest's own momentum requires."""


class Weights:
    """A readable replica."""

    weights_D = np.ones(20, np.float32)
    resting_D = weights_D


def machine_of(policy: str) -> IterationGuard:
    """Worker 0 of three, all linked."""
    sites = {ME: "a", ONE: "a", TWO: "b"}
    job = weights_spec(policy, **OF_POLICY.get(policy, {}))
    machine = build(job, ME, LAYOUT, sites, sites=sites, replica=Weights())
    for peer in (ONE, TWO):
        machine.handle(MemberJoined(peer))
    return machine


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_joins_again_continues_at_the_iteration_of_its_peers_weights(
    policy: str,
) -> None:
    machine = machine_of(policy).restarted()
    assert not machine.waiting_for()
    machine.take_over(9)
    assert (machine.next_iteration(), machine.waiting_for()) == (10, frozenset())


def test_a_worker_that_joins_again_keeps_its_warm_up_but_no_state_of_its_old_weights() -> None:
    machine = machine_of("dgc")
    machine.handle(LocalStepDone(1, np.ones(20, np.float32), 8, 1.0))
    before = machine.state()
    assert (before["dgc_steps"], before["held_samples_0"]) == (1, 8)
    machine = machine.restarted()
    machine.take_over(9)
    state = machine.state()
    assert state["dgc_steps"] == 1
    assert "held_samples_0" not in state  # a peer's weights may lack what was trained on apart


def refusals(machine: PolicyMachine, message: Message) -> list[str]:
    instructions = machine.handle(MessageArrived(ONE, message))
    return [one.reason for one in instructions if isinstance(one, RejectMessage)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [MessageKind.PROGRESS, MessageKind.GRADIENT])
def test_an_absurd_iteration_is_refused_and_changes_nothing(policy: str, kind: MessageKind) -> None:
    machine = machine_of(policy)
    machine.handle(LocalStepDone(1, np.ones(20, np.float32), 4, 1.0))
    waiting, following = machine.waiting_for(), machine.next_iteration()
    payload = WHOLE if kind is MessageKind.GRADIENT else b""
    (reason,) = refusals(machine, Message(kind, 2**50, 4, 0, payload))
    assert f"iteration {2**50}; allowed: up to {MAX_LEAD + 1}" in reason
    assert (machine.waiting_for(), machine.next_iteration()) == (waiting, following)


@given(
    policy=st.sampled_from(POLICIES),
    taken_over=st.integers(0, 10**6),
    own_steps=st.integers(1, 5),
    share=st.floats(0, 1),
    steps=st.lists(st.integers(1, MAX_LEAD), min_size=1, max_size=6),
)
@settings(deadline=None, max_examples=examples(60))
def test_a_peer_far_ahead_is_believed_within_its_possible_steps(
    policy: str, taken_over: int, own_steps: int, share: float, steps: list[int]
) -> None:
    """However far it was when its link came up, and however many steps did not use this link."""
    machine = machine_of(policy)
    machine.take_over(taken_over)
    for step in range(own_steps):
        machine.handle(LocalStepDone(taken_over + step + 1, np.ones(20, np.float32), 4, 1.0))
        machine.handle(MemberLeft(ONE))
        machine.handle(MemberLeft(TWO))
    most = MAX_LEAD + MAX_PACE_RATIO * (taken_over + own_steps)
    began = int(share * most)
    assert not hello_refusals(machine, began)
    for step in steps:
        began += step
        refused = refusals(machine, Message(MessageKind.PROGRESS, began, 4))
        assert bool(refused) == (began > most)


def hello_refusals(machine: PolicyMachine, iteration: int) -> list[str]:
    instructions = machine.handle(MemberJoined(ONE, iteration))
    return [one.reason for one in instructions if isinstance(one, RejectMessage)]


@pytest.mark.parametrize("policy", ["full", "adaptive", "ako"])
def test_peers_that_trained_while_this_worker_was_paused_are_not_excluded(policy: str) -> None:
    """A laptop at step 500 that was suspended for a night, and its peers at iteration 720,000."""
    machine = machine_of(policy)
    machine.take_over(500)
    instructions = machine.handle(MemberJoined(ONE, 720_000))
    own = 500
    while refused := [one for one in instructions if isinstance(one, RejectMessage)]:
        assert not any(one.is_violation for one in refused)
        assert own < 700, "each own step allows more of it"
        for peer in (ONE, TWO):
            machine.handle(MemberLeft(peer))
        own = machine.next_iteration()
        machine.handle(LocalStepDone(own, np.ones(20, np.float32), 4, 1.0))
        machine.handle(MemberJoined(ONE, 720_000))
        instructions = machine.handle(
            MessageArrived(ONE, Message(MessageKind.PROGRESS, 720_001, 4))
        )
    assert own > 600


@pytest.mark.parametrize("iteration", [MAX_ITERATION + 1, 2**50])
def test_an_iteration_that_no_worker_can_have_reached_is_a_violation(iteration: int) -> None:
    machine = machine_of("full")
    messages = [MessageArrived(ONE, Message(MessageKind.PROGRESS, iteration, 4))] * 2
    for event in (MemberJoined(ONE, iteration), *messages):
        (refused,) = [one for one in machine.handle(event) if isinstance(one, RejectMessage)]
        assert refused.is_violation


def test_a_hello_with_an_absurd_iteration_is_reported_and_counts_as_the_furthest_possible() -> None:
    machine = machine_of("full")
    machine.handle(LocalStepDone(1, np.ones(20, np.float32), 4, 1.0))
    most = MAX_LEAD + MAX_PACE_RATIO
    assert hello_refusals(machine, 2**50) == [f"hello of iteration {2**50}; allowed: up to {most}"]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_peer_is_followed_beyond_its_possible_iteration(policy: str) -> None:
    """A false iteration would end a run by maxSteps."""
    machine = machine_of(policy)
    machine.handle(LocalStepDone(1, np.ones(20, np.float32), 4, 1.0))
    for peer in (ONE, TWO):
        machine.handle(MessageArrived(peer, Message(MessageKind.PROGRESS, 90_000, 4)))
    assert machine.next_iteration() <= MAX_FOLLOWED_LEAD + MAX_FOLLOWED_RATIO


@pytest.mark.parametrize(
    "kind", [MessageKind.LOSS, MessageKind.WEIGHTS, MessageKind.HELD, MessageKind.FOLD]
)
def test_messages_of_any_kind_must_have_a_possible_iteration(kind: MessageKind) -> None:
    machine = machine_of("full")
    (reason,) = refusals(machine, Message(kind, MAX_LEAD + 1))
    assert f"{kind.name} of iteration {MAX_LEAD + 1}; allowed: up to {MAX_LEAD}" in reason


def test_a_hello_does_not_make_others_believed() -> None:
    machine = machine_of("full")
    machine.handle(MemberJoined(TWO, 2**50))
    assert refusals(machine, Message(MessageKind.PROGRESS, 2**50, 4))


def test_a_result_of_an_unreached_iteration_is_refused_and_the_right_one_accepted() -> None:
    cluster = SitesCluster(weights_spec("hierarchical", betweenShare=1), [2, 2], [2])
    cluster.step(ONE)
    machine = cluster.replicas[ONE].machine
    for iteration in (100, MAX_LEAD, 2**50):
        message = Message(MessageKind.GRADIENT, iteration, 4, RESULT, WHOLE)
        instructions = machine.handle(MessageArrived(ME, message))
        (refusal,) = [one for one in instructions if isinstance(one, RejectMessage)]
        assert f"iteration {iteration}" in refusal.reason
    cluster.step(ME)
    cluster.deliver_all()
    np.testing.assert_array_equal(*cluster.weights())
    assert len(cluster.replicas[ONE].descents()) == 1
