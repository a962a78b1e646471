"""DLionJobs in every situation of docs/conditions.md, with the operator's statuses.

Also that page's table, which lists how each tool interprets them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import SiteName
from dlion_operator.model.workload_view import QueueState
from dlion_operator.plan.observed import RejectedObject, RunView
from operator_world import World, dlion_job, stamp

Document = dict[str, Any]

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/conditions.md"

UNSEEN = "new or changed, and not processed yet"
STARTING = "pods start, or workers wait for peers"
STUCK = (
    "is refused (manifest or an object of the run); or its pods have not started within a minute,"
    " joined or begun within five"
)
TRAINING = "trains"
DEGRADED = "trains without some workers"
SUSPENDED = "suspended"
NOT_SELECTED = "does not name this site"
SUCCEEDED = "met its stop rule, and the model includes all replicas"
FAILED = "ended otherwise"


@dataclass(frozen=True)
class Row:
    """One line of the table: a situation, conditions, and the tools' verdicts."""

    situation: str
    conditions: dict[str, str]
    """The status of each condition that the line names; empty if they are unchanged."""
    kstatus: str
    argo_cd: str


def table(page: str | None = None) -> dict[str, Row]:
    """Return the table "What holds when", by situation; `page` replaces docs/conditions.md."""
    text = PAGE.read_text(encoding="utf-8") if page is None else page
    section = text.partition("## What holds when\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [_row(dict(zip(head, cells, strict=True))) for cells in body]
    return {row.situation: row for row in rows}


def _row(cells: dict[str, str]) -> Row:
    conditions = {
        name: word.group()
        for name in ("Ready", "Reconciling", "Stalled", "Succeeded")
        if (word := re.match("True|False|Unknown", cells[name]))
    }
    conditions |= dict.fromkeys(re.findall(r"`(\w+)`", cells["Ready"]), "True")
    return Row(cells["the job"], conditions, cells["kstatus (Flux)"], cells["Argo CD"])


@dataclass(frozen=True)
class Case:
    """One job in one situation."""

    name: str
    situation: str
    document: Document


def cases() -> list[Case]:
    """Return at least one job for each line of the table, for most of them several."""
    return [
        Case(make.__name__.strip("_"), situation, make())
        for situation, makers in _MAKERS.items()
        for make in makers
    ]


def _kept(world: World, **changes: Any) -> Document:
    """The job with the operator's new status; `changes` apply to what the operator observes."""
    assert world.look(**changes).status is not None
    return copy.deepcopy(world.document)


def _begun(groups: dict[str, int] | None = None, **spec: Any) -> World:
    """Its pods run, but its workers have not joined."""
    world = World(dlion_job(groups, **spec))
    world.look()
    world.make_jobs()
    return world


def _training(groups: dict[str, int] | None = None, **spec: Any) -> World:
    world = _begun(groups, **spec)
    world.train()
    world.look()
    return world


def _two_sites(min_sites: int) -> World:
    sites = [
        {"name": "plant-a", "groups": [{"name": "small", "workers": 2}]},
        {"name": "plant-b", "groups": [{"name": "large", "workers": 1}]},
    ]
    return _begun(sites=sites, minSites=min_sites)


def _fresh() -> Document:
    return dlion_job()


def _changed_while_training() -> Document:
    document = _kept(_training())
    document["metadata"]["generation"] += 1
    return document


def _run_again() -> Document:
    document = _succeeded()
    document["spec"]["runId"] = "again"
    document["metadata"]["generation"] += 1
    return document


def _first_look() -> Document:
    return _kept(World(dlion_job()))


def _pods_run() -> Document:
    return _kept(_begun())


def _waits_for_peers() -> Document:
    world = _two_sites(1)
    world.run = RunView(open_s=60.0, ready={SiteName("plant-a"): 2})
    return _kept(world)


def _below_quorum() -> Document:
    world = _two_sites(2)
    world.train()
    return _kept(world)


def _queued() -> Document:
    document = dlion_job()
    document["metadata"]["labels"] = {names.QUEUE_LABEL: "edge"}
    world = World(document)
    world.queue = QueueState()
    world.look()
    world.make_jobs()
    world.pods.clear()
    for job in world.jobs.values():
        job["spec"]["suspend"] = True
    return _kept(world)


def _no_pods() -> Document:
    world = _begun()
    world.pods.clear()
    world.look()
    world.advance(61)
    return _kept(world)


def _no_image() -> Document:
    world = _begun()
    world.wait_for("small", 1, "ImagePullBackOff", "no such image")
    world.advance(61)
    return _kept(world)


def _forbidden() -> Document:
    return _kept(World(dlion_job()), rejected=RejectedObject("403 exceeded quota", 403))


def _upkeep_fails() -> Document:
    return _kept(_begun(), last_error="500 etcdserver: request timed out")


def _does_not_join() -> Document:
    world = _begun()
    for pod in world.pods.values():
        running = {"running": {"startedAt": stamp(world.now)}}
        pod["status"]["containerStatuses"] = [{"name": "trainer", "state": running}]
    world.run = RunView(open_s=400.0)
    world.advance(400)
    return _kept(world)


def _trains() -> Document:
    return _kept(_training())


def _ends() -> Document:
    world = _training()
    world.run = RunView(open_s=99.0, training=True, stop_reason="maxSteps 100 reached")
    return _kept(world)


def _lost_a_worker() -> Document:
    world = _training({"small": 3})
    world.train(ready=2)
    return _kept(world)


def _lost_a_site() -> Document:
    world = _two_sites(1)
    world.train()
    return _kept(world)


def _suspended_from_the_start() -> Document:
    return _kept(World(dlion_job(suspend=True)))


def _suspended_while_training() -> Document:
    world = _training()
    world.document["spec"]["suspend"] = True
    return _kept(world)


def _not_selected() -> Document:
    document = dlion_job()
    document["spec"]["sites"][0]["name"] = "plant-b"
    return _kept(World(document))


def _succeeded() -> Document:
    world = _training()
    world.end("small")
    return _kept(world)


def _partial() -> Document:
    world = _training({"small": 3})
    world.end("small", failed="1", exit_code=67)
    return _kept(world)


def _ended_early() -> Document:
    world = _training()
    world.end("small")
    world.run = RunView(open_s=99.0, training=True, stop_reason="stopped by a user")
    return _kept(world)


def _policy_denies() -> Document:
    words = "422 ValidatingAdmissionPolicy 'owner' with binding 'owner' denied request: no label"
    return _kept(World(dlion_job()), rejected=RejectedObject(words, 422))


def _invalid() -> Document:
    return _kept(World(dlion_job(podTemplate={"spec": {"hostNetwork": True}})))


def _program_failed() -> Document:
    world = _training()
    world.end("small", failed="0,1", exit_code=67)
    return _kept(world)


def _lost_its_keeper() -> Document:
    world = _training({"small": 3})
    del world.pods["keeper"]
    world.look()
    world.advance(60)
    return _kept(world)


def _model_lost() -> Document:
    world = _training()
    world.end("small", failed="0", exit_code=73)
    return _kept(world)


def _too_late() -> Document:
    world = _training(activeDeadlineSeconds=60)
    world.advance(600)
    return _kept(world)


_MAKERS: dict[str, tuple[Callable[[], Document], ...]] = {
    UNSEEN: (_fresh, _changed_while_training, _run_again),
    STARTING: (_first_look, _pods_run, _waits_for_peers, _below_quorum, _queued),
    STUCK: (
        _no_pods,
        _no_image,
        _does_not_join,
        _forbidden,
        _policy_denies,
        _invalid,
        _upkeep_fails,
    ),
    TRAINING: (_trains, _ends),
    DEGRADED: (_lost_a_worker, _lost_a_site, _lost_its_keeper),
    SUSPENDED: (_suspended_from_the_start, _suspended_while_training),
    NOT_SELECTED: (_not_selected,),
    SUCCEEDED: (_succeeded,),
    FAILED: (_program_failed, _partial, _ended_early, _model_lost, _too_late),
}
