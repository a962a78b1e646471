"""Facts: of two sites with `minSites: 2` one loses its only worker: the other's workers begin no
step beyond the one under way; the lost one comes in at an iteration that all hold at, in lock step,
and all go on with bit-identical weights. One that is told to stop while all hold still ends, and so
does one on its way back. A worker that holds still while others train comes in anew, and takes
nobody's place.

Real loop, entrance, inbox, policies; in place of TensorFlow and the network see `loop_cluster`.
Left out: who counts as joined, weights after a split (tests/property/test_quorum.py).
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
"""In which tens of steps would be made."""


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


def all_step(nodes: Iterable[Node]) -> None:
    before = {node.rank: len(node.hashes) for node in nodes}
    wait_until(
        lambda: all(len(node.hashes) > before[node.rank] + 10 for node in nodes), "all go on"
    )


def hold_still(nodes: Iterable[Node]) -> None:
    """They come to do so, and end no more than the step that was under way."""
    nodes = list(nodes)
    wait_until(lambda: all(node.lacks_quorum for node in nodes), "all hold still")
    before = [len(node.hashes) for node in nodes]
    time.sleep(SOME_STEPS_S)
    assert all(len(node.hashes) <= steps + 1 for node, steps in zip(nodes, before, strict=True))


def test_a_site_alone_holds_still_until_the_other_is_back() -> None:
    job = synchronous_job({"a": 2, "b": 1}, 10_000_000, min_sites=2)
    network = Network(random.Random(1), DELAY_S)
    ranks = [worker.rank for worker in job.workers()]
    nodes = {rank: Node(job, rank, network, 1, NAP_S).start() for rank in ranks}
    here, lost = [nodes[Rank(0)], nodes[Rank(1)]], Rank(2)
    try:
        all_step(nodes.values())
        nodes[lost].kill()
        hold_still(here)

        nodes[lost] = Node(job, lost, network, 2, NAP_S).start()
        all_step(nodes.values())
        assert not any(node.lacks_quorum for node in nodes.values())
        assert not differing(list(nodes.values()))

        nodes[lost].kill()
        hold_still(here)
    finally:
        for node in here:  # the second has heard it from the first
            node.stop()
    assert not [node.error for node in nodes.values() if node.error is not None]


def test_a_site_that_held_still_while_others_trained_comes_in_anew() -> None:
    job = synchronous_job({"a": 1, "b": 1, "c": 1}, 10_000_000, min_sites=2)
    network = Network(random.Random(2), DELAY_S)
    ranks = [worker.rank for worker in job.workers()]
    nodes = {rank: Node(job, rank, network, 1, NAP_S).start() for rank in ranks}
    alone, others = nodes[Rank(1)], [nodes[Rank(0)], nodes[Rank(2)]]
    try:
        all_step(nodes.values())
        network.cut_off(alone)
        hold_still([alone])
        all_step(others)
        assert not alone.replica.taken
        network.restore(alone)
        all_step(nodes.values())
        assert alone.replica.taken == 1
        assert not any(node.replica.taken for node in others)
        assert not any(node.lacks_quorum for node in nodes.values())

        network.cut_off(alone)
        hold_still([alone])
        alone.stop()
    finally:
        for node in nodes.values():
            node.stop()
    assert not [node.error for node in nodes.values() if node.error is not None]


def test_one_that_is_told_to_stop_on_its_way_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        join_barrier, "ALL_LINKS_WAIT_S", 3600.0
    )  # it waits for the one that is gone
    job = synchronous_job({"a": 1, "b": 1, "c": 1, "d": 1}, 10_000_000, min_sites=2)
    network = Network(random.Random(3), DELAY_S)
    ranks = [worker.rank for worker in job.workers()]
    nodes = {rank: Node(job, rank, network, 1, NAP_S).start() for rank in ranks}
    alone, gone, others = nodes[Rank(1)], nodes[Rank(3)], [nodes[Rank(0)], nodes[Rank(2)]]
    try:
        all_step(nodes.values())
        gone.kill()
        network.cut_off(alone)
        hold_still([alone])
        held_at = alone.progress.iteration
        all_step(others)
        network.restore(alone)
        wait_until(lambda: alone.is_on_the_way_back, "it comes in anew")
        all_step(others)
        alone.stop()
        assert alone.progress.iteration in {held_at - 1, held_at}, "a step under way is undone"
        assert not alone.replica.taken
    finally:
        for node in nodes.values():
            node.stop()
    assert not [node.error for node in nodes.values() if node.error is not None]
