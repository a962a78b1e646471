"""Tests of the CPU cost of a step.

All work of the main thread for peers counts as the exchange's; the batch and the gradient do not.
Capacity uses the rest.

The loop of a single worker is real (`loop_cluster`). It burns 20 ms of CPU in the model, or where
it asks links for their room.

Left out: gRPC's threads (tests/local).
"""

from __future__ import annotations

import random
import statistics
import time

import pytest

from dlion_api.names import Rank
from loop_cluster import Network, Node, synchronous_job

BURNT_S = 0.02


def burn() -> None:
    until_s = time.thread_time() + BURNT_S
    while time.thread_time() < until_s:
        pass


class Burning(Node):
    """A worker that burns CPU for its links, or for its gradient."""

    for_links = True

    def sendable_bytes(self) -> dict[Rank, float]:
        if self.for_links:
            burn()
        return {}

    def _vanish_if_killed(self) -> None:
        if not self.for_links:
            burn()
        super()._vanish_if_killed()


@pytest.mark.parametrize("for_links", [True, False])
def test_the_cost_of_peers_in_the_main_thread_counts_as_the_exchanges(for_links: bool) -> None:
    network = Network(random.Random(0), 0.0)
    node = Burning(synchronous_job(1, 5), Rank(0), network, 1, 0.0)
    node.for_links = for_links
    node.start()
    node.thread.join(60)
    assert node.error is None
    exchange_s = statistics.median(step.exchange_cpu_s for step in node.steps)
    own_s = statistics.median(step.cpu_s - step.exchange_cpu_s for step in node.steps)
    burnt_s, rest_s = (exchange_s, own_s) if for_links else (own_s, exchange_s)
    assert burnt_s >= BURNT_S
    assert rest_s < BURNT_S / 2
