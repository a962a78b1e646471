"""Test the GitOps kit with Flux' own controllers, from a git repository to a trained model.

The cluster has one GitRepository and one Kustomization. A commit installs the operator by the kit's
HelmRelease and its job by the kit's Kustomization, which is ready once real pods train. A commit
with another `runId` does not touch a run in progress, and its status has the reason. When the run
has ended, the job runs again with all its changes. The test prints the times.

Left out: several sites, Flux' verdicts in other states (tests/chart/test_gitops_verdicts.py), Argo
CD and Fleet. Stand-ins: the controllers are processes beside the cluster, the mirror's images are
on the node, and a volume replaces the keeper's storage class.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import flux
from flux import Flux
from git_repository import GitRepository, served
from gitops.agreement import agree
from gitops.documents import ROOT, SUCCEEDED, TRAINING
from testbed.project_images import build_images
from testbed.sites import Testbed
from trained_jobs import eventually, status_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

KIT = "examples/gitops"
MIRROR = "mirror.plant-a.example:5000"
TAG = "v0.1.0"
OPERATOR = ("helmreleases", "dlion")
JOBS = ("kustomizations", "dlion-jobs")


@pytest.fixture(scope="module")
def flux_folder() -> Path:
    """The build of Flux."""
    folder = flux.built()
    if folder is None:
        pytest.skip("Flux is not built yet: run `tools/testbed build-flux`")
    return folder


@pytest.fixture
def kubectl(testbed_possible: None) -> Iterator[Kubectl]:
    """plant-a: a site with one node, which has the project's images by the mirror's names."""
    assert testbed_possible is None
    images = build_images()
    with Testbed.up(name=f"g{time.time_ns() % 10**6}", sites=1, nodes=1,
                    images=[image.archive for image in images]) as made:  # fmt: skip
        site = made.site("site-a")
        (node,) = site.nodes
        for image in images:
            node.name_image(image.reference, f"{MIRROR}/dlion-{image.target}:{TAG[1:]}")
        node.machine.run("mkdir", "/var/lib/keeper")
        site.kubectl.apply(storage(node.layout.name))
        yield site.kubectl


def storage(node: str) -> dict[str, Any]:
    """The storage class of plant-a's values, on that node's disk."""
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "keeper"},
        "spec": {
            "storageClassName": "local-path",
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce"],
            "local": {"path": "/var/lib/keeper"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }


@dataclass(frozen=True)
class Fleet:
    """A repository with the chart and the kit, as a user with one site has it."""

    repository: GitRepository

    @classmethod
    def new(cls, folder: Path, url: str) -> Fleet:
        """Create it with this in place of the kit's address."""
        made = cls(GitRepository.new(folder / "dlion.git"))
        for part in ("helm", KIT):
            shutil.copytree(ROOT / part, made.repository.folder / part)
        operator = made.repository.folder / KIT / "flux/base/operator.yaml"
        text = operator.read_text(encoding="utf-8")
        operator.write_text(text.replace("https://git.example", url))
        return made

    def commit(self, run_id: str, *, seconds: int) -> str:
        """Commit the job with that `runId`, to train for this long; return the revision."""
        path = self.repository.folder / KIT / "jobs/base/job.yaml"
        job = yaml.safe_load(path.read_text(encoding="utf-8"))
        job["spec"] |= {"runId": run_id, "sites": job["spec"]["sites"][:1]}
        job["spec"]["trainer"]["stop"] = {"maxSeconds": seconds}
        path.write_text(yaml.safe_dump(job))
        return self.repository.commit(f"Run {run_id}")


def beginning(url: str) -> list[dict[str, Any]]:
    """Return the objects of `flux bootstrap` and of the page's `flux create kustomization`."""
    source = {
        "apiVersion": "source.toolkit.fluxcd.io/v1",
        "kind": "GitRepository",
        "metadata": {"name": "flux-system"},
        "spec": {"url": f"{url}/dlion.git", "ref": {"branch": "main"}, "interval": "2s"},
    }
    kustomization = {
        "apiVersion": "kustomize.toolkit.fluxcd.io/v1",
        "kind": "Kustomization",
        "metadata": {"name": "dlion"},
        "spec": {
            "sourceRef": {"kind": "GitRepository", "name": "flux-system"},
            "path": f"./{KIT}/flux/plant-a",
            "prune": True,
            "interval": "10m",
        },
    }
    return [source, kustomization]


@dataclass(frozen=True)
class Reconciled:
    """The reported state of an object of Flux."""

    ready: str
    message: str
    revision: str
    """The revision that it was applied from, if any."""

    @classmethod
    def by(cls, kubectl: Kubectl, kind: str, name: str) -> Reconciled:
        """Read the one of that kind and name; its fields are empty while it is missing."""
        for found in kubectl.get(kind)["items"]:
            status = found.get("status") or {}
            for each in status.get("conditions") or ():
                if (found["metadata"]["name"], each["type"]) == (name, "Ready"):
                    revision = status.get("lastAppliedRevision", "")
                    return cls(each["status"], each["message"], revision)
        return cls("", "", "")


def test_a_commit_trains_a_job_and_another_trains_it_again(
    kubectl: Kubectl, flux_folder: Path, tmp_path: Path
) -> None:
    system = replace(kubectl, namespace=flux.NAMESPACE)
    jobs = replace(kubectl, namespace="training")
    began_s = time.monotonic()

    def print_time(what: str) -> None:
        print(f"{what} after {time.monotonic() - began_s:.0f} s")

    def is_in_state(run_id: str, state: str) -> bool:
        running.check()
        if not jobs.knows("dlj") or not jobs.get("dlj")["items"]:
            return False
        status = status_of(jobs)
        return (status.get("runId"), status.get("state")) == (run_id, state)

    flux.install(flux_folder, kubectl)
    with served(tmp_path) as url, Flux(flux_folder, kubectl, tmp_path) as running:
        fleet = Fleet.new(tmp_path, url)
        first = fleet.commit("1", seconds=60)
        fleet.repository.tag(TAG)
        system.apply(*beginning(url))
        eventually(
            lambda: Reconciled.by(system, *OPERATOR).ready == "True",
            within_s=240, what="the operator",
        )  # fmt: skip
        print_time("the operator runs")
        eventually(lambda: is_in_state("1", "Training"), within_s=240, what="the first run")
        agree(jobs.get("dlj", "digits"), TRAINING)
        print_time("the first run trains")
        eventually(lambda: Reconciled.by(system, *JOBS).ready == "True", what="its Kustomization")
        assert Reconciled.by(system, *JOBS).revision == first
        second = fleet.commit("2", seconds=30)
        refusal = "runId may change only after the job has succeeded or failed"
        eventually(lambda: refusal in Reconciled.by(system, *JOBS).message, what=refusal)
        assert is_in_state("1", "Training")
        print_time("the second run is refused")
        eventually(lambda: is_in_state("2", "Training"), within_s=240, what="the second run")
        assert jobs.get("dlj", "digits")["spec"]["trainer"]["stop"]["maxSeconds"] == 30
        print_time("the second run trains")
        eventually(lambda: Reconciled.by(system, *JOBS).ready == "True", what="its Kustomization")
        assert Reconciled.by(system, *JOBS).revision == second
        jobs.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=120)
        agree(jobs.get("dlj", "digits"), SUCCEEDED)
        assert status_of(jobs)["runId"] == "2"
        print_time("the second run has succeeded")
