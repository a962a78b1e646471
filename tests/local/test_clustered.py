"""Jobs of `exchange.topology: clustered`, simulated and real.

Proves, simulated: with two fast sites joined by slow links one pair alone exchanges between them, a
third of the bytes of all with all, at the same steps; when links between sites become slow, and
fast again, all workers regroup, once each time, to the same groups, and a small change regroups
nobody; a gateway that dies is replaced, and training goes on; all is the same again, bit by bit. In
reality: links carry weights inside groups and between gateways alone; when the gateway's trainer is
killed another takes its place, all workers hold the same grouping, and the run ends with models of
all. Left out: which groups (tests/property/test_clusters.py).
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
    """When that worker was told to regroup, to which version, and the groups."""
    told = []
    for record in run.records:
        if record["kind"] == "directive" and record["rank"] == rank:
            for version, groups in GROUPS.findall(record["reason"]):
                told.append((record["time_s"], int(version), groups.strip()))
    return told


def at(seconds: float, mbit_per_s: float) -> dict[str, Any]:
    return {"at": {"seconds": seconds}, "betweenSitesMbitPerS": mbit_per_s}


SLOWER: dict[str, Any] = {**LINKS, "workers": [{"count": 4, "cores": 2}]}
CHANGING = four_workers(**SLOWER, changes=[at(30, 15), at(60, 300), at(150, 20)])
SECONDS = 200
"""A step of these takes one: few steps to simulate."""
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
    # inside the site as much as before
    assert runs["clustered"].sent_bytes(1, 2) == pytest.approx(
        runs["allToAll"].sent_bytes(1, 2), rel=0.1
    )


def test_all_workers_regroup_alike_once_for_each_change_that_matters(
    runs: dict[str, Simulated],
) -> None:
    run = runs["changing"]
    told = [groupings(run, rank) for rank in range(4)]
    assert [[words[1:] for words in each] for each in told] == 4 * [
        [(1, "0 1 2 3"), (2, "0 1 2 | 3")]
    ]
    for joined, parted in ([when for when, *_ in each] for each in told):
        assert 60 < joined < 150  # not at 30, where slow links became a little slower
        assert 150 < parted < 200


def test_a_gateway_that_dies_is_replaced_and_training_goes_on(runs: dict[str, Simulated]) -> None:
    run = runs["dying"]
    for rank in (1, 2, 3):
        ((when, version, groups),) = groupings(run, rank)
        assert (version, groups) == (1, "1 0 2 | 3")
        assert 10 <= when < 12
        assert run.steps[rank][-1]["iteration"] >= 59  # the first to have done 60 stops all
    carried = between(run)
    assert set(carried) == {(0, 3), (3, 0), (1, 3), (3, 1)}
    assert carried[1, 3] > carried[0, 3] / 2


@pytest.mark.slow
def test_a_run_in_which_workers_regroup_is_the_same_again(
    runs: dict[str, Simulated], tmp_path: Path
) -> None:
    again = Case(CHANGING, settings("clustered", SECONDS), ("--threads", "1"))
    found = simulate_all(tmp_path, {"again": again})
    assert found["again"].trace_hash == runs["changing"].trace_hash


# ---- real processes ----------------------------------------------------------------------------

SITES = {"plant-a": 3, "plant-b": 1}
FEW_BYTES = 4000
"""More than the last words of a run, less than ten times its weights."""


def told_gateways(run: LocalRun) -> set[int]:
    """Of the first site, at first worker 0, as any worker's trainer was told. Not each is told of
    each grouping: newer directives take the place of those that no step has taken up."""
    reasons = [r.reason for r in run.records() if isinstance(r, DirectiveRecord)]
    told = [groups for reason in reasons for _, groups in GROUPS.findall(reason)]
    return {0, *(int(groups.split()[0]) for groups in told)}


def carrying(run: LocalRun, since: int = 0) -> set[int]:
    """Workers of the first site whose links to the other one have carried weights, both ways, from
    so many records on."""
    sent = Counter[tuple[int, int]]()
    for record in run.records()[since:]:
        if isinstance(record, LinkRecord):
            sent[record.rank, record.peer] += record.sent_bytes
    return {r for r in range(3) if min(sent[r, 3], sent[3, r]) > FEW_BYTES}


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_killed_gateway_is_replaced_and_the_run_ends_with_models_of_all(tmp_path: Path) -> None:
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
    assert carrying(run) <= told_gateways(run)
    for site in SITES:
        about = json.loads((run.folder / "models" / site / "model.json").read_text())
        assert about["ranks"] == [0, 1, 2, 3]
