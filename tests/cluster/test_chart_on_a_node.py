"""Test the chart with the project's own images on a real node, with the rights that it grants.

The commands for Kubernetes in README.md install the operator, train a job and fetch its model.
`helm install --wait` completes in namespaces that enforce `restricted`, and `helm test` passes.
docs/metrics.md lists the operator's metrics. The operator acts on a job, and no request of its
account is forbidden, with a ClusterRole and with only Roles. With these a job's workers get
certificates, join and train to the end. After `helm uninstall` only the definition remains, and
with `authority.keep` the site's authority, which the next release uses.

Left out: other results of jobs (other tests of this folder).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from audit import Right, refused, requests_of, used
from chart import CHART, NAMESPACE, Helm, helm_program
from dlion_api.errors import UnavailableError
from manifest_table import smallest
from testbed.image_store import image_store
from testbed.project_images import build_images
from testbed.sites import Testbed
from trained_jobs import eventually, manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl
    from testbed.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(600)]

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:dlion-operator"
ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
README_BLOCK = re.compile(r"^```sh\n(helm install .*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def values(testbed_possible: None) -> dict[str, Any]:
    """The images of the present tree."""
    assert testbed_possible is None
    chosen: dict[str, Any] = {"pullPolicy": "Never"}
    for image in build_images():
        chosen["registry"], _, name = image.reference.partition("/")
        repository, _, tag = name.partition(":")
        chosen[image.target.value] = {"repository": repository, "tag": tag}
    return {"site": {"name": "plant-a"}, "images": chosen}


@pytest.fixture(scope="module")
def site(values: dict[str, Any]) -> Iterator[Site]:
    """A site with a node that has the images, and two restricted namespaces."""
    assert values
    store = image_store(build_images())
    with Testbed.up(name=f"h{os.getpid()}", sites=1, nodes=1, stores={"site-a": store}) as made:
        site = made.site("site-a")
        for name in (NAMESPACE, "ml"):
            site.kubectl.run("create", "namespace", name)
            restricted = "pod-security.kubernetes.io/enforce=restricted"
            site.kubectl.run("label", "namespace", name, restricted)
        yield site


def everything(site: Site) -> set[str]:
    """Return kind, namespace and name of all objects, except events and the cluster's own."""
    kinds = site.kubectl.run("api-resources", "--verbs=list", "-o", "name").split()
    asked = ",".join(each for each in kinds if not each.startswith("events"))
    shape = "{range .items[*]}{.kind} {.metadata.namespace}/{.metadata.name}{'\\n'}{end}"
    found = site.kubectl.run("get", asked, "-A", "-o", f"jsonpath={shape}")
    return {line for line in found.splitlines() if " kube-" not in line}


@pytest.fixture(scope="module")
def before(site: Site) -> set[str]:
    """The objects without the chart, once each namespace has its default objects."""
    own = {f"{kind} {namespace}/{name}" for namespace in (NAMESPACE, "ml") for kind, name in
           (("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt"))}  # fmt: skip
    eventually(lambda: own <= everything(site), what="namespaces that are set up")
    return everything(site)


@pytest.fixture(scope="module")
def helm(site: Site, before: set[str], tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """helm with that site, on which nothing is installed."""
    assert before
    program = helm_program()
    assert program is not None
    return Helm(program, tmp_path_factory.mktemp("helm"), site.kubectl)


def install(helm: Helm, site: Site, values: dict[str, Any]) -> None:
    """Install or upgrade the chart; the operator runs on return."""
    try:
        helm.run("upgrade", "--install", "dlion", str(CHART), "-n", NAMESPACE, "--wait",
                 "--timeout", "100s", values=values)  # fmt: skip
    except UnavailableError as error:
        kubectl = replace(site.kubectl, namespace=NAMESPACE)
        pytest.fail(f"{error}\n{kubectl.run('logs', 'deployment/dlion-operator')[-4000:]}")


def state_of(kubectl: Kubectl, name: str) -> str:
    """Return the state of a job in its status."""
    return str(kubectl.get("dlionjob", name).get("status", {}).get("state", ""))


@pytest.mark.timeout(900)
def test_the_commands_of_the_readme_train_a_job_and_fetch_its_model(
    helm: Helm, site: Site, values: dict[str, Any], tmp_path: Path
) -> None:
    """Run them as written, except the images' registry: the tree's images are on the node."""
    (block,) = README_BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    (tmp_path / "values.json").write_text(json.dumps(values))
    block, count = re.subn(
        ",images.registry=registry.example$", " -f values.json", block, flags=re.MULTILINE
    )
    assert count == 1
    programs, config = tmp_path / "bin", tmp_path / "kubeconfig"
    programs.mkdir()
    for name, program in (("helm", helm.program), ("kubectl", site.kubectl.program)):
        (programs / name).symlink_to(program)
    (tmp_path / "helm").symlink_to(CHART.parent)
    config.write_bytes(site.kubectl.kubeconfig.read_bytes())
    replace(site.kubectl, kubeconfig=config).run(
        "config", "set-context", "--current", "--namespace=ml"
    )
    document = manifest({"a": 500})
    document["metadata"]["name"] = "cifar10"
    document["spec"]["sites"][0]["name"] = "plant-a"
    document["spec"]["trainer"]["stop"] = {"maxSteps": 30}
    (tmp_path / "job.yaml").write_text(json.dumps(document))
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "KUBECONFIG": str(config), "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "model" / "model.keras").stat().st_size > 1000
    replace(site.kubectl, namespace="ml").run("delete", "dlionjob", "cifar10")


@pytest.mark.parametrize("namespaces", [[], ["ml"]], ids=["cluster", "namespaced"])
def test_the_operator_starts_and_acts_with_its_granted_rights(
    helm: Helm, site: Site, values: dict[str, Any], namespaces: list[str]
) -> None:
    chosen = values | {"namespaces": namespaces}
    log = site.control_plane.audit_log
    before = len(requests_of(ACCOUNT, log))
    install(helm, site, chosen)
    assert "Succeeded" in helm.run("test", "dlion", "-n", NAMESPACE)
    kubectl = replace(site.kubectl, namespace="ml")
    name = f"job-{len(namespaces)}"
    document = smallest()
    document["metadata"] = {"name": name}
    document["spec"]["sites"] = [{"name": "plant-a", "groups": [{"name": "small", "workers": 1}]}]
    kubectl.run("create", "-f", "-", text=json.dumps(document))
    deadline_s = time.monotonic() + 60
    while not (state_of(kubectl, name) and kubectl.get("jobs")["items"]):
        assert time.monotonic() < deadline_s, state_of(kubectl, name)
        time.sleep(0.5)
    asked = requests_of(ACCOUNT, log)[before:]
    assert refused(asked) == []
    assert Right("batch", "jobs", "create") in used(asked, "ml")
    kubectl.run("delete", "dlionjob", name)


@pytest.mark.timeout(900)
def test_a_job_trains_to_its_end_with_only_roles(
    helm: Helm, site: Site, values: dict[str, Any]
) -> None:
    log = site.control_plane.audit_log
    before = len(requests_of(ACCOUNT, log))
    install(helm, site, values | {"namespaces": ["ml"]})
    bound = json.dumps(site.kubectl.get("clusterrolebindings")["items"])
    assert '"dlion-operator"' not in bound
    kubectl = replace(site.kubectl, namespace="ml")
    document = manifest({"a": 500})
    document["spec"]["sites"][0]["name"] = "plant-a"
    document["spec"]["trainer"]["stop"] = {"maxSteps": 30}
    kubectl.apply(document)
    kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=400)
    jobs = kubectl.get("jobs")["items"]
    assert [each["status"].get("succeeded") for each in jobs] == [1]
    asked = requests_of(ACCOUNT, log)[before:]
    assert refused(asked) == []
    assert used(asked, "") == set()
    kubectl.run("delete", "dlionjob", "digits")


def test_the_metrics_of_the_operator_are_documented(
    helm: Helm, site: Site, values: dict[str, Any]
) -> None:
    install(helm, site, values)
    where = f"/api/v1/namespaces/{NAMESPACE}/services/dlion-operator:metrics/proxy/metrics"
    text = site.kubectl.run("get", "--raw", where)
    exported = set(re.findall(r"^# TYPE (dlion_\w+?)(?:_created)? ", text, re.MULTILINE))
    exported = {name + "_total" if f"{name}_total" in text else name for name in exported}
    documented = set(re.findall(r"^- `(dlion_\w+)`", DOCUMENT, re.MULTILINE))
    assert "dlion_operator_loop_lag_seconds" in exported
    assert exported <= documented


KEPT = {
    "CustomResourceDefinition /dlionjobs.dlion.dev",
    "CustomResourceDefinition /dlionruntimes.dlion.dev",
    "APIService /v1alpha1.dlion.dev",
}
AUTHORITY = {f"{kind} {NAMESPACE}/dlion-authority" for kind in ("Secret", "ConfigMap")}


def test_an_uninstalled_operator_leaves_only_kept_objects(
    helm: Helm, site: Site, values: dict[str, Any], before: set[str]
) -> None:
    system = replace(site.kubectl, namespace=NAMESPACE)

    def left() -> set[str]:
        return everything(site) - before

    def is_only(kept: set[str]) -> bool:
        print(f"also left: {sorted(left() - kept)}")
        return left() <= kept

    def certificate() -> str:
        return str(system.get("secret", "dlion-authority")["data"]["tls.crt"])

    install(helm, site, values | {"authority": {"keep": True}})
    first = certificate()
    helm.run("uninstall", "dlion", "-n", NAMESPACE, "--wait")
    eventually(lambda: is_only(KEPT | AUTHORITY), within_s=150, what="what is not kept goes")
    time.sleep(10)  # garbage collection takes a moment
    assert left() == KEPT | AUTHORITY
    install(helm, site, values)
    assert certificate() == first
    assert left() > KEPT | AUTHORITY
    helm.run("uninstall", "dlion", "-n", NAMESPACE, "--wait")
    eventually(lambda: is_only(KEPT), within_s=150, what="all of it goes")
    assert left() == KEPT
