"""Test the operator against an API server with faults, through a proxy that counts every request.

A job that is deleted during its creation leaves nothing, even without the operator. It is deleted
after every fourth request (slow: after each, also with the operator running). The operator recovers
from late answers, 429, 503, 401 and (slow) 500, which it treats as 503, and creates nothing twice.
It also recovers when the API server is killed or (slow) stops or is away for longer.

Further slow tests: an unchanged state causes no write for 11 minutes, no event and little CPU. A
change that a silent watch hides is found, and liveness reports the watch.

Left out: an operator that is killed (test_kills_at_requests), pods that run, tokens that expire
(test_operator_tokens), an API server that lost stored data.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlion_api.errors import UnavailableError
from fault_proxy import Answer, FaultProxy, Request, waited
from operator_process import OperatorProcess, proxied_operator, token_of
from podless_jobs import (
    children,
    end_workers,
    manifest,
    settled,
    state_of,
    workers,
)
from testbed.kubectl import Kubectl

if TYPE_CHECKING:
    from testbed.sites import Site

pytestmark = pytest.mark.cluster
QUIET_S = 3.0
"""After this time without a request the operator is idle."""
SLOW_S = 0.25
"""Delay of answers during the creation of a job, so that it can be deleted between two of them."""
UNCHANGED_S = 660.0
"""After ten minutes all objects without a watch have been read again."""
MAX_CPU_SHARE = 0.01
"""Cores that an idle operator may use."""


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


def kept_alive(operator: OperatorProcess, look: Callable[[], bool], within_s: float) -> bool:
    """Report whether it came true in that time; restart the operator whenever it has ended."""

    def looked() -> bool:
        if not operator.is_running():
            operator.start()  # as a kubelet does
        return look()

    return waited(looked, within_s)


def test_the_proxy_uses_the_rights_of_its_kubeconfigs_token(
    kubectl: Kubectl, tmp_path: Path
) -> None:
    """Another cluster's kubeconfig may have no client certificate."""
    kubectl.run("create", "serviceaccount", "reader")
    account = f"--serviceaccount={kubectl.namespace}:reader"
    kubectl.run("create", "role", "reader", "--verb=list", "--resource=configmaps")
    kubectl.run("create", "rolebinding", "reader", "--role=reader", account)
    config = json.loads(kubectl.run("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": token_of(kubectl, "reader")}
    by_token = tmp_path / "by-token.json"
    by_token.write_text(json.dumps(config))
    with FaultProxy(by_token, tmp_path) as served:
        through = Kubectl(kubectl.program, served.kubeconfig, namespace=kubectl.namespace)
        assert waited(partial(can_list, through, "configmaps"), 10)
        with pytest.raises(UnavailableError, match=r"reader.*cannot list.*secrets"):
            through.get("secrets")


def can_list(kubectl: Kubectl, kind: str) -> bool:
    """A granted right takes effect some time later."""
    with contextlib.suppress(UnavailableError):
        return bool(kubectl.get(kind))
    return False


# ---- deleted at any time ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goes_on", "every"),
    [
        pytest.param(True, 1, id="operator continues", marks=pytest.mark.slow),
        pytest.param(False, 1, id="operator is gone", marks=pytest.mark.slow),
        pytest.param(False, 4, id="operator is gone, some requests"),
    ],
)
@pytest.mark.timeout(600)
def test_a_job_that_is_deleted_during_its_creation_leaves_nothing(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess, *, goes_on: bool, every: int
) -> None:
    """Delete it after the first request that creates it, and after each `every`-th from there."""
    since = len(proxy.requests)
    kubectl.apply(manifest())
    settled(kubectl, pods=3)
    assert waited(lambda: proxy.is_quiet(QUIET_S), 40)
    count = len(proxy.mutations(since))
    assert count > 5
    kubectl.run("delete", "dlj", "digits")
    numbers = range(1, count + 1, every)
    for number in numbers:
        assert waited(lambda: not children(kubectl), 30), (number, children(kubectl))
        proxy.delay_s = SLOW_S
        since = len(proxy.requests)
        kubectl.apply(manifest())
        assert waited(partial(_has_made, proxy, since, number), 30, every_s=0.02), number
        if not goes_on:
            operator.kill()
        kubectl.run("delete", "dlj", "digits")
        proxy.delay_s = 0.0
        assert waited(lambda: proxy.is_quiet(1.0), 30)
        assert waited(lambda: not children(kubectl), 30), (number, children(kubectl))
        if not goes_on:
            operator.start()
    print(f"deleted after {len(numbers)} of {count} requests")


def _has_made(proxy: FaultProxy, since: int, number: int) -> bool:
    return len(proxy.mutations(since)) >= number


# ---- nothing to do ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_an_unchanged_state_causes_no_write_and_no_event(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess
) -> None:
    """The jobs have pods that fit on no node, are suspended, or have ended; the operator restarts
    once.
    """
    kubectl.apply(manifest(), manifest("stuck"), manifest("suspended", suspend=True))
    settled(kubectl, pods=6, jobs=4)
    end_workers(kubectl)
    stands = {"digits": "Succeeded", "stuck": "Stalled", "suspended": "Suspended"}
    for name, condition in stands.items():
        kubectl.wait(f"--for=condition={condition}", f"dlj/{name}", timeout_s=90)
    assert waited(lambda: proxy.is_quiet(QUIET_S), 30)
    before, looks = len(proxy.requests), operator.metric("dlion_operator_reconciles_total")
    began_s, cpu_s = time.monotonic(), operator.cpu_s()
    time.sleep(UNCHANGED_S)
    share = (operator.cpu_s() - cpu_s) / (time.monotonic() - began_s)
    looks = operator.metric("dlion_operator_reconciles_total") - looks
    operator.kill()
    operator.start()  # reads everything again
    time.sleep(10)
    print(
        f"unchanged for {UNCHANGED_S:g} s and a restart: {looks:g} looks, "
        f"{len(proxy.requests) - before} requests, {share:.2%} of a core, "
        f"{operator.memory_mb():.0f} MB"
    )
    assert looks >= 2
    assert [str(each) for each in proxy.requests[before:] if each.writing] == []
    assert share <= MAX_CPU_SHARE


# ---- watches ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_change_hidden_by_a_silent_watch_is_found(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess
) -> None:
    kubectl.apply(manifest(suspend=True))
    assert waited(lambda: state_of(kubectl) == "Suspended", 30)
    assert waited(lambda: proxy.is_quiet(QUIET_S), 30)
    proxy.silent = True
    before, began_s = len(proxy.requests), time.monotonic()
    kubectl.apply(manifest())
    assert waited(lambda: len(proxy.mutations(before)) > 0, 80)
    print(f"recovered {time.monotonic() - began_s:.0f} s after the change")
    settled(kubectl, pods=3)
    numbers = iter(range(1000))

    def is_ill() -> bool:
        """Change something repeatedly meanwhile."""
        kubectl.run("annotate", "dlj", "digits", "--overwrite", f"number={next(numbers)}")
        time.sleep(2)
        return operator.livez()[0] == 503

    assert waited(is_ill, 200)
    code, words = operator.livez()
    print(f"/livez {code} after {time.monotonic() - began_s:.0f} s: {words}")
    assert "watches missed changes" in words
    proxy.silent = False
    operator.kill()
    operator.start()  # as a kubelet does then
    kubectl.apply(manifest(suspend=True))
    assert waited(lambda: state_of(kubectl) == "Suspended", 20)
    assert operator.livez()[0] == 200


def test_broken_watches_are_reopened(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess
) -> None:
    starts = operator.starts
    assert waited(lambda: len([each for each in proxy.requests if each.watch]) >= 6, 20)
    assert proxy.drop_watches() >= 3
    kubectl.apply(manifest())
    settled(kubectl, pods=3)
    assert (operator.is_running(), operator.starts) == (True, starts)


# ---- failing answers -------------------------------------------------------------------


def _writes(request: Request) -> bool:
    return request.mutating or request.dry_run


def _all(_: Request) -> bool:
    return True


FAULTS = {
    "429 on writes": Answer(429, _writes, (("Retry-After", "1"),)),
    "500 on writes": Answer(500, _writes),
    "503 on all": Answer(503, _all),
    "401 on all": Answer(401, _all),
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[pytest.mark.slow] * (each == "500 on writes")) for each in FAULTS],
)
def test_the_operator_recovers_from_a_failing_api_server(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess, fault: str
) -> None:
    proxy.answer = FAULTS[fault]
    if fault == "401 on all":
        proxy.drop_watches()  # an open watch stays open; a new one needs a token
    kubectl.apply(manifest())
    time.sleep(5)
    assert not children(kubectl)
    alive, starts = operator.livez(), operator.starts
    proxy.answer = None
    assert kept_alive(operator, lambda: len(workers(kubectl)) == 3, 90), operator.last_log_lines()
    there = settled(kubectl, pods=3)
    print(f"{fault}: /livez {alive}, restarts: {operator.starts - starts}")
    assert len(there) == len(set(there)), there
    if fault != "401 on all":
        assert (operator.starts, alive[0]) == (starts, 200), operator.last_log_lines()


def test_late_answers_are_awaited(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess
) -> None:
    proxy.delay_s = 1.0
    kubectl.apply(manifest())
    there = settled(kubectl, pods=3)
    assert len(there) == len(set(there)), there
    assert (operator.starts, operator.livez()[0]) == (1, 200)


@pytest.mark.root
@pytest.mark.parametrize(
    ("how", "away_s"),
    [
        ("killed", 12.0),
        pytest.param("killed", 30.0, marks=pytest.mark.slow),
        pytest.param("frozen", 30.0, marks=pytest.mark.slow),
    ],
)
def test_the_operator_recovers_from_a_missing_api_server(
    api_site: Site, kubectl: Kubectl, tmp_path: Path, how: str, away_s: float
) -> None:
    plane = api_site.control_plane
    access, home = kubectl.kubeconfig, kubectl.namespace
    with OperatorProcess(tmp_path, access, namespaces=(home,), namespace=home) as operator:
        kubectl.apply(manifest())
        there = settled(kubectl, pods=3)
        if how == "killed":
            plane.machine.stop("kube-apiserver")
        else:
            plane.machine.signal("kube-apiserver", signal.SIGSTOP)
        try:
            time.sleep(away_s)
            alive = operator.livez()
        finally:
            if how == "frozen":
                plane.machine.signal("kube-apiserver", signal.SIGCONT)
            plane.start()
            plane.wait_ready()
        assert settled(kubectl, pods=3) == there
        kubectl.apply(manifest(suspend=True))
        began_s = time.monotonic()
        look = partial(_is_suspended, kubectl)
        assert kept_alive(operator, look, 120), operator.last_log_lines()
        print(
            f"{how} for {away_s:g} s: /livez {alive}, starts: {operator.starts}, "
            f"acts again within {time.monotonic() - began_s:.0f} s"
        )
        assert alive[0] == 200


def _is_suspended(kubectl: Kubectl) -> bool:
    return state_of(kubectl) == "Suspended" and not workers(kubectl)
