"""Fact: where workers wait for each other, the summary names the worker that holds the others up,
be it by its cores or by its link.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from tests.support.simulations import DIGITS, run_commands

SLOW = {"cores": {"cores": 0.5}, "link": {"mbitPerS": 1}}
"""What the last worker has less of."""


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("slow")
    commands = {}
    for name, less in SLOW.items():
        usual = {"cores": 2, "mbitPerS": 100}
        document = {"name": name, "workers": [{"count": 3, **usual}, {"count": 1, **usual, **less}]}
        environment = folder / f"{name}.yaml"
        environment.write_text(yaml.safe_dump(document))
        commands[name] = [
            "simulate", str(DIGITS), "-e", str(environment), "--out", str(folder / name / "out"),
            "-o", "json", "--no-report", "--set", "trainer.stop={maxSteps: 30}",
            "--set", "exchange={policy: full, codec: float32}", "--set", "batching.policy=even",
            "--set", "sites=[{name: a, groups: [{name: g, workers: 4}]}]",
            "--set", "trainer.dataset={name: digits, partition: iid}",
        ]  # fmt: skip
    found = {}
    for name, ended in run_commands(folder, commands).items():
        assert ended.exit_code == 0, ended.stderr
        found[name] = json.loads((folder / name / "out" / "summary.json").read_text())
    return found


@pytest.mark.parametrize("name", SLOW)
def test_the_slow_worker_is_waited_for(summaries: dict[str, Any], name: str) -> None:
    use, workers = summaries[name]["time_use"], summaries[name]["workers"]
    assert use["wait_fraction"] > 0.3
    assert use["waited_for"][0]["rank"] == 3
    assert use["waited_for"][0]["fraction"] > 0.6
    hardly_waited = workers[3]["waited_s"] < 0.15 * workers[3]["compute_s"]
    assert hardly_waited == (name == "cores")
