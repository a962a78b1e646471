"""Facts: of two sites with `minSites: 2` one loses its only worker: the other's workers begin no
step, whose own worker that starts anew waits with them; the lost one comes in at an iteration that
all hold at, in lock step, and all go on with bit-identical weights. One that is told to stop while
all hold still ends, and the others hear of it.

Real loop, entrance, inbox, policies; in place of TensorFlow and the network see `loop_cluster`.
Left out: who counts as joined, weights after a split (tests/property/test_quorum.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from tests.unit.trainer.test_loop_cluster import differing

from dlion_api.names import Rank
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


def test_a_site_alone_holds_still_until_the_other_is_back() -> None:
    job = synchronous_job({"a": 2, "b": 1}, 10_000_000, min_sites=2)
    network = Network(random.Random(1), DELAY_S)
    ranks = [worker.rank for worker in job.workers()]
    nodes = {rank: Node(job, rank, network, 1, NAP_S).start() for rank in ranks}
    everybody, here = nodes.values(), [Rank(0), Rank(1)]
    all_step(everybody)

    nodes[Rank(2)].kill()
    wait_until(lambda: all(nodes[rank].holds_still for rank in here), "both hold still")
    steps = [len(nodes[rank].hashes) for rank in here]
    time.sleep(SOME_STEPS_S)
    assert [len(nodes[rank].hashes) for rank in here] == steps

    nodes[Rank(2)] = Node(job, Rank(2), network, 2, NAP_S).start()
    all_step(everybody)
    assert not any(node.holds_still for node in everybody)
    assert not differing(list(everybody))

    nodes[Rank(2)].kill()
    wait_until(lambda: all(nodes[rank].holds_still for rank in here), "both hold still again")
    nodes[Rank(0)].stop()
    nodes[Rank(1)].thread.join(10)
    assert not nodes[Rank(1)].thread.is_alive()
    assert not [node.error for node in everybody if node.error is not None]
