"""Test the decisions when the count of a group changes during a run.

- Only the size of a Job is patched, both counts together. A group grows beyond its first size and
  shrinks again; every rank stays.
- If policy or topology must know its workers beforehand, a group grows only to its earlier size,
  and the status reports it. This holds also for runs of an operator that counted ranks. Ranks stay,
  whatever the counts of other sites become.
- A removed worker no longer counts.

Left out: pods that start and end (tests/local/test_pods, tests/cluster).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.cluster_names import ALL_WORKERS_ANNOTATION
from dlion_api.spec import RANKS_ANNOTATION
from dlion_operator.plan.decisions import Decision, OpenRun, Patch
from operator_world import World, dlion_job, ready_reason


def training(groups: dict[str, int], **spec: Any) -> World:
    world = World(dlion_job(groups, **spec))
    world.make_jobs()
    world.train()
    world.look()
    return world


def scale(world: World, workers: int) -> Decision:
    """Set the first group's count in the manifest; its Job follows."""
    world.document["spec"]["sites"][0]["groups"][0]["workers"] = workers
    decision = world.look()
    for patch in patches(decision):
        world.jobs["small"]["spec"] |= patch
    return decision


def patches(decision: Decision) -> list[dict[str, Any]]:
    return [a.patch["spec"] for a in decision.actions if isinstance(a, Patch)]


def ranks(decision: Decision) -> dict[str, int]:
    (opened,) = [a for a in decision.actions if isinstance(a, OpenRun)]
    return {f"{w.group}-{w.index}": w.rank for w in opened.workers}


def test_a_group_grows_and_shrinks_during_a_run_and_ranks_stay() -> None:
    world = training({"small": 2, "large": 1})
    before = ranks(world.look())
    assert before == {"small-0": 0, "large-0": 1, "small-1": 2}
    grown = scale(world, 4)
    assert patches(grown) == [{"parallelism": 4, "completions": 4}]
    assert ranks(grown) == {**before, "small-2": 4, "small-3": 6}
    assert grown.status is not None
    assert grown.status["readyWorkers"] == "3/5"
    world.train(ready=5)
    assert ready_reason(world.look()) == ("Training", "5 workers train")
    shrunk = scale(world, 2)
    assert patches(shrunk) == [{"parallelism": 2, "completions": 2}]
    assert ranks(shrunk) == before
    assert shrunk.status is not None
    assert shrunk.status["readyWorkers"] == "3/3"
    assert patches(scale(world, 2)) == []


@pytest.mark.parametrize(
    "exchange",
    [{"policy": "dlion", "topology": "ring"}, {"policy": "hop"}, {"policy": "third-party"}],
)
def test_a_group_of_workers_known_beforehand_grows_to_its_first_size_only(
    exchange: dict[str, str],
) -> None:
    world = training({"small": 4, "large": 1}, exchange=exchange)
    fewer = scale(world, 2)
    assert ranks(fewer) == {"small-0": 0, "small-1": 1, "large-0": 4}
    assert patches(scale(world, 9)) == [{"parallelism": 4, "completions": 4}]
    reason, message = ready_reason(world.look())
    assert reason == "Training"
    assert "group small: 9 workers wanted, but this run began with 4" in message


def test_a_run_with_counted_ranks_keeps_them() -> None:
    """An earlier operator gave its pods these ranks."""
    world = training({"small": 4, "large": 1})
    for job in world.jobs.values():
        del job["metadata"]["annotations"][RANKS_ANNOTATION]
    assert ranks(scale(world, 2)) == {"small-0": 0, "small-1": 1, "large-0": 4}
    assert patches(scale(world, 9)) == [{"parallelism": 4, "completions": 4}]


def between_others(workers_before: int) -> World:
    """Return a run of counted ranks at this site, whose ranks follow those of the first site."""
    sites = [
        {"name": name, "groups": [{"name": "small", "workers": count}]}
        for name, count in (("plant-0", workers_before), ("plant-a", 2), ("plant-z", 1))
    ]
    world = World(dlion_job(sites=sites, exchange={"policy": "hop"}))
    world.make_jobs()
    world.train()
    return world


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_counted_ranks_stay_whatever_another_site_scales(workers: int) -> None:
    world = between_others(3)
    before = [(each.site, each.index, each.rank) for each in opened(world).workers]
    assert before[3:5] == [("plant-a", 0, 3), ("plant-a", 1, 4)]
    world.document["spec"]["sites"][0]["groups"][0]["workers"] = workers
    after = opened(world)  # the decision uses only state that is kept in the cluster
    assert [(each.site, each.index, each.rank) for each in after.workers] == before
    assert after.job.workers() == after.workers


@pytest.mark.parametrize("kept", ["", "{", "[1]", '{"plant-0": 7}', '{"plant-0":{"small":-1}}'])
def test_jobs_that_do_not_keep_all_counts_are_read_with_the_manifest(kept: str) -> None:
    """An earlier operator created them, or a user edited them."""
    world = between_others(3)
    world.jobs["small"]["metadata"]["annotations"][ALL_WORKERS_ANNOTATION] = kept
    assert [each.rank for each in opened(world).workers if each.site == "plant-a"] == [3, 4]


def opened(world: World) -> OpenRun:
    (found,) = [each for each in world.look().actions if isinstance(each, OpenRun)]
    return found
