"""Tests of whole simulated jobs of moving workers, under `exchange.grouping: learned`.

When a worker drives from one convoy to the other, all workers soon have the same new groups,
without a restart, and training continues. Groups do not change back and forth. Removed links carry
nothing. The same run repeats bit by bit.

Left out: comparisons (benchmarks/clustering.py); the choice of groups
(tests/property/test_learned_groups.py).
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import yaml
from tests.support.simulations import Case, Simulated, SimulatedCases

from dlion_environments.loading import FILES

SECONDS = 260
LEAVES_S, ARRIVES_S = 100, 170
"""Times at which worker 3 leaves one convoy and joins the other, in the published environment."""
GROUPS = re.compile(r"made groups \((\d+)\) of links: ([\d |]+)")
SETTINGS: dict[str, Any] = {
    "sites": [
        {"name": "plant-a", "groups": [{"name": "small", "workers": 4}]},
        {"name": "plant-b", "groups": [{"name": "large", "workers": 4}]},
    ],
    "trainer.stop": {"maxSeconds": SECONDS},
    "trainer.evaluation.everySamples": 10_000_000,
    "batching.globalBatchSize": {"initial": 320, "growth": False},
    "knowledgeTransfer.policy": "none",
    "exchange": {
        "policy": "hop", "codec": "float16", "topology": "clustered", "grouping": "learned",
    },
}  # fmt: skip
CONVOYS = yaml.safe_load((FILES / "convoys.yaml").read_text())
CASES = {name: Case(CONVOYS, SETTINGS) for name in ("convoys", "again")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimulatedCases:
    return SimulatedCases(tmp_path_factory.mktemp("moving"), CASES)


def groupings(run: Simulated, rank: int) -> list[tuple[float, frozenset[frozenset[int]]]]:
    """The times at which that worker received groups, and the groups."""
    return [
        (
            record["time_s"],
            frozenset(frozenset(map(int, group.split())) for group in groups.split("|")),
        )
        for record in run.records
        if record["kind"] == "directive" and record["rank"] == rank
        for _, groups in GROUPS.findall(record["reason"])
    ]


def test_all_workers_have_the_same_groups_after_one_has_changed_convoys(
    runs: SimulatedCases,
) -> None:
    received = [groupings(runs["convoys"], rank) for rank in range(8)]
    joined = frozenset({frozenset({0, 1, 2}), frozenset({3, 4, 5, 6, 7})})
    for each in received:
        assert [groups for _, groups in each] == [groups for _, groups in received[0]]
        assert each[-1][1] == joined
        assert each[0][0] > LEAVES_S
        assert each[-1][0] < ARRIVES_S + 40
    assert len(received[0]) <= 3  # at most alone in between, and gateways


def test_training_continues_and_removed_links_carry_nothing(runs: SimulatedCases) -> None:
    run = runs["convoys"]
    steps = Counter(
        record["rank"] for record in run.records
        if record["kind"] == "step" and record["time_s"] > ARRIVES_S + 40
    )  # fmt: skip
    assert len(steps) == 8
    assert min(steps.values()) > 20
    late = Counter[tuple[int, int]]()
    for record in run.records:
        if record["kind"] == "link" and record["time_s"] > ARRIVES_S + 60:
            late[record["rank"], record["peer"]] += record["sent_bytes"]
    (_, groups) = groupings(run, 0)[-1]
    gateways = {rank for rank in range(8) if any(late[rank, p] > 0 for p in _others(rank, groups))}
    assert len(gateways) == 2
    assert late[3, 4] > 0 < late[0, 1]


def _others(rank: int, groups: frozenset[frozenset[int]]) -> list[int]:
    """Workers of other groups."""
    return [peer for group in groups if rank not in group for peer in group]


@pytest.mark.slow
def test_the_same_run_repeats_bit_by_bit(runs: SimulatedCases) -> None:
    assert runs["again"].trace_hash == runs["convoys"].trace_hash
