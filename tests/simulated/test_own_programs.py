"""Fact: programs with targets, several inputs and outputs, and an optimizer of their own train in
virtual time under the default policy, and end as well as they should.
"""

from __future__ import annotations

import json

import pytest
import yaml
from tests.support.simulations import run_commands

from own_programs import OWN_PROGRAMS, OwnProgram

SITES = [
    {"name": site, "groups": [{"name": "small", "workers": workers}]}
    for site, workers in (("plant-a", 2), ("plant-b", 1))
]


@pytest.fixture(scope="module")
def accuracies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The mean accuracy of each program's replicas at the end."""
    folder = tmp_path_factory.mktemp("own")
    workers = [{"count": 3, "cores": 2, "mbitPerS": 20}]
    environment = folder / "three.yaml"
    environment.write_text(yaml.safe_dump({"name": "three", "workers": workers}))
    commands = {}
    for own in OWN_PROGRAMS:
        (folder / own.name).mkdir()
        (folder / own.name / "mine.py").write_text(own.text)
        trainer = {
            "program": {"file": "mine.py"},
            "optimizer": {"name": own.optimizer, "learningRate": 0.1},
            "stop": {"maxSteps": 200},
        }
        manifest = folder / own.name / "job.yaml"
        manifest.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "dlion.dev/v1alpha1",
                    "kind": "DLionJob",
                    "metadata": {"name": own.name},
                    "spec": {"sites": SITES, "trainer": trainer},
                }
            )
        )
        commands[own.name] = [
            "simulate", str(manifest), "-e", str(environment), "-o", "json", "--no-report",
            "--out", str(folder / own.name / "out"),
        ]  # fmt: skip
    found = {}
    for name, ended in run_commands(folder, commands).items():
        assert ended.exit_code == 0, ended.stderr
        summary = json.loads((folder / name / "out" / "summary.json").read_text())
        found[name] = summary["accuracy"]["mean"]
    return found


@pytest.mark.parametrize("own", OWN_PROGRAMS, ids=lambda own: own.name)
def test_a_program_of_each_shape_trains_in_virtual_time(
    accuracies: dict[str, float], own: OwnProgram
) -> None:
    assert accuracies[own.name] > own.min_accuracy
