"""What happens to a cluster ends no run that could go on: on real API servers, without pods.

Proves: a degraded run goes on when its operator restarts and when the failed worker is scaled away;
an admission policy that denies and then allows; a CRD that is newer than its operator; a wrong
manifest corrected at three sites by one commit under one run id, and a site that joins later by the
same manifest. Left out: the decisions one by one (tests/unit/operator/test_run_ends.py), labels,
keepers and restored API servers (test_children, test_restored), workers that train (test_training).
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from manifest_table import changed
from operator_process import OperatorProcess
from podless_jobs import manifest, state_of, workers
from testbed.sites import Testbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
LATEST = "2026-01-31T12:00:00Z"


def eventually(look: Callable[[], Any], *, within_s: float = 60.0) -> Any:
    """What `look` yields once it is true."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s"
        time.sleep(0.2)
    return found


@pytest.fixture
def operator(kubectl: Kubectl, tmp_path: Path) -> Iterator[OperatorProcess]:
    with operator_of(kubectl, tmp_path) as process:
        yield process


def operator_of(kubectl: Kubectl, folder: Path, site: str = "plant-a") -> OperatorProcess:
    home = kubectl.namespace
    return OperatorProcess(
        folder, kubectl.kubeconfig, site=site, namespaces=(home,), namespace=home
    )


def conditions(kubectl: Kubectl) -> dict[str, tuple[str, str, str]]:
    """Status, reason and message of each condition of the job."""
    status = kubectl.get("dlj", "digits").get("status") or {}
    return {
        each["type"]: (each["status"], each["reason"], each.get("message", ""))
        for each in status.get("conditions") or ()
    }


def is_over(kubectl: Kubectl) -> bool:
    return any(conditions(kubectl)[each][0] == "True" for each in ("Succeeded", "Failed"))


def jobs(kubectl: Kubectl) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubectl.get("jobs", "-l", "dlion.dev/job-name=digits")["items"]
    return found


def small(kubectl: Kubectl) -> dict[str, Any]:
    (found,) = kubectl.get("jobs", "-l", "dlion.dev/group=small")["items"]
    return dict(found)


def have_trained(kubectl: Kubectl) -> None:
    """As an operator writes it once its workers train."""
    said = {"status": {"trainingStartTime": LATEST, "trainerStatus": {"progressPercentage": 12}}}
    kubectl.run("patch", "dlj", "digits", "--subresource=status", "--type=merge",
                "-p", json.dumps(said))  # fmt: skip


def fail(kubectl: Kubectl, index: int) -> None:
    """Says in a kubelet's place that a worker of group small has failed for good."""
    of_index = f"dlion.dev/group=small,batch.kubernetes.io/job-completion-index={index}"
    (pod,) = kubectl.get("pods", "-l", of_index)["items"]
    terminated = {"exitCode": 67, "reason": "Error", "startedAt": LATEST, "finishedAt": LATEST}
    ended = {"status": {"phase": "Failed", "containerStatuses": [
        {"name": "trainer", "image": "x", "imageID": "x", "ready": False, "restartCount": 0,
         "state": {"terminated": terminated}}]}}  # fmt: skip
    kubectl.run("patch", "pod", pod["metadata"]["name"], "--subresource=status", "--type=merge",
                "-p", json.dumps(ended))  # fmt: skip
    eventually(lambda: small(kubectl)["status"].get("failedIndexes") == str(index))


def degraded(kubectl: Kubectl) -> None:
    kubectl.apply(manifest())
    eventually(lambda: len(workers(kubectl)) == 3)
    have_trained(kubectl)
    fail(kubectl, 1)


def test_a_degraded_run_outlives_its_operator_and_the_scaling_of_its_group(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    """By the 45 s after which an operator takes it that every worker has called."""
    degraded(kubectl)
    operator.kill()
    operator.start()
    kubectl.apply(manifest(small=1))
    eventually(lambda: small(kubectl)["spec"]["completions"] == 1)
    until_s = time.monotonic() + 50.0
    while time.monotonic() < until_s:
        assert not is_over(kubectl), conditions(kubectl)
        time.sleep(1.0)
    status = kubectl.get("dlj", "digits")["status"]
    assert status["trainingStartTime"] == LATEST
    assert status["trainerStatus"]["progressPercentage"] == 12


POLICY = "validatingadmissionpolicy"
BINDING = "validatingadmissionpolicybinding"


def label_policy(kubectl: Kubectl) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every Job of that namespace needs the label `owner`."""
    name = f"owner-{kubectl.namespace}"
    api = {"apiVersion": "admissionregistration.k8s.io/v1"}
    rule = {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"],
            "resources": ["jobs"]}  # fmt: skip
    expression = "has(object.metadata.labels) && 'owner' in object.metadata.labels"
    chosen = {"matchLabels": {"kubernetes.io/metadata.name": kubectl.namespace}}
    policy = api | {
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule], "namespaceSelector": chosen},
            "validations": [{"expression": expression, "message": "a Job needs an owner"}],
        },
    }
    binding = api | {
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    return policy, binding


@pytest.mark.parametrize("way_out", ["label", "policy"])
def test_what_a_policy_denies_is_named_and_made_once_it_allows_it(
    kubectl: Kubectl, operator: OperatorProcess, way_out: str
) -> None:
    policy, binding = label_policy(kubectl)
    kubectl.apply(policy, binding)
    time.sleep(2.0)  # a policy is in force a moment after it was made
    try:
        kubectl.apply(manifest())
        eventually(lambda: conditions(kubectl).get("Stalled", ("",))[0] == "True")
        status, reason, message = conditions(kubectl)["Stalled"]
        assert (status, reason) == ("True", "PolicyDenied")
        assert "a Job needs an owner" in message
        assert conditions(kubectl)["Failed"][0] == "False"
        assert jobs(kubectl) == []
        if way_out == "label":
            document = manifest()
            document["metadata"]["labels"] = {"owner": "plant"}
            kubectl.apply(document)
        else:
            kubectl.run("delete", POLICY, policy["metadata"]["name"])
        eventually(lambda: len(jobs(kubectl)) == 2)
        eventually(lambda: conditions(kubectl)["Stalled"][0] == "False")
    finally:
        kubectl.run("delete", POLICY, policy["metadata"]["name"], "--ignore-not-found")
        kubectl.run("delete", BINDING, binding["metadata"]["name"])


def test_a_crd_newer_than_its_operator_ends_no_run(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    """A defaulted field comes back with the next write, as in the documented order of upgrades."""
    kubectl.apply(manifest())
    eventually(lambda: len(jobs(kubectl)) == 2)
    crd = "dlionjobs.dlion.dev"
    path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/exchange/properties"
    add = {
        "op": "add",
        "path": f"{path}/robustness",
        "value": {"type": "string", "default": "clip"},
    }
    remove = {"op": "remove", "path": f"{path}/robustness"}
    kubectl.run("patch", "crd", crd, "--type=json", "-p", json.dumps([add]))
    try:
        kubectl.run("annotate", "dlj", "digits", "looked=at")
        eventually(lambda: "spec.exchange.robustness" in conditions(kubectl)["Ready"][2])
        kubectl.apply(changed(manifest(), {"spec.checkpoint.everySeconds": 77}))
        time.sleep(3.0)
        assert not is_over(kubectl)
        assert conditions(kubectl)["Ready"][1] == "WorkersStarting"
        assert len(jobs(kubectl)) == 2
    finally:
        kubectl.run("patch", "crd", crd, "--type=json", "-p", json.dumps([remove]))


SITES = {"site-a": "plant-a", "site-b": "plant-b", "site-c": "plant-c"}


def commit(**changes: Any) -> dict[str, Any]:
    """One manifest for all sites, under one run id."""
    document = manifest()
    sites = [{"name": name, "groups": [{"name": "small", "workers": 1}]} for name in SITES.values()]
    document["spec"] |= {"sites": sites, "minSites": 2}
    return changed(document, {f"spec.{path}": value for path, value in changes.items()})


@pytest.mark.usefixtures("testbed_possible")
@pytest.mark.podless
def test_one_commit_corrects_a_fleet_under_one_run_id(tmp_path: Path) -> None:
    """The wrong one gets as far as it may at each site: Jobs at one, a denial at another; the third
    joins later."""
    with ExitStack() as stack:
        testbed = stack.enter_context(Testbed.up(name="fleet", sites=3, nodes=0))
        sites = [replace(testbed.site(name).kubectl, namespace="default") for name in SITES]
        for kubectl, name in zip(sites, SITES.values(), strict=True):
            kubectl.run("apply", "-f", str(ROOT / "crds/dlionjob.yaml"))
            kubectl.wait_until_known("dlj")
            folder = tmp_path / name
            folder.mkdir()
            stack.enter_context(operator_of(kubectl, folder, name))
        first, second, _ = sites
        policy, binding = label_policy(second)
        second.apply(policy, binding)
        time.sleep(2.0)
        bad = commit(**{"trainer.image": "no-such-trainer:1", "trainer.seed": 1})
        for kubectl in (first, second):
            kubectl.apply(bad)
        eventually(lambda: len(jobs(first)) == 1)
        eventually(lambda: conditions(second).get("Stalled", ("",))[0] == "True")
        second.run("delete", POLICY, policy["metadata"]["name"])
        good = commit(**{"trainer.image": "trainer:2", "trainer.seed": 2})
        for kubectl in sites:
            kubectl.apply(good)

        def image(kubectl: Kubectl) -> str:
            found = [each for each in jobs(kubectl) if "deletionTimestamp" not in each["metadata"]]
            containers = [c for job in found for c in job["spec"]["template"]["spec"]["containers"]]
            return ",".join(str(each["image"]) for each in containers)

        for kubectl in sites:
            eventually(lambda at=kubectl: image(at) == "trainer:2", within_s=120)
        hashes = {job["metadata"]["annotations"]["dlion.dev/spec-hash"]
                  for kubectl in sites for job in jobs(kubectl)}  # fmt: skip
        assert len(hashes) == 1
        for kubectl in sites:
            assert not is_over(kubectl)
            assert state_of(kubectl) != "Failed"
