"""Whole machines of policies that keep entries for later: `topk`, `ako`, `demo`, `dgc`, `dlion`.

A machine restored in mid-run continues bit for bit, in messages and updates. In lock step with
narrow budgets, members that die and return block no worker.

Left out: each policy's own arithmetic (test_topk.py, test_ako.py and so on).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_api.spec import Spec
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    ApplyGradient,
    BudgetsChanged,
    Event,
    Instruction,
    LocalStepDone,
    MemberJoined,
    MessageArrived,
    SendMessage,
)
from policy_cluster import Cluster, spec

EXCHANGES: dict[str, dict[str, object]] = {
    "topk-none": {"policy": "topk", "parameters": {"share": 0.2, "residual": "none"}},
    "topk-shared": {"policy": "topk", "parameters": {"share": 0.2}},
    "topk-perLink": {"policy": "topk", "parameters": {"share": 0, "residual": "perLink"}},
    "ako": {"policy": "ako"},
    "ako-3": {"policy": "ako", "parameters": {"partitions": 3}},
    "demo": {"policy": "demo", "parameters": {"chunk": 4}},
    "dgc": {"policy": "dgc", "parameters": {"share": 0.1, "warmupEverySteps": 3}},
    "dlion-shared": {"residual": "shared"},
    "dlion-perLink": {"residual": "perLink"},
}
MODES = ["synchronous", "bounded", "asynchronous"]
NAMES_AND_MODES = [
    (name, mode) for name in EXCHANGES for mode in MODES if name != "demo" or mode == MODES[0]
]


def job(name: str, mode: str) -> Spec:
    built = spec(exchange=EXCHANGES[name], synchronization={"mode": mode, "maxStaleness": 1})
    optimizer = replace(built.trainer.optimizer, momentum=0.0)
    return replace(built, trainer=replace(built.trainer, optimizer=optimizer))


def comparable(instructions: list[Instruction]) -> list[object]:
    """Instructions in a form that can be compared."""
    return [
        one.gradient_D.tobytes()
        if isinstance(one, ApplyGradient)
        else (one.peer, one.message.kind, one.message.iteration, bytes(one.message.payload))
        if isinstance(one, SendMessage)
        else one
        for one in instructions
    ]


@pytest.mark.parametrize(("name", "mode"), NAMES_AND_MODES)
@pytest.mark.parametrize("seed", range(3))
def test_a_restored_machine_continues_identically(name: str, mode: str, seed: int) -> None:
    job_spec = job(name, mode)
    cluster = Cluster(job_spec, [3, 5], seed=seed)
    me, peer = cluster.ranks
    for rank, other in ((me, peer), (peer, me)):
        cluster.budgets(rank, {other: 40})
    cluster.lockstep(7)
    copy = build(job_spec, me, cluster.layout, cluster.ranks)
    copy.restore(cluster.replicas[me].machine.state())
    copy.handle(MemberJoined(peer, 7))
    copy.handle(BudgetsChanged({peer: 40}))
    rng = np.random.default_rng(seed)
    for iteration in range(8, 16):
        cluster.step(peer)  # the peer's messages go to both
        events: list[Event] = [MessageArrived(peer, message) for message in cluster.links[peer, me]]
        cluster.links[peer, me].clear()
        gradient_D = rng.standard_normal(cluster.layout.size).astype(np.float32)
        step = LocalStepDone(iteration, gradient_D, 3, 0.1)
        events.insert(int(rng.integers(len(events) + 1)), step)
        for event in events:
            assert comparable(copy.handle(event)) == comparable(cluster.handle(me, event))
        assert copy.waiting_for() == cluster.replicas[me].machine.waiting_for()
        cluster.deliver_all()


@pytest.mark.parametrize("before", EXCHANGES)
@pytest.mark.parametrize("after", EXCHANGES)
def test_a_checkpoint_of_another_policy_is_used_as_far_as_possible(before: str, after: str) -> None:
    cluster = Cluster(job(before, "synchronous"), [3, 5])
    cluster.lockstep(3)
    me = cluster.ranks[0]
    machine = build(job(after, "synchronous"), me, cluster.layout, cluster.ranks)
    machine.restore(cluster.replicas[me].machine.state())
    assert machine.next_iteration() == 4
    instructions = machine.handle(
        LocalStepDone(4, np.ones(cluster.layout.size, np.float32), 3, 0.1)
    )
    assert any(isinstance(one, ApplyGradient) for one in instructions)


@pytest.mark.parametrize(("name", "mode"), NAMES_AND_MODES)
def test_deaths_and_returns_block_no_worker(name: str, mode: str) -> None:
    cluster = Cluster(job(name, mode), [3, 5, 4])
    for rank in cluster.ranks:
        cluster.budgets(rank, {peer: 25 + 9 * peer for peer in cluster.ranks if peer != rank})
    cluster.lockstep(5)
    gone, stay, other = cluster.ranks
    cluster.leave(gone)
    for _ in range(4):
        cluster.step(stay)
        cluster.step(other)
        cluster.deliver_all()
    state = cluster.replicas[gone].machine.state()
    cluster.replicas[gone].machine = build(cluster.job_spec, gone, cluster.layout, cluster.ranks)
    cluster.replicas[gone].machine.restore(state)
    for peer in (stay, other):
        cluster.handle(gone, MemberJoined(peer))
        cluster.handle(peer, MemberJoined(gone))
    cluster.deliver_all()
    before = {rank: replica.iteration for rank, replica in cluster.replicas.items()}
    for _ in range(12):
        for rank in cluster.ranks:
            if cluster.may_step(rank):
                cluster.step(rank)
        cluster.deliver_all()
    assert all(cluster.replicas[Rank(rank)].iteration >= before[rank] + 6 for rank in before)
