"""Test user programs of each kind at two real sites, with the folders of the other tests.

A folder with a manifest, a program and a package beside it passes `dlion validate`. `dlion submit`
sends it to both sites, where it trains in pods of this tree's images. Both sites have the same
ConfigMap, whose keys are the modules' names. The model that `dlion fetch` gets from the second site
predicts better than chance, or than the mean of the targets. A part with given weights keeps them.
A site that gets another module is reported as one with another program. The test prints the times.

Left out: errors of programs (tests/unit), slow or exposed links (test_exposure). The same folders
train in tests/local and tests/simulated, which `make test` runs.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, Any

import pytest

from dlion_cli.__main__ import main
from installed_sites import AT_NODES, FEDERATION_PORT, NAMES, InstalledSites
from own_programs import (
    CUSTOM_LOSS,
    FROZEN,
    PROBABILITIES,
    REGRESSION,
    TWO_INPUTS,
    OwnProgram,
)
from side_by_side import SideBySide
from trained_jobs import eventually, status_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(600), pytest.mark.slow]

SHAPES = {own.name: own for own in (TWO_INPUTS, FROZEN, PROBABILITIES, REGRESSION, CUSTOM_LOSS)}
AT_ONCE = 3
"""Jobs at once. Each has two workers, which need 0.6 GB each."""
STEPS = 300
KEYS = {
    "program.py", "parts.__init__.py", "parts.sampling.py", "parts.weights.learned.py"
}  # fmt: skip


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
    """Submit the project at both sites; on return its model is below `folder`."""
    began_s = time.monotonic()
    manifest = str(own.project(folder / "project", steps=STEPS))
    for name in NAMES:
        answer = sites.contexts.at(name, "submit", manifest)
        assert answer == f"dlionjob.dlion.dev/{own.name} created\n"
    for kubectl in sites.jobs:
        kubectl.wait("--for=condition=Succeeded", f"dlj/{own.name}", timeout_s=300)
    print(f"{own.name}: succeeded {time.monotonic() - began_s:.0f} s after it was submitted")
    maps = [program_map(kubectl, own.name) for kubectl in sites.jobs]
    assert maps[0]["data"] == maps[1]["data"]
    assert maps[0]["data"].keys() == KEYS
    shown = sites.jobs[0].run("describe", "configmap", maps[0]["metadata"]["name"])
    assert "parts.sampling.py:\n----\nimport numpy as np\n" in shown
    sites.contexts.at(NAMES[1], "fetch", own.name, "--out", str(folder / "model"))
    for kubectl in sites.jobs:
        kubectl.run("delete", "dlj", own.name, "--wait=false")


def program_map(kubectl: Kubectl, name: str) -> dict[str, Any]:
    """Return the ConfigMap that the job names."""
    program = kubectl.get("dlj", name)["spec"]["trainer"]["program"]
    return dict(kubectl.get("configmap", program["configMap"]["name"]))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_program_of_each_shape_trains_at_two_sites_and_its_model_predicts(
    at_once: SideBySide, projects: Path, shape: str
) -> None:
    at_once.outcome(shape)
    folder = projects / shape
    assert main(["validate", str(folder / "project" / "job.yaml")]) == 0
    SHAPES[shape].judge(folder / "project", folder / "model" / "model.keras")


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
