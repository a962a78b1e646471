"""Test jobs of real pods through losses and errors.

A killed worker process, a deleted pod and a killed operator do not end the run. A suspended job
continues where it was, on another node. A missing image or Secret, a missing node, a program that
raises and too little memory cause a reason and an event. kstatus, Flux and Argo CD report each as
docs/conditions.md lists it. A run over its deadline is ended, and its objects are removed after
their time to live, except the job. The test prints the times. All cases run at once, each in its
own namespace, since most of the time is waiting.

Left out: a whole job (test_unequal_workers), several sites (federation), faults of the API server,
workers that are lost during training (test_worker_losses).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gitops.agreement import agree
from gitops.documents import DEGRADED, FAILED, STUCK, SUSPENDED
from side_by_side import SideBySide
from trained_jobs import (
    SYSTEM,
    degraded,
    eventually,
    fetched,
    iteration,
    manifest,
    mostly_waiting,
    records,
    restricted_namespace,
    wait_until_trains,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def at_once(
    operated_site: Kubectl, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SideBySide]:
    """The checks of the chosen tests of this file, started."""

    def begin(name: str) -> None:
        with restricted_namespace(operated_site) as kubectl:
            SCENARIOS[name](kubectl, tmp_path_factory.mktemp("scenario"))

    items = [item for item in request.session.items if item.path == request.path]
    chosen = [
        item.callspec.params["scenario"] for item in items if isinstance(item, pytest.Function)
    ]
    with SideBySide({name: partial(begin, name) for name in chosen}) as made:
        yield made


RAISES = """
def build_model():
    raise ValueError("no such layer: convolution3")
def load_data():
    raise AssertionError("is never asked")
"""


WITHOUT_A_CONFIG_MAP = {
    "volumes": [{"name": "nowhere", "configMap": {"name": "nowhere"}}],
    "containers": [
        {"name": "trainer", "volumeMounts": [{"name": "nowhere", "mountPath": "/nowhere"}]}
    ],
}
DEADLINE_S, TTL_S = 15, 40
NOWHERE = {"nodeSelector": {"dlion.test/node": "nowhere"}}


def what_goes_wrong(kubectl: Kubectl, _: Path) -> None:
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "mine"},
            "data": {"job.py": RAISES},
        },
        named(manifest({"a": 500}), "no-image", {"image": "dlion.test/nowhere:1"}),
        named(
            manifest({"a": 500}),
            "raises",
            {"program": {"configMap": {"name": "mine", "key": "job.py"}}},
        ),
        too_little_memory(manifest({"a": 500}, maxRestarts=0), "200Mi"),
        named(
            manifest({"a": 500}, podTemplate={"spec": WITHOUT_A_CONFIG_MAP}), "no-config-map", {}
        ),
        named(manifest({"a": 500}, podTemplate={"spec": NOWHERE}), "no-node", {}),
    )
    print("\n| job | condition | reason | after | message |\n|---|---|---|---|---|")
    for name, type_, reason, words in (
        ("raises", "Failed", "ProgramFailed", "no such layer: convolution3"),
        ("no-memory", "Failed", "RestartsExceeded", "137 (SIGKILL)"),
        ("no-node", "Stalled", "Unschedulable", " nodes are available"),
        ("no-config-map", "Stalled", "ContainerBroken", "its volumes or its network are not there"),
        ("no-image", "Stalled", "ImageUnavailable", "dlion.test/nowhere:1"),
    ):
        kubectl.wait(f"--for=condition={type_}", f"dlj/{name}", timeout_s=180)
        document = kubectl.get("dlj", name)
        agree(document, STUCK if type_ == "Stalled" else FAILED)
        (condition,) = [each for each in document["status"]["conditions"] if each["type"] == type_]
        assert condition["reason"] == reason
        assert words in condition["message"], condition["message"]
        eventually(partial(has_event, kubectl, name, reason), what=f"an event {reason} of {name}")
        after_s = seconds(condition["lastTransitionTime"]) - seconds(
            document["metadata"]["creationTimestamp"]
        )
        print(f"| {name} | {type_} | {reason} | {after_s:.0f} s | {condition['message']} |")


def has_event(kubectl: Kubectl, name: str, reason: str) -> bool:
    """Report whether there is an event of that reason about that job."""
    chosen = f"--field-selector=involvedObject.kind=DLionJob,involvedObject.name={name}"
    return reason in {each["reason"] for each in kubectl.get("events", chosen)["items"]}


def seconds(stamp: str) -> float:
    """Parse a time as the API server writes it."""
    return datetime.fromisoformat(stamp).timestamp()


def named(document: dict[str, Any], name: str, trainer: dict[str, Any]) -> dict[str, Any]:
    """Return that manifest under another name, with these fields of its trainer."""
    if "program" in trainer:
        del document["spec"]["trainer"]["program"]
    document["metadata"]["name"] = name
    document["spec"]["trainer"] |= trainer
    return document


def too_little_memory(document: dict[str, Any], limit: str) -> dict[str, Any]:
    """Return that manifest with less memory than TensorFlow needs."""
    (group,) = document["spec"]["sites"][0]["groups"]
    group["resources"]["limits"]["memory"] = limit
    return named(document, "no-memory", {})


def kills(kubectl: Kubectl, _: Path) -> None:
    config_map, document = mostly_waiting(manifest({"a": 500, "b": 500}, startDeadlineSeconds=60))
    document["spec"]["trainer"]["stop"] = {"maxSeconds": 30}
    kubectl.apply(config_map, document)
    wait_until_trains(kubectl)
    pods = {
        each["metadata"]["labels"]["dlion.dev/group"]: each["metadata"]["name"]
        for each in kubectl.get("pods", "-l", "app.kubernetes.io/component=worker")["items"]
    }
    kill = "import os, signal; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit()"
    kill += " and b'dlion_worker.trainer' in open(f'/proc/{p}/cmdline','rb').read()"
    kill += " and p != '1' and int(p) != os.getpid()]"
    kubectl.run("exec", pods["a"], "-c", "trainer", "--", "python3", "-c", kill)
    agree(eventually(partial(degraded, kubectl), what="Degraded"), DEGRADED)
    operator = replace(kubectl, namespace=SYSTEM)
    name = operator.get("pods", "-l", "app.kubernetes.io/component=operator")["items"][0]
    operator.run("delete", "pod", name["metadata"]["name"], "--grace-period=0", "--force")
    kubectl.run("delete", "pod", pods["b"], "--wait=false")
    kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=300)
    jobs = kubectl.get("jobs")["items"]
    assert sorted(each["status"].get("succeeded") for each in jobs) == [1, 1]


def a_break(kubectl: Kubectl, tmp_path: Path) -> None:
    config_map, document = mostly_waiting(manifest({"a": 500}))
    one, *others = open_nodes(kubectl)
    if not others:
        pytest.skip(f"only node {one} accepts pods")
    try:
        kubectl.run("cordon", *others)
        kubectl.apply(config_map, document)
        wait_until_trains(kubectl)
        eventually(lambda: iteration(kubectl) > 5, what="iterations")
        assert nodes_of_workers(kubectl) == {one}
        document["spec"]["suspend"] = True
        kubectl.apply(document)
        eventually(lambda: not workers(kubectl))
        agree(kubectl.get("dlj", "digits"), SUSPENDED)
        early = _steps(kubectl, tmp_path / "before")
        before = max(each["iteration"] for each in early)
        known = {each["incarnation"] for each in early}
        kubectl.run("uncordon", *others)
        kubectl.run("cordon", one)
        document["spec"]["suspend"] = False
        kubectl.apply(document)
        eventually(lambda: workers(kubectl), what="a worker")
        wait_until_trains(kubectl)
        assert nodes_of_workers(kubectl) <= set(others)
        kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=300)
    finally:
        kubectl.run("uncordon", one, *others)
    after = _steps(kubectl, tmp_path / "after")
    first = min(each["iteration"] for each in after if each["incarnation"] not in known)
    print(f"iteration {before} before the break, {first} after it")
    assert first == before + 1


def too_long(kubectl: Kubectl, _: Path) -> None:
    """It is kept for its time to live; then only the job is left, with the reason."""
    kubectl.apply(
        manifest({"a": 500}, activeDeadlineSeconds=DEADLINE_S, ttlSecondsAfterFinished=TTL_S)
    )
    kubectl.wait("--for=condition=Failed", "dlj/digits", timeout_s=180)
    document = kubectl.get("dlj", "digits")
    agree(document, FAILED)
    (failed,) = [c for c in document["status"]["conditions"] if c["type"] == "Failed"]
    assert (failed["reason"], f"({DEADLINE_S} s)" in failed["message"]) == (
        "DeadlineExceeded",
        True,
    )
    eventually(partial(has_event, kubectl, "digits", "DeadlineExceeded"), what="an event")
    began = seconds(document["metadata"]["creationTimestamp"])
    assert seconds(failed["lastTransitionTime"]) - began >= DEADLINE_S
    ours = "app.kubernetes.io/managed-by=dlion-operator"
    assert kubectl.get("jobs,deployments", "-l", ours)["items"]
    eventually(
        lambda: not kubectl.get("jobs,deployments,services,configmaps,pods", "-l", ours)["items"],
        within_s=TTL_S + 60,
        what="nothing left",
    )
    assert kubectl.get("dlj", "digits")["status"]["conditions"] == document["status"]["conditions"]


def workers(kubectl: Kubectl) -> list[dict[str, Any]]:
    """Return the pods of workers."""
    found: list[dict[str, Any]] = kubectl.get("pods", "-l", "app.kubernetes.io/component=worker")[
        "items"
    ]
    return found


def open_nodes(kubectl: Kubectl) -> list[str]:
    """Return the nodes that accept any pod, in order of their names."""
    shut = ("NoSchedule", "NoExecute")
    return sorted(
        each["metadata"]["name"]
        for each in kubectl.get("nodes")["items"]
        if not [t for t in each["spec"].get("taints", ()) if t["effect"] in shut]
    )


def nodes_of_workers(kubectl: Kubectl) -> set[str]:
    return {each["spec"]["nodeName"] for each in workers(kubectl)}


def _steps(kubectl: Kubectl, out: Path) -> list[dict[str, Any]]:
    return records(fetched(kubectl, out, "--all"), "step")


SCENARIOS: dict[str, Callable[[Kubectl, Path], None]] = {
    "a process, a pod and the operator are killed": kills,
    "it is suspended and continues on another node": a_break,
    "it takes too long": too_long,
    "what goes wrong": what_goes_wrong,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_job_through_losses_and_errors(at_once: SideBySide, scenario: str) -> None:
    at_once.outcome(scenario)
