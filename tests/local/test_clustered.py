"""Test jobs of `exchange.topology: clustered`, simulated and real.

Simulated: two fast sites are joined by slow links. One pair of workers exchanges between them, with
a third of the bytes of `allToAll` for the same steps. When links between sites become slow, and
fast again, all workers regroup once each time, to the same groups. A small change regroups no
worker. A gateway that dies is replaced, and training continues. Every run repeats bit by bit.

Real: links carry weights only inside groups and between gateways. When the gateway's trainer is
killed, another takes its place. All workers hold the same grouping, and the run ends with models of
all.

Left out: which groups are formed (tests/property/test_clusters.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.support.simulations import Case, Simulated, four_workers, simulate_all

from dlion_api.protocol.progress import DirectiveRecord, LinkRecord
from local_run import UNTIL_THERE, LocalRun, blobs, job_document

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.patient

BETWEEN = {(rank, 3) for rank in range(3)} | {(3, rank) for rank in range(3)}
LINKS: dict[str, Any] = {
    "workers": [{"count": 4, "cores": 4}],
    "insideSites": {"mbitPerS": 1000},
    "betweenSites": {"mbitPerS": 20, "latencyMs": 10},
}
GROUPS = re.compile(r"made groups \((\d+)\) of links: ([\d |]+)")


def settings(topology: str, steps: int, **more: Any) -> dict[str, Any]:
    return {
        "trainer.stop": {"maxSteps": steps},
        "trainer.evaluation.everySamples": 100_000,
        "batching.globalBatchSize": {"initial": 80, "growth": False},
        "knowledgeTransfer.policy": "none",
        "exchange": {"policy": "hop", "codec": "float16", "topology": topology},
        "synchronization": {"mode": "bounded"},
        **more,
    }


def between(run: Simulated) -> dict[tuple[int, int], int]:
    return {pair: sent for pair in sorted(BETWEEN) if (sent := run.sent_bytes(*pair))}


def groupings(run: Simulated, rank: int) -> list[tuple[float, int, str]]:
    """Return when a worker regrouped, to which version, and the groups."""
    found = []
    for record in run.records:
        if record["kind"] == "directive" and record["rank"] == rank:
            for version, groups in GROUPS.findall(record["reason"]):
                found.append((record["time_s"], int(version), groups.strip()))
    return found


def at(seconds: float, mbit_per_s: float) -> dict[str, Any]:
    return {"at": {"seconds": seconds}, "betweenSitesMbitPerS": mbit_per_s}


SLOWER: dict[str, Any] = {**LINKS, "workers": [{"count": 4, "cores": 2}]}
CHANGING = four_workers(**SLOWER, changes=[at(30, 15), at(60, 300), at(150, 20)])
SECONDS = 200
"""A step takes one second, so few steps are simulated."""
DYING = four_workers(**LINKS, absences=[{"worker": 0, "leaves": {"seconds": 10}}])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Simulated]:
    cases = {
        **{
            topology: Case(four_workers(**LINKS), settings(topology, 40))
            for topology in ("allToAll", "clustered")
        },
        "changing": Case(CHANGING, settings("clustered", SECONDS)),
        "dying": Case(DYING, settings("clustered", 60)),
    }
    return simulate_all(tmp_path_factory.mktemp("clustered"), cases)


def test_fewer_bytes_cross_the_slow_links(runs: dict[str, Simulated]) -> None:
    every, clustered = between(runs["allToAll"]), between(runs["clustered"])
    assert set(every) == BETWEEN
    assert set(clustered) == {(0, 3), (3, 0)}
    assert sum(clustered.values()) < 0.4 * sum(every.values())
    assert len(runs["clustered"].steps[0]) == len(runs["allToAll"].steps[0]) == 40
    # the same inside the site
    assert runs["clustered"].sent_bytes(1, 2) == pytest.approx(
        runs["allToAll"].sent_bytes(1, 2), rel=0.1
    )


def test_all_workers_regroup_once_for_each_large_change(
    runs: dict[str, Simulated],
) -> None:
    run = runs["changing"]
    groups_by_rank = [groupings(run, rank) for rank in range(4)]
    assert [[words[1:] for words in each] for each in groups_by_rank] == 4 * [
        [(1, "0 1 2 3"), (2, "0 1 2 | 3")]
    ]
    for joined, parted in ([when for when, *_ in each] for each in groups_by_rank):
        assert 60 < joined < 150  # not at 30, when slow links became slightly slower
        assert 150 < parted < 200


def test_a_dead_gateway_is_replaced_and_training_continues(runs: dict[str, Simulated]) -> None:
    run = runs["dying"]
    for rank in (1, 2, 3):
        ((when, version, groups),) = groupings(run, rank)
        assert (version, groups) == (1, "1 0 2 | 3")
        assert 10 <= when < 12
        assert run.steps[rank][-1]["iteration"] >= 59  # the first worker that reaches 60 stops all
    carried = between(run)
    assert set(carried) == {(0, 3), (3, 0), (1, 3), (3, 1)}
    assert carried[1, 3] > carried[0, 3] / 2


@pytest.mark.slow
def test_a_run_with_regrouping_is_deterministic(runs: dict[str, Simulated], tmp_path: Path) -> None:
    again = Case(CHANGING, settings("clustered", SECONDS), ("--threads", "1"))
    found = simulate_all(tmp_path, {"again": again})
    assert found["again"].trace_hash == runs["changing"].trace_hash


# ---- real processes ----------------------------------------------------------------------------

SITES = {"plant-a": 3, "plant-b": 1}
FEW_BYTES = 4000
"""More than the last words of a run, less than ten times its weights."""


def reported_gateways(run: LocalRun) -> set[int]:
    """Return the first site's gateways that the workers' trainers reported; the first one is worker
    0.

    A trainer skips a grouping if a newer directive arrives before its next step.
    """
    reasons = [r.reason for r in run.records() if isinstance(r, DirectiveRecord)]
    reported = [groups for reason in reasons for _, groups in GROUPS.findall(reason)]
    return {0, *(int(groups.split()[0]) for groups in reported)}


def carrying(run: LocalRun, since: int = 0) -> set[int]:
    """Return workers of the first site whose links to the other site have carried weights both
    ways.
    """
    sent = Counter[tuple[int, int]]()
    for record in run.records()[since:]:
        if isinstance(record, LinkRecord):
            sent[record.rank, record.peer] += record.sent_bytes
    return {r for r in range(3) if min(sent[r, 3], sent[3, r]) > FEW_BYTES}


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_killed_gateway_is_replaced_and_all_models_are_merged(tmp_path: Path) -> None:
    environment = tmp_path / "environment.yaml"
    environment.write_text(
        yaml.safe_dump(
            {
                "name": "apart",
                "workers": [{"count": 4, "cores": 1}],
                "sites": [{"name": "a", "workers": 3}, {"name": "b", "workers": 1}],
                "insideSites": {"mbitPerS": 200},
                "betweenSites": {"mbitPerS": 5},
            }
        )
    )
    back = tmp_path / "back"
    document = job_document(
        SITES,
        trainer={
            "program": blobs(
                tmp_path,
                nap_s=0.1,
                more=UNTIL_THERE.format(path=str(back)),
            ),
            "stop": {"maxSteps": 800},
        },
        exchange={"policy": "hop", "codec": "float32", "topology": "clustered",
                  "parameters": {"backupWorkers": 0}},
    )  # fmt: skip
    with LocalRun(tmp_path, document, "--environment", str(environment)) as run:
        run.wait_for_step(20)
        begun = len(run.records())
        run.wait_until(lambda: carrying(run, begun), "weights between sites")
        killed, since = max(carrying(run, begun)), len(run.records())
        run.kill_trainer(killed)
        run.wait_until(lambda: carrying(run, since) - {killed}, "another gateway")
        run.wait_until(lambda: run.events("WorkerRejoined", killed), "it is back")
        back.touch()
        assert run.finish() == 0, run.terminal()
    assert carrying(run) <= reported_gateways(run)
    for site in SITES:
        about = json.loads((run.folder / "models" / site / "model.json").read_text())
        assert about["ranks"] == [0, 1, 2, 3]
