"""What people are told of a worker that holds still, and that nobody is told where it never does.

Proves: a link that breaks for a moment holds the worker and is no news; one that stays away as long
as a silence may is told once, and so is its end; without a quorum of two sites nothing is sent and
nothing held; every policy takes the two events.
Left out: who counts (tests/property/test_quorum.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_worker.policies import build
from dlion_worker.policies.catalogue import BUILT_IN
from dlion_worker.policies.interface import (
    Layout,
    LocalStepDone,
    MemberJoined,
    Message,
    MessageArrived,
    MessageKind,
    QuorumBack,
    QuorumLost,
    Refuse,
)
from dlion_worker.policies.quorum import LinkState, encode
from dlion_worker.trainer.standstill import PATIENCE_S
from quorum_cluster import QuorumCluster
from weights_cluster import weights_spec

A, B = Rank(0), Rank(1)


def look_all(cluster: QuorumCluster) -> None:
    for standstill in cluster.standstills.values():
        standstill.look()


def test_a_link_that_breaks_for_a_moment_holds_and_is_no_news() -> None:
    cluster = QuorumCluster([1, 1], 2, seed=0)
    for moment_s in (0.1, PATIENCE_S - 0.1):
        cluster.break_link(A, B)
        assert not cluster.may_step(A)
        cluster.now_s += moment_s
        look_all(cluster)
        cluster.mend_link(A, B)
        cluster.deliver_all()
        assert cluster.may_step(A)
        assert cluster.may_step(B)
        cluster.lockstep(1)
    assert not cluster.events


def test_a_loss_that_lasts_is_told_once_and_so_is_its_end() -> None:
    cluster = QuorumCluster([1, 1], 2, seed=0)
    cluster.break_link(A, B)
    for after_s in (PATIENCE_S, 1.0, 100.0):
        cluster.now_s += after_s
        look_all(cluster)
    assert cluster.events == [
        (PATIENCE_S, A, EventReason.QUORUM_LOST),
        (PATIENCE_S, B, EventReason.QUORUM_LOST),
    ]
    cluster.events.clear()
    cluster.mend_link(A, B)
    cluster.deliver_all()
    for _ in range(2):
        for rank in (A, B):
            if cluster.may_step(rank):
                cluster.step(rank)
            cluster.deliver_all()
    assert {(rank, reason) for _, rank, reason in cluster.events} == {
        (A, EventReason.QUORUM_BACK),
        (B, EventReason.QUORUM_BACK),
    }
    assert len(cluster.events) == 2


def test_with_a_quorum_of_one_nothing_is_sent_and_nothing_held() -> None:
    cluster = QuorumCluster([1, 1], 1, seed=0)
    cluster.break_link(A, B)
    assert cluster.may_step(A)
    cluster.mend_link(A, B)
    kinds = {message.kind for queue in cluster.links.values() for message in queue}
    assert MessageKind.REACH not in kinds
    state = LinkState(B, 1, 1, is_still=False, linked=frozenset())
    with pytest.raises(AssertionError, match="minSites is 1"):  # the cluster takes no refusal
        cluster.handle(A, MessageArrived(B, Message(MessageKind.REACH, 0, payload=encode([state]))))


class Weights:
    """A replica to look at."""

    weights_D = np.zeros(5, np.float32)


@pytest.mark.parametrize("policy", sorted(set(BUILT_IN) - {"dlion-published"}))
def test_every_policy_takes_the_two_events(policy: str) -> None:
    momentum = {"momentum": 0} if policy in {"dgc", "twostep"} else {}
    sites = {A: "a", B: "b"}
    layout = Layout(("w",), (5,))
    job_spec = weights_spec(policy, **momentum)
    machine = build(job_spec, A, layout, sites, sites=sites, replica=Weights())
    machine.handle(MemberJoined(B))
    machine.handle(LocalStepDone(1, np.ones(5, np.float32), 4, 1.0))
    for event in (QuorumLost(), QuorumBack(others_went_on=False), QuorumBack(others_went_on=True)):
        told = machine.handle(event)
        assert not [one for one in told if isinstance(one, Refuse)]
