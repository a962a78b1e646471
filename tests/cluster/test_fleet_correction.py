"""Test that one commit corrects a wrong manifest at all sites of a fleet, under one run id.

At one site the wrong one has created Jobs; at another it was denied. A site that joins later uses
the same manifest. The sites are three namespaces of one API server with an operator each. Left out:
federation, workers that run, other ends (test_run_ends).
"""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from admission_policy import BINDING, POLICY, label_policy
from manifest_table import changed
from operator_process import OperatorProcess
from podless_jobs import conditions, is_over, jobs, manifest, state_of
from trained_jobs import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
SITES = ("plant-a", "plant-b", "plant-c")


def commit(**changes: Any) -> dict[str, Any]:
    """Apply one manifest at all sites, under one run id."""
    document = manifest()
    sites = [{"name": name, "groups": [{"name": "small", "workers": 1}]} for name in SITES]
    document["spec"] |= {"sites": sites, "minSites": 2}
    return changed(document, {f"spec.{path}": value for path, value in changes.items()})


@pytest.fixture
def sites(api: Kubectl, tmp_path: Path) -> Iterator[list[Kubectl]]:
    """Start each with its operator, without knowledge of the others."""
    made = []
    with ExitStack() as stack:
        for name in SITES:
            kubectl = replace(api, namespace=f"dlion-test-{uuid.uuid4().hex[:8]}")
            home = kubectl.namespace
            api.run("create", "namespace", home)
            stack.callback(api.run, "delete", "namespace", home, "--wait=false")
            (folder := tmp_path / name).mkdir()
            operator = OperatorProcess(
                folder, api.kubeconfig, site=name, namespaces=(home,), namespace=home
            )
            stack.enter_context(operator)
            made.append(kubectl)
        yield made


def images(kubectl: Kubectl) -> set[str]:
    """Return the images of the containers of Jobs that are not being deleted."""
    found = [each for each in jobs(kubectl) if "deletionTimestamp" not in each["metadata"]]
    containers = [c for job in found for c in job["spec"]["template"]["spec"]["containers"]]
    return {str(each["image"]) for each in containers}


def test_one_commit_corrects_a_fleet_under_one_run_id(sites: list[Kubectl]) -> None:
    """The wrong one reaches Jobs at one site and a denial at another; the third joins later."""
    first, second, _ = sites
    policy, binding = label_policy(second)
    second.apply(policy, binding)
    time.sleep(2.0)  # a policy takes effect a moment after its creation
    bad = commit(**{"trainer.image": "no-such-trainer:1", "trainer.seed": 1})
    for kubectl in (first, second):
        kubectl.apply(bad)
    eventually(lambda: len(jobs(first)) == 1, what="a Job at the first site")
    eventually(
        lambda: conditions(second).get("Stalled", ("",))[0] == "True", what="a denial at the second"
    )
    second.run("delete", POLICY, policy["metadata"]["name"])
    second.run("delete", BINDING, binding["metadata"]["name"])
    good = commit(**{"trainer.image": "trainer:2", "trainer.seed": 2})
    for kubectl in sites:
        kubectl.apply(good)
    for kubectl in sites:
        eventually(lambda at=kubectl: images(at) == {"trainer:2"}, within_s=120, what="good Jobs")
    hashes = {
        job["metadata"]["annotations"]["dlion.dev/spec-hash"]
        for kubectl in sites
        for job in jobs(kubectl)
    }
    assert len(hashes) == 1
    for kubectl in sites:
        assert not is_over(kubectl)
        assert state_of(kubectl) != "Failed"
