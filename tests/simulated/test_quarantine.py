"""Tests of `exchange.quarantine` in `dlion simulate`: one of four workers has wrong data.

The others name and quarantine it. The run is complete without it. Summary, events and terminal name
it with the reason. Its replica counts for no accuracy and no model. The environment neither removes
it nor brings it back. A run that needs its site fails. Without `quarantine` it stays.

Left out: attacks (test_insiders.py); the rule (tests/unit/api).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.support.simulations import EndedCommand, run_commands

from bad_data import BAD_NAME, BAD_RANK, job_with_bad_data
from dlion_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

MAX_STEPS = 40
ABSENT = {"worker": BAD_RANK, "leaves": {"seconds": 3}, "comes": {"seconds": 4}}


class Ended:
    """One run and its results."""

    def __init__(self, folder: Path, command: EndedCommand) -> None:
        self.command = command
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        lines = (folder / "events.jsonl").read_text().splitlines()
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def events(self, reason: str) -> list[dict[str, Any]]:
        return [each for each in self.records if each.get("reason") == reason]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("quarantine")
    environment = folder / "four.yaml"
    workers = [{"count": 4, "cores": 4, "mbitPerS": 100}]
    environment.write_text(
        yaml.safe_dump({"name": "four", "workers": workers, "absences": [ABSENT]})
    )
    document = job_with_bad_data(folder, max_steps=MAX_STEPS)
    changes: dict[str, dict[str, Any]] = {
        "on": {},
        "off": {"exchange": {**document["spec"]["exchange"], "quarantine": "off"}},
        "needed": {"minSites": 3},
        "policy Fail": {"failurePolicy": "Fail"},
    }
    commands = {}
    for name, change in changes.items():
        manifest = folder / f"{name}.yaml"
        manifest.write_text(yaml.safe_dump({**document, "spec": {**document["spec"], **change}}))
        commands[name] = [
            "simulate", str(manifest), "-e", str(environment), "--no-report",
            "--out", str(folder / name / "out"),
        ]  # fmt: skip
    ended = run_commands(folder, commands)
    return {name: Ended(folder / name / "out", command) for name, command in ended.items()}


@pytest.mark.parametrize("name", ["on", "policy Fail"])
def test_a_run_is_complete_without_the_quarantined_worker(
    runs: dict[str, Ended], name: str
) -> None:
    run = runs[name]
    assert run.command.exit_code == ExitCode.OK, run.command.stderr
    ending = run.summary["ending"]
    assert (ending["reason"], ending["missing"]) == ("Completed", [])
    assert [model["ranks"] for model in run.summary["models"]] == [[0, 1, 2], [0, 1, 2]]
    assert (run.summary["accuracy"]["replicas"], run.summary["accuracy"]["min"] > 0.9) == (3, True)


def test_the_quarantined_worker_is_named_with_the_reason(runs: dict[str, Ended]) -> None:
    run = runs["on"]
    (event,) = run.events("WorkerQuarantined")
    assert (event["rank"], event["warning"]) == (BAD_RANK, True)
    assert event["message"].startswith(f"{BAD_NAME} is quarantined (most workers here report it")
    assert "contributes values with the norm" in event["message"]
    reasons = [worker["quarantine"] for worker in run.summary["workers"]]
    assert reasons == ["", "", "", event["message"]]
    assert f"Quarantined: {BAD_NAME} is quarantined" in run.command.stdout


def test_the_quarantined_worker_stops_and_never_returns(runs: dict[str, Ended]) -> None:
    run = runs["on"]
    (event,) = run.events("WorkerQuarantined")
    later = [each for each in run.records if each["time_s"] > event["time_s"]]
    assert later
    assert not [each for each in later if each["kind"] == "step" and each["rank"] == BAD_RANK]
    assert run.events("WorkerLost") == []
    assert run.events("WorkerReady") == []


def test_a_run_that_needs_its_site_fails(runs: dict[str, Ended]) -> None:
    run = runs["needed"]
    assert run.command.exit_code == ExitCode.UNAVAILABLE
    message = run.summary["ending"]["message"]
    assert message == f"worker {BAD_RANK} is quarantined, and 2 sites are left (minSites 3)"


def test_without_quarantine_the_worker_is_named_and_stays(runs: dict[str, Ended]) -> None:
    run = runs["off"]
    assert run.events("UnusualValues")
    assert run.events("WorkerQuarantined") == []
    assert [each["rank"] for each in run.events("WorkerLost")] == [BAD_RANK]
