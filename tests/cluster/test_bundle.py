"""Test a bundle of `make bundle` on nodes without access outside their cluster.

The file has what its README lists, with checksums, each image's base and SBOM. On a fresh cluster
of two nodes install.sh imports the bundle's images into containerd and installs the chart. A
refused value keeps the images, and install.sh reports it. A second run imports and restarts
nothing. On the other node `--images-only` needs neither helm nor kubectl. Then a job with these
images trains on both nodes to Succeeded.

Left out: docker and podman as builders, other architectures (nothing here runs them); k3s, RKE2 and
MicroK8s, whose containerd has the same interface; registries (tests/local).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.errors import UnavailableError
from small_bundle import extracted, facts_of
from testbed.sites import Testbed
from trained_jobs import SITE, SYSTEM, manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.nodes import Node
    from testbed.sites import Site

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]
PACKAGES = {"operator": "kopf", "sidecar": "grpcio", "worker": "tensorflow-cpu"}
REACHED = """
import socket
for address in ("192.0.2.1", "8.8.8.8", "1.1.1.1"):
    try:
        socket.create_connection((address, 443), timeout=3)
    except OSError as error:
        print("unreached", error)
"""


@pytest.fixture(scope="module")
def bundle(testbed_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the folder of a bundle by `make bundle`, with layers from the testbed's cache.

    Its name has a space.
    """
    assert testbed_possible is None
    out = tmp_path_factory.mktemp("bundle")
    done = subprocess.run(
        [str(ROOT / ".venv/bin/python"), "-m", "bundle", "--builder=testbed", f"--out={out}"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "tools")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    (archive,) = out.glob("*.tar")
    assert {path.name for path in out.iterdir()} == {archive.name, f"{archive.name}.sha256"}
    folder = extracted(archive, out / "carried by hand")
    archive.unlink()
    return folder


@pytest.fixture(scope="module")
def site(bundle: Path) -> Iterator[Site]:
    """Two nodes without an image of the project."""
    assert bundle.is_dir()
    with Testbed.up(name=f"b{os.getpid()}", sites=1, nodes=2) as made:
        yield made.site(SITE)


def install(node: Node, bundle: Path, *arguments: str, programs: Path | None = None) -> str:
    """Run install.sh on that node, with only its tools and `programs` on the PATH; return its
    output.

    Raises: UnavailableError with the output.
    """
    path = ":".join([*([str(programs)] if programs else []), "/usr/bin:/bin:/usr/sbin:/sbin"])
    return node.machine.run(
        "env", "-i", f"PATH={path}", f"HOME={bundle.parent}", "sh", str(bundle / "install.sh"),
        *arguments, timeout_s=900,
    )  # fmt: skip


def test_the_bundle_has_the_files_of_its_list(bundle: Path) -> None:
    done = subprocess.run(["sha256sum", "--strict", "--quiet", "-c", "checksums.txt"], cwd=bundle)
    assert done.returncode == 0
    facts = facts_of(bundle)
    digest = facts["base"].partition("@")[2]
    assert facts["base"].startswith("localhost/testbed-base:")
    assert re.fullmatch("sha256:[0-9a-f]{64}", digest)
    base = "org.opencontainers.image.base"
    for target, package in PACKAGES.items():
        with tarfile.open(bundle / f"images/{target}.tar") as archive:
            labels = configuration(archive)["config"]["Labels"]
        assert labels[f"{base}.name"] == facts["base"]
        assert labels[f"{base}.digest"] == digest
        sbom = json.loads((bundle / f"sbom/{target}.cdx.json").read_text())
        assert sbom["bomFormat"] == "CycloneDX"
        listed = {each["name"]: each["value"] for each in sbom["metadata"]["properties"]}
        assert listed[f"syft:image:labels:{base}.digest"] == digest
        kinds = {part.get("purl", "").partition("/")[0]: part for part in sbom["components"]}
        assert {"pkg:deb", "pkg:pypi"} <= kinds.keys()
        names = {part["name"] for part in sbom["components"]}
        assert {package, "libc6"} <= names
        assert ("tensorflow-cpu" in names) == (target == "worker")


def configuration(archive: tarfile.TarFile) -> dict[str, Any]:
    """Return the configuration of the archive's one image."""

    def read(name: str) -> Any:
        found = archive.extractfile(name)
        assert found is not None
        return json.loads(found.read())

    (found,) = read("index.json")["manifests"]
    manifest_of = read(f"blobs/{found['digest'].replace(':', '/')}")
    document: dict[str, Any] = read(f"blobs/{manifest_of['config']['digest'].replace(':', '/')}")
    return document


def test_nodes_reach_nothing_outside(site: Site) -> None:
    for node in site.nodes:
        output = node.machine.run("python3", "-c", REACHED)
        assert output.count("unreached") == 3, output
    routes = subprocess.run(
        ["ip", "netns", "exec", site.layout.netns, "ip", "route", "show", "default"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert routes.stdout == ""


def test_a_job_trains_on_a_cluster_with_only_the_bundle(site: Site, bundle: Path) -> None:
    first, other = site.nodes
    assert not any("dlion-" in name for node in site.nodes for name in node.images())
    programs = first.binaries.folder  # helm and kubectl
    cluster = ("--site", SITE, "--kubeconfig", str(site.kubeconfig))

    output = install(first, bundle, *cluster, "--dry-run", programs=programs)
    assert "Would run: ctr --namespace k8s.io images import" in output
    assert not any("localhost/" in name for name in first.images())
    assert "NotFound" in missing(site)

    with pytest.raises(
        UnavailableError, match="additional properties 'replicas' not allowed"
    ) as it:
        install(first, bundle, *cluster, "--", "--set", "replicas=2", programs=programs)
    assert "NOT complete. Done so far:" in str(it.value)
    assert "image worker: imported on this node" in str(it.value)
    wanted = {f"localhost/dlion-{target}:0.1.0" for target in PACKAGES}
    assert wanted <= set(first.images())

    output = install(other, bundle, "--images-only")
    assert "in the containerd of this node" in output
    assert wanted <= set(other.images())

    values = bundle.parent / "my values.yaml"
    values.write_text("operator: {logFormat: text}\n")
    output = install(first, bundle, *cluster, "--", "-f", str(values), programs=programs)
    assert "This node has the images already" in output
    assert f"DLion 0.1.0 runs as site {SITE}." in output
    system = replace(site.kubectl, namespace=SYSTEM)
    (pod,) = system.get("pods")["items"]
    assert pod["spec"]["containers"][0]["image"] == "localhost/dlion-operator:0.1.0"
    install(first, bundle, *cluster, "--", "-f", str(values), programs=programs)
    (same,) = system.get("pods")["items"]
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]

    kubectl = replace(site.kubectl, namespace="ml")
    site.kubectl.run("create", "namespace", "ml")
    document = manifest({"a": 500, "b": 500})
    document["spec"]["trainer"]["stop"] = {"maxSteps": 30}
    kubectl.apply(document)
    kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=600)
    pods = kubectl.get("pods")["items"]
    used = {c["image"] for each in pods for c in each["spec"]["containers"]}
    assert used <= wanted
    assert "localhost/dlion-worker:0.1.0" in used


def missing(site: Site) -> str:
    """Return the answer of the API server about the definition of DLionJob."""
    with pytest.raises(UnavailableError) as error:
        site.kubectl.run("get", "crd", "dlionjobs.dlion.dev")
    return str(error.value)
