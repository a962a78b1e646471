"""Test the upgrade of a site's operator, as in docs/installing.md, while a job of the site trains.

An earlier commit's chart is installed, with its operator, workers and keeper. `helm upgrade` to
this chart and a restart as this operator do not touch the job. Jobs and pods are the same, no child
is created twice, and no worker restarts. The status stays the same. The job's workers, of the
earlier code, make each iteration once, to the end. A definition outside the release
(`crds.enabled=false`) is applied first.

Left out: nodes (operator, workers and keeper are processes with the accounts and tokens of their
pods; in the kubelet's place the test reports their end); images; several sites.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from chart import CHART, NAMESPACE, RELEASE, SITE, Helm, helm_program, merged, nested
from cluster_pods import ClusterPods
from earlier_tree import ROOT, EarlierTree
from local_run import UNTIL_THERE, blobs_in_a_cluster, job_document
from operator_process import Account, OperatorProcess
from podless_jobs import KINDS, children, end_workers, state_of
from trained_jobs import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl
    from testbed.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(900)]

HOME, NAME = "ml", "test"
DEFINITION = ROOT / "crds" / "dlionjob.yaml"
NAP_S, STEPS = 0.3, 200
"""A minute: long enough for an upgrade in the middle, which takes up to 30 s beside other tests.
After it the job naps no more."""


class EarlierPods(ClusterPods):
    """Keeper and workers of the earlier code."""

    def __init__(self, tree: EarlierTree, folder: Path, kubectl: Kubectl) -> None:
        super().__init__(folder, kubectl.get("dlj", NAME), kubectl, subnet=43)
        self.environment |= tree.environment


@pytest.fixture
def earlier() -> EarlierTree:
    """The tree before the upgrade."""
    return EarlierTree.take()


@pytest.fixture
def helm(bare_site: Site, tmp_path: Path) -> Iterator[Helm]:
    """helm with a site that has the operator's namespace and one for jobs; nothing stays."""
    program = helm_program()
    assert program is not None
    made = Helm(program, tmp_path / "helm", bare_site.kubectl)
    for name in (NAMESPACE, HOME):
        bare_site.kubectl.run("create", "namespace", name)
    yield made
    made.run("uninstall", RELEASE, "-n", NAMESPACE)
    crds = ("dlionjobs.dlion.dev", "dlionruntimes.dlion.dev")
    bare_site.kubectl.run("delete", "crd", *crds, "--ignore-not-found")
    bare_site.kubectl.run("delete", "namespace", NAMESPACE, HOME, timeout_s=120)


def operator_settings(kubectl: Kubectl) -> dict[str, Any]:
    """Return the operator's settings in the release, without ports, which differ for a process."""
    text = replace(kubectl, namespace=NAMESPACE).get("configmap", "dlion-operator")["data"]
    settings: dict[str, Any] = yaml.safe_load(text["config.yaml"])
    for name in ("coordinator", "metricsPort", "healthPort"):
        del settings[name]
    return settings


def of_the_run(kubectl: Kubectl) -> dict[str, tuple[str, int]]:
    """Return UID and generation of each child; none may be in deletion."""
    found = kubectl.get(KINDS, "-l", "app.kubernetes.io/managed-by=dlion-operator")["items"]
    assert not any("deletionTimestamp" in each["metadata"] for each in found)
    return {
        f"{each['kind']}/{each['metadata']['name']}": (
            each["metadata"]["uid"],
            each["metadata"].get("generation", 0),
        )
        for each in found
    }


def stable_status(kubectl: Kubectl) -> dict[str, Any]:
    """Return the job's status of the run without figures, times and messages.

    It also ignores that no node runs the keeper's pod, which the status reports after a minute.
    """
    status = kubectl.get("dlj", NAME)["status"]
    kept = ("runId", "specHash", "observedGeneration", "readyWorkers", "readySites")
    conditions = {
        c["type"]: (c["status"], c["reason"].replace("KeeperUnavailable", "Training"))
        for c in status["conditions"]
        if c["type"] != "Degraded"
    }
    return {name: status[name] for name in kept} | conditions


def test_a_job_trains_during_an_upgrade_of_its_operator(
    bare_site: Site, helm: Helm, earlier: EarlierTree, tmp_path: Path
) -> None:
    kubectl = replace(bare_site.kubectl, namespace=HOME)
    system = replace(bare_site.kubectl, namespace=NAMESPACE)
    helm.run("install", RELEASE, str(earlier.chart), "-n", NAMESPACE, values=SITE)
    eventually(lambda: kubectl.knows("dlj"), what="the definition served")
    account = Account.of(system, "dlion-operator", tmp_path / "account")
    operator = OperatorProcess(
        tmp_path,
        account,
        namespace=NAMESPACE,
        settings=operator_settings(kubectl),
        environment=earlier.environment,
    )
    with operator:
        upgraded = tmp_path / "upgraded"
        more = UNTIL_THERE.format(path=str(upgraded))
        config_map, program = blobs_in_a_cluster(NAP_S, more=more)
        trainer = {"program": program, "stop": {"maxSteps": STEPS}}
        kubectl.apply(config_map, job_document(2, trainer=trainer))
        eventually(lambda: len(children(kubectl)) >= 7, what="the run's children")
        pods = EarlierPods(earlier, tmp_path, kubectl)
        try:
            pods.start_keeper()
            for rank in (0, 1):
                pods.start_worker(rank)
            pods.wait_until(pods.all_train, "training")
            pods.wait_until(lambda: len(pods.steps()) > 1, "records at the keeper")
            there, before = of_the_run(kubectl), stable_status(kubectl)

            helm.run("upgrade", RELEASE, str(CHART), "-n", NAMESPACE, values=SITE)
            operator.end()
            operator.settings, operator.environment = operator_settings(kubectl), {}
            operator.start()
            upgraded_at = max(step.iteration for step in pods.steps())
            eventually(lambda: operator.metric("dlion_operator_reconciles_total"), what="a look")
            eventually(lambda: stable_status(kubectl) == before, what="the earlier status")
            assert of_the_run(kubectl) == there
            # A worker that ends before it has joined the new operator reports no more steps.
            pods.wait_until(
                lambda: min(pods.steps(rank)[-1].iteration for rank in (0, 1)) > upgraded_at,
                "records after the upgrade",
            )

            upgraded.touch()
            assert [pods.wait(f"trainer-{rank}") for rank in (0, 1)] == [0, 0], pods.story()
            end_workers(kubectl, NAME)
            eventually(lambda: state_of(kubectl, NAME) == "Succeeded", what="Succeeded")
            assert_each_iteration_once(pods, beyond=upgraded_at)
        finally:
            pods.close()
    assert of_the_run(kubectl).keys() <= there.keys()
    made = [each for each in kubectl.get("events")["items"] if each["reason"] == "WorkersCreated"]
    assert len(made) == 1


def test_a_definition_outside_the_release_is_applied_first(
    bare_site: Site, helm: Helm, earlier: EarlierTree
) -> None:
    kubectl = replace(bare_site.kubectl, namespace=HOME)
    values = merged(SITE, nested("crds.enabled", False))
    apply = ("apply", "--server-side", "-f")
    kubectl.run(*apply, str(earlier.definition))
    helm.run("install", RELEASE, str(earlier.chart), "-n", NAMESPACE, values=values)
    eventually(lambda: kubectl.knows("dlj"), what="the definition served")
    kubectl.apply(job_document(2))
    before = kubectl.get("dlj", NAME)["metadata"]
    kubectl.run(*apply, str(DEFINITION))
    helm.run("upgrade", RELEASE, str(CHART), "-n", NAMESPACE, values=values)
    assert kubectl.run("diff", "--server-side", "-f", str(DEFINITION)) == ""
    after = kubectl.get("dlj", NAME)["metadata"]
    assert (after["uid"], after["generation"]) == (before["uid"], before["generation"])
    kubectl.run("delete", "dlj", NAME)


def assert_each_iteration_once(pods: EarlierPods, *, beyond: int) -> None:
    """Check the iterations of both workers, each started once, also beyond that one."""
    for rank in (0, 1):
        steps = pods.steps(rank)
        assert [step.iteration for step in steps] == list(range(1, len(steps) + 1))
        assert len(steps) > beyond
        assert len({step.incarnation for step in steps}) == 1
