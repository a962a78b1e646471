"""Test the operator when it is killed at each of its requests, which a proxy counts.

It is killed just after every write in a job's life: a run that replaces another, trains to its end,
and is deleted. The operator leaves the same objects as without kills, and nothing after the end.
Slow tests: just before each write; a job with a claim that is created, suspended, resumed and
scaled; a lost pod; kills at events. Left out: pods that run, other faults of the API server
(test_api_faults).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from fault_proxy import FaultProxy, Request, waited
from operator_process import OperatorProcess, proxied_operator
from podless_jobs import (
    children,
    end_workers,
    has_silent_worker,
    lose_worker,
    manifest,
    settled,
    state_of,
    workers,
)
from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
QUIET_S = 3.0
"""After this time without a request the operator is idle."""
BUSY_S = 30.0
MAX_KILLS = 40
"""Maximum at the requests of one part of a life, before and after each."""
PLACES = ("before", "after")
AFTER = ("after",)
"""A kill before a request leaves the same objects as one after the preceding request."""


@pytest.fixture
def proxy(kubectl: Kubectl, tmp_path: Path) -> Iterator[FaultProxy]:
    with FaultProxy(kubectl.kubeconfig, tmp_path) as served:
        yield served


@pytest.fixture
def operator(
    no_running_pods: None, proxy: FaultProxy, kubectl: Kubectl, tmp_path: Path
) -> Iterator[OperatorProcess]:
    with proxied_operator(proxy, kubectl, tmp_path) as process:
        yield process


Act = Callable[[Kubectl], object]
Done = Callable[[Kubectl], bool]
DELETED: tuple[Act, Done] = (
    lambda it: it.run("delete", "dlj", "digits"),
    lambda it: not children(it),
)
LIFE: dict[str, tuple[Act, Done]] = {
    "another run": (lambda it: it.apply(manifest(runId="2")), lambda it: run_of(it) == "2"),
    "suspended": (
        lambda it: it.apply(manifest(runId="2", suspend=True)),
        lambda it: state_of(it) == "Suspended" and not workers(it),
    ),
    "resumed": (lambda it: it.apply(manifest(runId="2")), lambda it: len(workers(it)) == 3),
    "smaller": (
        lambda it: it.apply(manifest(runId="2", small=1)),
        lambda it: len(workers(it)) == 2,
    ),
    "larger": (
        lambda it: it.apply(manifest(runId="2", small=3)),
        lambda it: len(workers(it)) == 4,
    ),
    "ended": (end_workers, lambda it: state_of(it) == "Succeeded"),
    "deleted": DELETED,
    "made": (
        lambda it: it.apply(manifest(runId="3")),
        lambda it: len(workers(it)) == 3 and "PersistentVolumeClaim/digits-keeper" in children(it),
    ),
    "deleted again": DELETED,
}
"""How each part of a job's life begins, and the condition at its end."""
SHORT_LIFE = {part: LIFE[part] for part in ("another run", "ended", "deleted")}
"""New workers, the end, and the removal. A kill costs a start of the operator: the other parts are
slow tests."""
LOSS: dict[str, tuple[Act, Done]] = {
    "lost": (lose_worker, lambda it: len(workers(it)) == 3 and not has_silent_worker(it)),
    "deleted": DELETED,
}


def run_of(kubectl: Kubectl) -> str:
    """Return the run in the status."""
    return str(kubectl.get("dlj", "digits")["status"].get("runId"))


def begin(kubectl: Kubectl, proxy: FaultProxy, *, ends: bool) -> None:
    """Apply a first run, and end it if requested."""
    kubectl.apply(manifest())
    settled(kubectl, pods=3)
    if ends:
        end_workers(kubectl)
        assert waited(lambda: state_of(kubectl) == "Succeeded", 40)
    assert waited(lambda: proxy.is_quiet(QUIET_S), 40)


def killed_at_every_request(
    proxy: FaultProxy,
    operator: OperatorProcess,
    act: Callable[[], object],
    patience_s: float,
    *,
    done: Callable[[], bool] = lambda: True,
    events: bool = False,
    places: Sequence[str] = PLACES,
) -> dict[str, list[str]]:
    """Kill the operator at each request that follows from `act`; return them by place.

    `places` are used in turn. The operator's state is in the cluster, so after each kill a new
    process finds exactly the state before or after this request. It has `patience_s` until the next
    request, and on a busy machine more while its work is not `done`.
    """
    kills: dict[str, list[str]] = {"before": [], "after": []}
    turns = itertools.cycle(places)
    gate = proxy.hold(next(turns), events=events)
    act()
    while True:
        is_up = partial(_is_held_or_alive, proxy, operator)
        assert waited(is_up, 30, every_s=0.05), operator.last_log_lines()
        reached = gate.reached.wait(patience_s) or (not done() and gate.reached.wait(BUSY_S))
        if not reached:
            proxy.release()
            return kills
        kills[gate.where].append(_named(gate.request))
        assert len(kills[gate.where]) < MAX_KILLS, kills
        operator.kill()
        gate = proxy.hold(next(turns), events=events)
        operator.launch()


def _named(request: Request | None) -> str:
    """Return method and path, without the random part of a pod's name."""
    return re.sub(r"(/pods/[^/]+)-[a-z0-9]{5}\b", r"\1", str(request))


def _is_held_or_alive(proxy: FaultProxy, operator: OperatorProcess) -> bool:
    return proxy.is_holding or operator.livez()[0] == 200


@pytest.mark.parametrize(
    ("life", "places", "ends", "patience_s", "events"),
    [
        pytest.param(SHORT_LIFE, AFTER, True, QUIET_S, False, id="life"),
        pytest.param(LIFE, PLACES, True, QUIET_S, False, id="whole life", marks=pytest.mark.slow),
        pytest.param(
            LIFE, PLACES, True, QUIET_S, True, id="events of a life", marks=pytest.mark.slow
        ),
        pytest.param(LOSS, PLACES, False, 80.0, False, id="loss", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_kills_at_every_request_create_nothing_twice(
    kubectl: Kubectl,
    proxy: FaultProxy,
    operator: OperatorProcess,
    life: dict[str, tuple[Act, Done]],
    places: Sequence[str],
    ends: bool,
    patience_s: float,
    events: bool,
) -> None:
    """With `events` it is killed at these instead, before one and after the next.

    Otherwise it never reaches one, since a restarted operator does not repeat events.
    """
    undisturbed: dict[str, list[str]] = {}
    requests: dict[str, set[str]] = {}
    begin(kubectl, proxy, ends=ends)
    for phase, (act, done) in life.items():
        began = len(proxy.requests)
        act(kubectl)
        assert waited(partial(done, kubectl), 120), (phase, children(kubectl))
        assert waited(lambda: proxy.is_quiet(QUIET_S), 40)
        undisturbed[phase] = children(kubectl)
        requests[phase] = {_named(each) for each in proxy.mutations(began)}
    begin(kubectl, proxy, ends=ends)
    events_reached = 0
    for phase, (act, done) in life.items():
        begins = partial(act, kubectl)
        is_done = partial(done, kubectl)
        kills = killed_at_every_request(
            proxy, operator, begins, patience_s, done=is_done, events=events, places=places
        )
        assert waited(partial(done, kubectl), 60), (phase, kills, children(kubectl))
        assert waited(partial(_has, kubectl, undisturbed[phase]), 60), (phase, kills)
        events_reached += len(kills["before"]) if events else 0
        if not events:
            assert [set(kills[where]) for where in places] == [requests[phase]] * len(places), phase
        counts = " and ".join(f"{len(at)} {where}" for where, at in kills.items())
        print(f"{phase}: killed {counts} a request")
    assert events_reached > 0 or not events


def _has(kubectl: Kubectl, wanted: list[str]) -> bool:
    return children(kubectl) == wanted


def test_kills_during_the_creation_of_the_authority_leave_one(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess
) -> None:
    def from_the_beginning() -> None:
        operator.kill()
        kubectl.run("delete", "secret", "dlion-authority")
        operator.launch()

    kills = killed_at_every_request(proxy, operator, from_the_beginning, QUIET_S)
    core = f"/api/v1/namespaces/{kubectl.namespace}"
    made = [f"POST {core}/secrets", f"PATCH {core}/configmaps/dlion-authority"]
    assert kills == {"before": made, "after": made}
