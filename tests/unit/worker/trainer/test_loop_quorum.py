"""Tests of training loops with a quorum: two sites with `minSites: 2`, of which one loses its only
worker.

Workers of the other site finish the current step and begin no other. The lost worker joins at the
iteration where all are halted. Then all continue in lock step with bit-identical weights. A worker
that is asked to stop while all are halted ends; so does one that is joining. A worker that is
halted while others train joins again, without another worker's place.

Loop, entrance, inbox and policies are real; `loop_cluster` replaces TensorFlow and the network.

Left out: which workers count as joined, and weights after a split (tests/property/test_quorum.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

import pytest
from tests.unit.worker.trainer.test_loop_cluster import differing

from dlion_api.names import Rank
from dlion_core.lifecycle import join_barrier
from loop_cluster import Network, Node, synchronous_job

NAP_S, DELAY_S = 0.003, 0.003
SOME_STEPS_S = 0.1
"""Long enough for tens of steps."""


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


def all_step(nodes: Iterable[Node]) -> None:
    before = {node.rank: len(node.hashes) for node in nodes}
    wait_until(
        lambda: all(len(node.hashes) > before[node.rank] + 10 for node in nodes), "all continue"
    )


def wait_until_halted(nodes: Iterable[Node]) -> None:
    """Wait until all workers are halted, each at most after its current step."""
    nodes = list(nodes)
    wait_until(lambda: all(node.lacks_quorum for node in nodes), "all hold still")
    before = [len(node.hashes) for node in nodes]
    time.sleep(SOME_STEPS_S)
    assert all(len(node.hashes) <= steps + 1 for node, steps in zip(nodes, before, strict=True))


def test_a_single_site_is_halted_until_the_other_returns() -> None:
    job = synchronous_job({"a": 2, "b": 1}, 10_000_000, min_sites=2)
    network = Network(random.Random(1), DELAY_S)
    ranks = [worker.rank for worker in job.workers()]
    nodes = {rank: Node(job, rank, network, 1, NAP_S).start() for rank in ranks}
    here, lost = [nodes[Rank(0)], nodes[Rank(1)]], Rank(2)
    try:
        all_step(nodes.values())
        nodes[lost].kill()
        wait_until_halted(here)

        nodes[lost] = Node(job, lost, network, 2, NAP_S).start()
        all_step(nodes.values())
        assert not any(node.lacks_quorum for node in nodes.values())
        assert not differing(list(nodes.values()))

        nodes[lost].kill()
        wait_until_halted(here)
    finally:
        for node in here:  # the second one got the message from the first
            node.stop()
    assert not [node.error for node in nodes.values() if node.error is not None]


def test_a_site_halted_while_others_trained_joins_again() -> None:
    job = synchronous_job({"a": 1, "b": 1, "c": 1}, 10_000_000, min_sites=2)
    network = Network(random.Random(2), DELAY_S)
    ranks = [worker.rank for worker in job.workers()]
    nodes = {rank: Node(job, rank, network, 1, NAP_S).start() for rank in ranks}
    alone, others = nodes[Rank(1)], [nodes[Rank(0)], nodes[Rank(2)]]
    try:
        all_step(nodes.values())
        network.cut_off(alone)
        wait_until_halted([alone])
        all_step(others)
        assert not alone.replica.taken
        network.restore(alone)
        all_step(nodes.values())
        assert alone.replica.taken == 1
        assert not any(node.replica.taken for node in others)
        assert not any(node.lacks_quorum for node in nodes.values())

        network.cut_off(alone)
        wait_until_halted([alone])
        alone.stop()
    finally:
        for node in nodes.values():
            node.stop()
    assert not [node.error for node in nodes.values() if node.error is not None]


def test_a_returning_worker_that_is_asked_to_stop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_barrier, "ALL_LINKS_WAIT_S", 3600.0)  # it waits for the lost worker
    job = synchronous_job({"a": 1, "b": 1, "c": 1, "d": 1}, 10_000_000, min_sites=2)
    network = Network(random.Random(3), DELAY_S)
    ranks = [worker.rank for worker in job.workers()]
    nodes = {rank: Node(job, rank, network, 1, NAP_S).start() for rank in ranks}
    alone, gone, others = nodes[Rank(1)], nodes[Rank(3)], [nodes[Rank(0)], nodes[Rank(2)]]
    try:
        all_step(nodes.values())
        gone.kill()
        network.cut_off(alone)
        wait_until_halted([alone])
        held_at = alone.progress.iteration
        all_step(others)
        network.restore(alone)
        wait_until(lambda: alone.is_on_the_way_back, "it joins again")
        all_step(others)
        alone.stop()
        assert alone.progress.iteration in {held_at - 1, held_at}, "an unfinished step is undone"
        assert not alone.replica.taken
    finally:
        for node in nodes.values():
            node.stop()
    assert not [node.error for node in nodes.values() if node.error is not None]
