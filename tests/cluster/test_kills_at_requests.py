"""The operator, killed at each of its requests, which a proxy before an API server counts.

Proves: killed just after every single request that changes something in a job's life (a run that
takes the place of another, trained to its end; deleted), the operator leaves what an undisturbed
life leaves, and nothing after the end. In the slow tier also: just before each; the job made with
its claim, suspended, resumed, made smaller and larger; a lost pod; at events.
Left out: pods that run, other faults of the API server (test_api_faults).
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
"""No request for so long: the operator has done what it wanted."""
BUSY_S = 30.0
MOST_KILLS = 40
"""At the requests of one part of a life, each before and after."""
PLACES = ("before", "after")
AFTER = ("after",)
"""What a kill before a request leaves is what one after the request before it has left."""


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
"""How each part of a job's life comes to be, and what holds once it has."""
SHORT_LIFE = {part: LIFE[part] for part in ("another run", "ended", "deleted")}
"""All workers made anew, the end, and the removal. A kill costs a start of the operator: the other
parts are in the slow tier."""
LOSS: dict[str, tuple[Act, Done]] = {
    "lost": (lose_worker, lambda it: len(workers(it)) == 3 and not has_silent_worker(it)),
    "deleted": DELETED,
}


def run_of(kubectl: Kubectl) -> str:
    """The run that the status speaks of."""
    return str(kubectl.get("dlj", "digits")["status"].get("runId"))


def begin(kubectl: Kubectl, proxy: FaultProxy, *, ends: bool) -> None:
    """A first run, which comes to its end where that is wanted."""
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
    """Kills the operator at each request that follows from `act`: those before and after which.
    `places`: in this order, again and again.

    What it knows is in the cluster, so after each kill a fresh process meets just the state that
    this request leaves, or has not made. It has `patience_s` to come to the next one, and on a busy
    machine more while what it is to do is not `done`.
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
        assert len(kills[gate.where]) < MOST_KILLS, kills
        operator.kill()
        gate = proxy.hold(next(turns), events=events)
        operator.launch()


def _named(request: Request | None) -> str:
    """Method and path, a pod's name without what is made up by chance."""
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
def test_killed_before_and_after_every_request_nothing_is_there_twice(
    kubectl: Kubectl,
    proxy: FaultProxy,
    operator: OperatorProcess,
    life: dict[str, tuple[Act, Done]],
    places: Sequence[str],
    ends: bool,
    patience_s: float,
    events: bool,
) -> None:
    """With `events` it is killed at these instead, before one and after the next: at every other
    request it would never come to one, as whoever starts anew tells of what is done no more."""
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
    told = 0
    for phase, (act, done) in life.items():
        begins = partial(act, kubectl)
        is_done = partial(done, kubectl)
        kills = killed_at_every_request(
            proxy, operator, begins, patience_s, done=is_done, events=events, places=places
        )
        assert waited(partial(done, kubectl), 60), (phase, kills, children(kubectl))
        assert waited(partial(_has, kubectl, undisturbed[phase]), 60), (phase, kills)
        told += len(kills["before"]) if events else 0
        if not events:
            assert [set(kills[where]) for where in places] == [requests[phase]] * len(places), phase
        counts = " and ".join(f"{len(at)} {where}" for where, at in kills.items())
        print(f"{phase}: killed {counts} a request")
    assert told > 0 or not events


def _has(kubectl: Kubectl, wanted: list[str]) -> bool:
    return children(kubectl) == wanted


def test_killed_as_it_makes_its_authority_it_makes_one(
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
