"""Tests of the use of time.

If workers wait for each other, the summary names the worker that delays the others, whether by its
cores or by its link. The parts of every worker's time add up to the whole. The kinds of bytes add
up to the sent bytes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from tests.support.simulations import DIGITS, run_commands

from dlion_core.resource_control.budgets import PROBE_BYTES

SLOW = {"cores": {"cores": 0.5}, "link": {"mbitPerS": 1}}
"""The resource that the last worker has less of."""


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
def test_the_others_wait_for_the_slow_worker(summaries: dict[str, Any], name: str) -> None:
    use, workers = summaries[name]["time_use"], summaries[name]["workers"]
    assert use["wait_fraction"] > 0.3
    assert use["waited_for"][0]["rank"] == 3
    assert use["waited_for"][0]["fraction"] > 0.6
    hardly_waited = workers[3]["waited_s"] < 0.15 * workers[3]["compute_s"]
    assert hardly_waited == (name == "cores")


@pytest.mark.parametrize(("name", "kind"), [("cores", "SlowWorker"), ("link", "SlowLink")])
def test_the_cause_of_the_delay_is_named(summaries: dict[str, Any], name: str, kind: str) -> None:
    culprit, slow = summaries[name]["culprit"], summaries[name]["workers"][3]["name"]
    assert culprit["kind"] == kind
    assert slow in culprit["sentence"]
    assert culprit["fraction"] == summaries[name]["time_use"]["wait_fraction"]


@pytest.mark.parametrize("name", SLOW)
def test_the_parts_of_the_time_and_the_kinds_of_bytes_add_up(
    summaries: dict[str, Any], name: str
) -> None:
    summary = summaries[name]
    assert summary["ending"]["virtual_time"] is True, "and no process starts or ends"
    assert [worker["process"] for worker in summary["workers"]] == [None] * 4
    main = ("compute", "wait", "select", "encode", "send", "decode", "apply", "other")
    shares = [summary["time_use"][f"{part}_fraction"] for part in main]
    assert sum(shares) == pytest.approx(1.0, abs=1e-6)
    for worker in summary["workers"]:
        parts = ("compute_s", "waited_s", "select_s", "encode_s", "send_s", "decode_s", "apply_s")
        # The records round phases to a microsecond.
        known_s = sum(worker[part] for part in parts)
        assert known_s + worker["other_s"] == pytest.approx(worker["wall_s"], abs=1e-3)
        assert known_s <= worker["wall_s"] + 1e-3
    kinds = summary["bytes"]
    sent = kinds["gradient_bytes"] + kinds["weights_bytes"] + kinds["control_bytes"]
    assert sent == summary["sent_bytes"] > 0
    assert min(kinds["header_bytes"], kinds["probe_bytes"]) > 0
    links = [link for worker in summary["workers"] for link in worker["links"]]
    assert {link["probe_bytes"] % PROBE_BYTES for link in links} == {0}
    assert kinds["gradient_bytes"] > 0.9 * sent
