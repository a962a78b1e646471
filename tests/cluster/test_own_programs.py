"""Test that a project trains on this machine, in virtual time and at two real sites, unchanged.

There is a project for each shape of program: a folder with a manifest, a program, a package beside
it and a file of weights. `dlion run` and `dlion simulate` train it. `dlion submit` sends it to both
sites, where it trains in pods of this tree's images. No command changes a file, and none gets
`--set`. The sites have the folder's manifest but for the program's place, and its other files byte
for byte: one ConfigMap, whose keys are the names of modules and file.

Each command ends with success. Each place gives a model, the cluster by `dlion fetch` from the
second site, that predicts as the program's own and reaches an accuracy that an untrained one does
not. A part with given weights keeps them. A site that gets another module is reported as one with
another program. The test prints the times.

Left out: errors of programs (tests/unit), slow or exposed links (test_exposure). `make test` trains
the same folders in tests/simulated, and one of them in tests/local.
"""

from __future__ import annotations

import base64
import json
import os
import time
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING

import pytest
import yaml
from tests.support.simulations import two_workers

from dlion_api.spec import load_job
from dlion_cli.__main__ import main
from installed_sites import AT_NODES, FEDERATION_PORT, NAMES, InstalledSites
from local_run import LONG_S, run_command
from own_programs import (
    CUSTOM_LOSS,
    FROZEN,
    PROBABILITIES,
    REGRESSION,
    TWO_INPUTS,
    OwnProgram,
    contents,
)
from side_by_side import SideBySide
from trained_jobs import eventually, status_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(900), pytest.mark.slow]

SHAPES = {own.name: own for own in (TWO_INPUTS, FROZEN, PROBABILITIES, REGRESSION, CUSTOM_LOSS)}
PLACES = ("run", "simulate", "submit")
AT_ONCE = 3
"""Jobs at once. Each has two workers, which need 0.6 GB each."""


@pytest.fixture(scope="module")
def two_sites(
    testbed_possible: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InstalledSites]:
    """Two sites that trust each other and whose pods reach each other."""
    assert testbed_possible is None
    began_s = time.monotonic()
    folder = tmp_path_factory.mktemp("sites")
    with InstalledSites.up(f"o{os.getpid()}", folder, flat=True) as made:
        made.trust_each_other(AT_NODES, FEDERATION_PORT)
        print(f"two sites after {time.monotonic() - began_s:.0f} s")
        yield made
        made.check_rights()


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind's project, and for its model."""
    return tmp_path_factory.mktemp("projects")


@pytest.fixture(scope="module")
def at_once(
    two_sites: InstalledSites, projects: Path, request: pytest.FixtureRequest
) -> Iterator[SideBySide]:
    """The jobs of the chosen tests, started."""
    places = Semaphore(AT_ONCE)

    def begin(own: OwnProgram) -> None:
        with places:
            trained(two_sites, own, projects / own.name)

    items = [item for item in request.session.items if item.path == request.path]
    chosen = [
        item.callspec.params["shape"]
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    with SideBySide({name: partial(begin, SHAPES[name]) for name in chosen}) as made:
        yield made


def trained(sites: InstalledSites, own: OwnProgram, folder: Path) -> None:
    """Train the project at each place; on return the place's models are below `folder`."""
    manifest = own.project(folder / "project")
    files = contents(manifest.parent)
    for place in PLACES:
        began_s = time.monotonic()
        if place == "submit":
            trained_at_sites(sites, own, manifest, folder / place)
        else:
            trained_here(place, own, manifest, folder)
        assert contents(manifest.parent) == files
        print(f"{own.name}: model of `dlion {place}` after {time.monotonic() - began_s:.0f} s")


def trained_here(command: str, own: OwnProgram, manifest: Path, folder: Path) -> None:
    """Train it by that command; the result folder has the command's name."""
    environment = ["-e", two_workers(folder)] if command == "simulate" else []
    out = folder / command
    words = (command, str(manifest), *environment, "--out", str(out))
    ended = run_command(folder, *words, within_s=2 * LONG_S)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["accuracy"]["min"] > own.min_accuracy


def trained_at_sites(sites: InstalledSites, own: OwnProgram, manifest: Path, model: Path) -> None:
    """Submit it at both sites; on return the second site's model is in the folder `model`."""
    for name in NAMES:
        answer = sites.contexts.at(name, "submit", str(manifest))
        assert answer == f"dlionjob.dlion.dev/{own.name} created\n"
    for kubectl in sites.jobs:
        kubectl.wait("--for=condition=Succeeded", f"dlj/{own.name}", timeout_s=300)
        assert_is_submitted(manifest, kubectl, own.name)
    sites.contexts.at(NAMES[1], "fetch", own.name, "--out", str(model))
    for kubectl in sites.jobs:
        kubectl.run("delete", "dlj", own.name, "--wait=false")


def assert_is_submitted(manifest: Path, kubectl: Kubectl, name: str) -> None:
    """Assert that the site has the folder's manifest and program, and nothing else."""
    there, document = kubectl.get("dlj", name), yaml.safe_load(manifest.read_text())
    document["spec"]["trainer"]["program"] = program = there["spec"]["trainer"]["program"]
    assert load_job(there).spec == load_job(document).spec
    files = contents(manifest.parent)
    del files[manifest.name]
    weights = base64.b64encode(files.pop("parts/weights/learned.npy")).decode()
    program_map = kubectl.get("configmap", program["configMap"]["name"])
    assert program_map["binaryData"] == {"learned.npy": weights}
    assert program_map["data"] == {
        file.replace("/", "."): content.decode() for file, content in files.items()
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_a_project_of_each_shape_trains_unchanged_at_each_place(
    at_once: SideBySide, projects: Path, shape: str
) -> None:
    at_once.outcome(shape)
    folder = projects / shape
    assert main(["validate", str(folder / "project" / "job.yaml")]) == 0
    for place in PLACES:
        models = sorted((folder / place).rglob("model.keras"))
        assert models
        for model in models:
            SHAPES[shape].judge(folder / "project", model)


def test_a_site_with_another_module_is_reported(two_sites: InstalledSites, tmp_path: Path) -> None:
    """The programs themselves are the same."""
    manifest = PROBABILITIES.project(tmp_path)
    arguments = ["submit", str(manifest), "--set", "metadata.name=differing"]
    two_sites.contexts.at(NAMES[0], *arguments)
    module = tmp_path / "parts" / "sampling.py"
    module.write_text(f"{module.read_text()}\n# another\n")
    two_sites.contexts.at(NAMES[1], *arguments)

    def consistent(kubectl: Kubectl) -> tuple[str, str]:
        conditions = status_of(kubectl, "differing").get("conditions") or ()
        found = next((each for each in conditions if each["type"] == "SpecConsistent"), {})
        return found.get("status", ""), found.get("message", "")

    for kubectl in two_sites.jobs:
        eventually(lambda k=kubectl: consistent(k)[0] == "False", what="SpecConsistent False")
        print(consistent(kubectl)[1])
        assert "trainer.program.configMap.name" in consistent(kubectl)[1]
    for kubectl in two_sites.jobs:
        kubectl.run("delete", "dlj", "differing", "--wait=false")
