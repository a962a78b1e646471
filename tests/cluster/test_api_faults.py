"""The operator beside an API server that misbehaves, through a proxy that counts every request.

Proves: killed just before and just after every single request that changes something in a job's
life (made, suspended, resumed, deleted), the operator leaves what an undisturbed life leaves, and
nothing after the end; an unchanged job costs no such request; away for 10 s, 429, 500, 503 and 401
are got over with nothing made twice; what a broken or silent watch missed is acted on.
Left out: pods that run, networks that lose packets, an API server that lost what it had stored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fault_proxy import Answer, FaultProxy, Request, waited
from manifest_table import smallest
from operator_process import OperatorProcess

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
KINDS = "jobs,services,configmaps,deployments,pvc,pods"
QUIET_S = 3.0
"""No request for so long: the operator has done what it wanted."""


@pytest.fixture
def proxy(kubectl: Kubectl, tmp_path: Path) -> Iterator[FaultProxy]:
    with FaultProxy(kubectl.kubeconfig, tmp_path) as served:
        yield served


@pytest.fixture
def operator(proxy: FaultProxy, kubectl: Kubectl, tmp_path: Path) -> Iterator[OperatorProcess]:
    with OperatorProcess(tmp_path, proxy.kubeconfig, namespaces=(kubectl.namespace,)) as process:
        yield process
        assert process.metric('dlion_operator_reconciles_total{result="defect"}') == 0


def manifest(*, suspend: bool = False) -> dict[str, Any]:
    document = smallest()
    document["metadata"] = {"name": "digits"}
    groups = [{"name": "small", "workers": 2}, {"name": "large", "workers": 1}]
    document["spec"] |= {"sites": [{"name": "plant-a", "groups": groups}], "suspend": suspend}
    return document


def children(kubectl: Kubectl) -> list[str]:
    """Kind and name of all that belongs to a job, pods without their suffix; each owned once."""
    found = kubectl.get(KINDS, "-l", "app.kubernetes.io/managed-by=dlion-operator")["items"]
    there = [each for each in found if not each["metadata"].get("deletionTimestamp")]
    for each in there:
        assert len(each["metadata"]["ownerReferences"]) == 1, each["metadata"]["name"]
    return sorted(_place(each["kind"], each["metadata"]["name"]) for each in there)


def _place(kind: str, name: str) -> str:
    return f"{kind}/{re.sub('-[a-z0-9]{5}$', '', name)}" if kind == "Pod" else f"{kind}/{name}"


def settled(kubectl: Kubectl, *, pods: int) -> list[str]:
    """The children, once there are two Jobs and so many pods of theirs."""

    def there() -> bool:
        names = children(kubectl)
        running = [each for each in names if each.startswith("Pod/") and "keeper" not in each]
        return sum(each.startswith("Job/") for each in names) == 2 and len(running) == pods

    assert waited(there, 40), children(kubectl)
    return children(kubectl)


def change(kubectl: Kubectl, phase: str) -> None:
    """Takes the job into the next part of its life."""
    if phase == "deleted":
        kubectl.run("delete", "dlj", "digits", "--wait=true")
    else:
        kubectl.apply(manifest(suspend=phase == "suspended"))


def reached(kubectl: Kubectl, phase: str) -> list[str]:
    """The children in that part of its life, when all is as it should be."""
    if phase == "deleted":
        assert waited(lambda: not children(kubectl), 40), children(kubectl)
        return []
    return settled(kubectl, pods=0 if phase == "suspended" else 3)


def is_quiet(proxy: FaultProxy, since: int) -> bool:
    time.sleep(QUIET_S)
    return not proxy.mutations(since)


def _is_held_or_alive(proxy: FaultProxy, operator: OperatorProcess) -> bool:
    return proxy.is_holding or operator.livez()[0] == 200


PHASES = ("made", "suspended", "resumed", "deleted")


def test_killed_before_and_after_every_request_nothing_is_there_twice(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess
) -> None:
    """What the operator knows is in the cluster, so one life with a kill at each request will do:
    after each kill a fresh process meets just the state that this request leaves, or has not made.
    """
    undisturbed, began = {}, len(proxy.requests)
    for phase in PHASES:
        change(kubectl, phase)
        undisturbed[phase] = reached(kubectl, phase)
        assert waited(lambda: is_quiet(proxy, len(proxy.requests)), 40)
    wanted = proxy.mutations(began)
    kills: dict[str, list[str]] = {"before": [], "after": []}
    for phase in PHASES:
        gate = proxy.hold("before")
        change(kubectl, phase)
        where = "before"
        while gate.reached.wait(QUIET_S + (0 if operator.livez()[0] else 5)):
            kills[where].append(str(gate.request))
            assert len(kills[where]) <= 2 * len(wanted), kills
            operator.kill()
            where = "after" if where == "before" else "before"
            gate = proxy.hold(where)
            operator.launch()
            assert waited(lambda: _is_held_or_alive(proxy, operator), 30)
        proxy.release()
        assert reached(kubectl, phase) == undisturbed[phase], (phase, kills)
    print(f"{len(wanted)} requests undisturbed; killed: {kills}")
    assert set(kills["before"]) == set(kills["after"]) == {str(each) for each in wanted}


@pytest.mark.slow
def test_what_is_unchanged_costs_nothing_and_a_silent_watch_is_made_up_for(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess
) -> None:
    kubectl.apply(manifest(suspend=True))
    assert waited(lambda: bool(kubectl.get("dlj", "digits").get("status")), 30)
    assert waited(lambda: is_quiet(proxy, len(proxy.requests)), 30)
    before = len(proxy.requests)
    operator.kill()
    operator.start()  # looks at everything anew
    time.sleep(25)
    assert [str(each) for each in proxy.mutations(before)] == []
    print(f"unchanged for 25 s and a restart: {len(proxy.requests) - before} requests, 0 changes")
    proxy.silent = True
    kubectl.apply(manifest())
    began_s = time.monotonic()
    assert waited(lambda: len(proxy.mutations(before)) > 0, 80)
    print(f"made up for {time.monotonic() - began_s:.0f} s after the change")
    settled(kubectl, pods=3)


def test_watches_that_break_are_opened_anew(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess
) -> None:
    starts = operator.starts
    assert waited(lambda: len([each for each in proxy.requests if each.watch]) >= 3, 20)
    assert proxy.drop_watches() >= 3
    kubectl.apply(manifest())
    settled(kubectl, pods=3)
    assert (operator.is_running(), operator.starts) == (True, starts)


def _writes(request: Request) -> bool:
    return request.mutating or request.dry_run


def _all(_: Request) -> bool:
    return True


FAULTS = {
    "429 on writes": Answer(429, _writes, (("Retry-After", "1"),)),
    "500 on writes": Answer(500, _writes),
    "503 on all": Answer(503, _all),
    "401 on all": Answer(401, _all),
    "away": None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_api_server_that_fails_for_a_while_is_got_over(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess, fault: str
) -> None:
    answer = FAULTS[fault]
    if answer is None:
        proxy.refuse()
    proxy.answer = answer
    if fault == "401 on all":
        proxy.drop_watches()  # a watch that is open stays so; a new one needs a token
    kubectl.apply(manifest())
    time.sleep(10 if answer is None else 5)
    assert not children(kubectl)
    alive = operator.livez()
    proxy.answer = None
    if answer is None:
        proxy.accept()
    ended = not operator.is_running()
    if ended:
        operator.start()  # as a kubelet would
    print(f"{fault}: /livez {alive}, ended: {ended}")
    there = settled(kubectl, pods=3)
    assert len(there) == len(set(there)), there
    if fault != "401 on all":
        assert (ended, alive[0]) == (False, 200), operator.last_words()
    elif not ended:
        assert alive[0] == 200
