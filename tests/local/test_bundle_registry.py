"""Test that install.sh of a bundle pushes its images to a real registry.

It uses skopeo, crane or podman, whichever is in the PATH. The registry then has the images of the
bundle under the chart's names. If the registry does not answer, install.sh exits with 69, lists
what it did, and explains how to log in. A second run is not an error. One reference serves two
architectures after `crane index append`, as images.md describes. After `helm push` the registry has
the bundle's chart as an OCI artefact with the same bytes.

Registry and crane are one program that Go builds once (go-containerregistry). skopeo and podman are
tested where they are installed. Left out: TLS and logins of registries.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundle.parts import package_chart
from chart import helm_program
from small_bundle import extracted, facts_of, write_small_bundle
from testbed.binaries import build_once, cache_folder, go

CRANE = "github.com/google/go-containerregistry/cmd/crane@v0.22.1"
TOOLS = (
    "cat", "df", "dirname", "grep", "mkdir", "mktemp", "rm", "sed", "sh", "sha256sum", "tar", "wc",
)  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("go") is None, reason="no go, which builds the registry"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the bundle is for amd64"),
]


@pytest.fixture(scope="module")
def crane() -> Path:
    """Build the program on first use."""
    folder = cache_folder() / f"crane-{CRANE.rpartition('@')[2]}"
    build_once(folder, lambda into: go("install", "-trimpath", CRANE, env={"GOBIN": str(into)}))
    return folder / "crane"


@pytest.fixture(scope="module")
def registry(crane: Path) -> Iterator[str]:
    """Return host:port of a registry without TLS on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [crane, "registry", "serve", f"--address={address}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        host, _, port = address.partition(":")
        deadline_s = time.monotonic() + 30
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        yield address
        server.terminate()


@pytest.mark.parametrize("program", ["crane", "skopeo", "podman"])
def test_the_images_of_the_bundle_are_in_the_registry(
    program: str, crane: Path, registry: str, tmp_path: Path
) -> None:
    found = str(crane) if program == "crane" else shutil.which(program)
    if found is None:
        pytest.skip(f"no {program} here")
    (programs := tmp_path / "bin").mkdir()
    (programs / program).symlink_to(found)
    for name in TOOLS:
        (programs / name).symlink_to(shutil.which(name) or "/nowhere")
    bundle = extracted(write_small_bundle(tmp_path / "made"), tmp_path / "a: folder, by hand")

    def push(where: str) -> subprocess.CompletedProcess[str]:
        options = ("--images-only", "--insecure-registry", f"--registry={where}")
        return subprocess.run(
            ["sh", bundle / "install.sh", *options],
            env={"PATH": str(programs), "HOME": str(tmp_path)} | podman_needs(tmp_path),
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip

    where = f"{registry}/plants/{program}"
    for _ in range(2):
        done = push(f"{where}/")
        assert done.returncode == 0, done.stderr
    assert f"The images of DLion 0.1.0 are in {where}." in done.stdout
    facts = facts_of(bundle)
    for target in ("operator", "sidecar", "worker"):
        manifest = subprocess.run(
            [crane, "manifest", "--insecure", f"{where}/dlion-{target}:0.1.0"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        with_tar = ["tar", "-xOf", bundle / f"images/{target}.tar"]
        blob = f"blobs/{facts[f'{target}.digest'].replace(':', '/')}"
        ours = subprocess.run([*with_tar, blob], capture_output=True, text=True, check=True)
        theirs, own = json.loads(manifest.stdout), json.loads(ours.stdout)
        assert theirs["config"]["digest"] == own["config"]["digest"]

    nowhere = push("127.0.0.1:9/nothing")
    assert nowhere.returncode == 69
    assert f"{program} could not push 127.0.0.1:9/nothing/dlion-operator:0.1.0" in nowhere.stderr
    assert "nothing was changed" in nowhere.stderr
    assert "login" in nowhere.stderr
    assert not list(tmp_path.glob("tmp.*"))


def test_the_chart_of_the_bundle_is_an_artefact_of_the_registry(
    registry: str, tmp_path: Path
) -> None:
    """Push it as docs/installing.md describes, and render it from the registry."""
    helm = helm_program()
    if helm is None:
        pytest.skip("no helm here")
    (tmp_path / "charts").mkdir()
    chart = package_chart(tmp_path / "charts", "0.1.0", 1_700_000_000)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [helm, *arguments, "--plain-http"],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = f"oci://{registry}/charts"
    run("push", str(chart), where)
    run("pull", f"{where}/dlion", "--version", "0.1.0", "--destination", str(tmp_path))
    assert (tmp_path / "dlion-0.1.0.tgz").read_bytes() == chart.read_bytes()
    objects = run("template", "dlion", f"{where}/dlion", "--set", "site.name=plant-a",
                  "--kube-version", "1.30.0")  # fmt: skip
    assert "kind: Deployment" in objects
    assert "dlionjobs.dlion.dev" in objects


def podman_needs(folder: Path) -> dict[str, str]:
    """Give podman its own storage."""
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n'
    )
    settings = {"CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"), "TMPDIR": str(folder)}
    given = os.environ.get("CONTAINERS_CONF")  # the path of this machine's podman helpers
    return settings | ({"CONTAINERS_CONF": given} if given else {})


def test_one_reference_serves_both_architectures(
    crane: Path, registry: str, tmp_path: Path
) -> None:
    where = f"{registry}/both"

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [crane, *arguments, "--insecure"], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    digests = []
    for architecture in ("amd64", "arm64"):
        made = tmp_path / architecture
        archive = write_small_bundle(made, f"linux/{architecture}", content=architecture.encode())
        bundle = extracted(archive, made / "unpacked")
        (programs := made / "bin").mkdir()
        (programs / "crane").symlink_to(crane)
        for name in TOOLS:
            (programs / name).symlink_to(shutil.which(name) or "/nowhere")
        options = ("--images-only", "--insecure-registry", f"--registry={where}")
        subprocess.run(
            ["sh", bundle / "install.sh", *options],
            env={"PATH": str(programs), "HOME": str(tmp_path)}, capture_output=True, check=True,
        )  # fmt: skip
        digests.append(run("digest", f"{where}/dlion-worker:0.1.0"))
    assert len(set(digests)) == 2
    members = [f"--manifest={where}/dlion-worker@{digest}" for digest in digests]
    run("index", "append", *members, f"--tag={where}/dlion-worker:0.1.0")
    for architecture in ("amd64", "arm64"):
        platform_ = f"--platform=linux/{architecture}"
        config = json.loads(run("config", platform_, f"{where}/dlion-worker:0.1.0"))
        assert config["architecture"] == architecture
