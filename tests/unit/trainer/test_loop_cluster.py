"""Facts: workers in lock step that vanish, alone or two at once, the lowest rank too, and come back
while messages are on their way, meet the others at an iteration: every worker holds bit-identical
weights after every step that it makes. Nobody is stuck.

Real loop, entrance, inbox, policies; in place of TensorFlow and the network see `loop_cluster`.
Threads and delays are real and short, so schedules differ from run to run; the seed decides who is
killed. Left out: a worker that vanishes when some peers have its gradient and others have not.
"""

from __future__ import annotations

import random
import time

import pytest

from dlion_api.names import Rank
from loop_cluster import Network, Node, synchronous_job

WORKERS, KILLS, NAP_S, DELAY_S = 4, 4, 0.003, 0.003


def differing(nodes: list[Node]) -> list[int]:
    known: dict[int, set[str]] = {}
    for node in nodes:
        for iteration, weights_hash in node.hashes.items():
            known.setdefault(iteration, set()).add(weights_hash)
    return sorted(iteration for iteration, hashes in known.items() if len(hashes) > 1)


@pytest.mark.parametrize("seed", range(2))
def test_who_comes_back_holds_the_others_weights(seed: int) -> None:
    job, chance = synchronous_job(WORKERS, 10_000_000), random.Random(seed)
    network = Network(chance, DELAY_S)
    nodes = {Rank(r): Node(job, Rank(r), network, 1, NAP_S).start() for r in range(WORKERS)}
    try:
        for kill in range(KILLS):
            dead = [Rank(0)] if kill == 0 else chance.sample(sorted(nodes), chance.choice([1, 2]))
            for rank in dead:
                nodes[rank].kill()
            time.sleep(0.05 * chance.random())
            for rank in dead:
                nodes[rank] = Node(job, rank, network, kill + 2, NAP_S).start()
            deadline_s = time.monotonic() + 30
            while not all(len(nodes[rank].hashes) > 10 for rank in dead):
                assert time.monotonic() < deadline_s, f"seed {seed}: {dead} never came back"
                time.sleep(0.01)
            assert not differing(list(nodes.values())), f"seed {seed}, after kill {kill} of {dead}"
    finally:
        for node in nodes.values():
            node.kill()
    assert not [node.error for node in nodes.values() if node.error is not None]
