"""Test which problems `dlion describe` finds in the load of workers.

- A trainer that hangs, throttling by a quota, waiting for memory or disk, and lost packets have
  their reason, object, advice and command. Figures below the threshold, or unknown ones, are no
  problem.
- The load of a described job is read if a worker runs and the right exists, for a limited number of
  workers.

Left out: real sidecars (tests/cluster/test_injected_causes.py), the figures (test_top.py).
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from dlion_cli.__main__ import main
from dlion_cli.commands.cluster.describe import MAX_LOADS
from dlion_cli.findings.job_problem import JobScope, sorted_problems
from dlion_cli.findings.load_problems import load_problems
from dlion_cli.views.worker_load import JobLoad, SiteLoad, WorkerLoad
from manifest_table import changed, smallest
from scripted_servers import Server, served

if TYPE_CHECKING:
    from pathlib import Path

    from scripted_servers import Answer

SCOPE = JobScope("digits", "ml", datetime(2026, 1, 31, 12, 30, tzinfo=UTC))


def load(**fields: Any) -> WorkerLoad:
    return WorkerLoad("digits-small-1-0-x2x7k", "small-0", 0, **fields)


@pytest.mark.parametrize(
    ("fields", "severity", "reason", "message", "command"),
    [
        ({"silent_seconds": 34.0}, "error", "TrainerHung", "not answered for 34 s",
         "kubectl delete pod digits-small-1-0-x2x7k -n ml"),
        ({"throttled_fraction": 0.8, "quota_cores": 0.2}, "warning", "CpuThrottled",
         "CPU quota of 0.2 cores withholds 80 % of the CPU time", "dlion top digits -n ml"),
        ({"throttled_fraction": 0.999}, "warning", "CpuThrottled", "quota withholds 99.9 %", "top"),
        ({"memory_pressure_fraction": 0.625}, "warning", "MemoryPressure", "memory 62.5 %", "top"),
        ({"io_pressure_fraction": 0.91}, "warning", "DiskSlow", "waited for the disk 91 %", "top"),
        ({"retransmitted_fraction": 0.052, "sent_segments": 600.0}, "warning", "PacketsLost",
         "lose packets: 5.2 % of the TCP segments", "top"),
    ],
)  # fmt: skip
def test_each_cause_has_its_reason_advice_and_command(
    fields: dict[str, float], severity: str, reason: str, message: str, command: str
) -> None:
    (problem,) = sorted_problems(load_problems(JobLoad([load(**fields)], []), SCOPE))
    assert (problem.severity, problem.reason) == (severity, reason)
    assert problem.object == "pod/digits-small-1-0-x2x7k"
    assert message in problem.message
    assert command in problem.command
    assert problem.advice


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"silent_seconds": 9.0, "throttled_fraction": 0.2, "memory_pressure_fraction": 0.4,
         "io_pressure_fraction": 0.4, "retransmitted_fraction": 0.019, "sent_segments": 1e6},
        {"retransmitted_fraction": 0.5, "sent_segments": 18.0},
        {"retransmitted_fraction": 0.5},
        {"problem": "Running: the pod does not answer"},
    ],
)  # fmt: skip
def test_normal_or_unknown_figures_are_not_a_problem(fields: dict[str, Any]) -> None:
    assert list(load_problems(JobLoad([load(**fields)], []), SCOPE)) == []


@pytest.mark.parametrize(("fraction", "segments"), [(0.019, 1e6), (0.5, 18.0), (0.5, None)])
def test_the_site_with_links_that_lose_packets_is_named(
    fraction: float, segments: float | None
) -> None:
    few = SiteLoad("a", None, None, retransmitted_fraction=fraction, sent_segments=segments)
    many = SiteLoad("plant-b", None, None, retransmitted_fraction=0.052, sent_segments=600.0)
    (problem,) = load_problems(JobLoad([], [few, many, SiteLoad("c", None, None)]), SCOPE)
    assert (problem.severity, problem.reason) == ("warning", "PacketsLost")
    assert problem.object == "site/plant-b"
    assert "links to it lose packets: 5.2 % of the TCP segments" in problem.message
    assert problem.advice.startswith("Check the path to that site: ")


@pytest.mark.parametrize(
    ("fractions", "named"),
    [
        ((0.0, 0.052), ["site/b"]),
        ((0.052,), ["pod/digits-small-1-0-x2x7k", "site/a"]),
        ((0.052, 0.052), ["pod/digits-small-1-0-x2x7k", "site/a", "site/b"]),
        ((None, 0.052), ["pod/digits-small-1-0-x2x7k", "site/b"]),
        ((0.0, 0.0), ["pod/digits-small-1-0-x2x7k"]),
    ],
)
def test_a_pod_that_loses_packets_only_to_some_sites_is_not_named(
    fractions: tuple[float | None, ...], named: list[str]
) -> None:
    sites = [
        SiteLoad(name, None, None, retransmitted_fraction=each, sent_segments=600.0)
        for name, each in zip("ab", fractions, strict=False)
    ]
    lossy = load(retransmitted_fraction=0.052, sent_segments=600.0)
    found = load_problems(JobLoad([lossy], sites), SCOPE)
    assert [problem.object for problem in found] == named


def test_a_name_with_shell_characters_has_no_command() -> None:
    odd = WorkerLoad("x;`id`", "small-0", 0, silent_seconds=99.0)
    (problem,) = sorted_problems(load_problems(JobLoad([odd], []), SCOPE))
    assert problem.command == ""


# ---- the command ---------------------------------------------------------------------------------

MAY_NOT: Answer = (403, json.dumps({"message": 'User "jane" cannot get resource "pods/proxy" in '
                                               'API group "" in the namespace "ml"'}))  # fmt: skip
HANGS: Answer = (
    200, "dlion_trainer_connected_count 1\ndlion_trainer_silent_seconds 41.5\n"
)  # fmt: skip


def described(
    folder: Path, capsys: pytest.CaptureFixture[str], metrics: Answer, *, workers: int = 1,
    phase: str = "Running", **status: Any,
) -> tuple[dict[str, Any], Server]:  # fmt: skip
    document = changed(smallest(), {"spec.runId": "1", "metadata.name": "digits"})
    document["metadata"] |= {"namespace": "ml", "generation": 1}
    document |= {"status": {"observedGeneration": 1, "runId": "1", "state": "Training", **status}}
    labels = {
        "dlion.dev/run-id": "1", "dlion.dev/group": "small", "dlion.dev/site": "plant-a",
        "app.kubernetes.io/component": "worker",
    }  # fmt: skip
    pods = [
        {"metadata": {"name": f"w-{i}", "creationTimestamp": "2026-01-31T12:00:00Z", "labels":
                      labels | {"batch.kubernetes.io/job-completion-index": f"{i}"}},
         "spec": {"nodeName": "n1"}, "status": {"phase": phase}}
        for i in range(workers)
    ]  # fmt: skip
    server = Server({
        "digits": (200, json.dumps(document)), "pods": (200, json.dumps({"items": pods})),
        "events": (200, '{"items": []}'), "metrics": metrics,
    })  # fmt: skip
    with served(folder / "kubeconfig", {"a": server}) as file:
        assert main(["describe", "digits", "-o", "json", "--kubeconfig", file]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found, server


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlion_cli.commands.cluster.describe.INTERVAL_S", 0.01)


@pytest.mark.usefixtures("without_pauses")
def test_describe_reads_the_load_of_running_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = described(tmp_path, capsys, HANGS)
    (problem,) = found["problems"]
    assert (problem["reason"], problem["object"]) == ("TrainerHung", "pod/w-0")
    assert found["load"]["workers"][0]["silentSeconds"] == 41.5


@pytest.mark.usefixtures("without_pauses")
def test_some_of_many_workers_are_read_and_the_others_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, server = described(tmp_path, capsys, HANGS, workers=MAX_LOADS + 3)
    assert len({path for path in server.asked if path.endswith("/metrics")}) == MAX_LOADS
    assert found["notes"] == [
        f"load: of {MAX_LOADS} of {MAX_LOADS + 3} workers; `dlion top` reads all"
    ]


@pytest.mark.parametrize(
    ("metrics", "notes"),
    [(MAY_NOT, 1), ((503, "{}"), 0), ((200, "<html>"), 0)],
    ids=["no right", "no answer", "no metrics"],
)
def test_without_the_load_describe_shows_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metrics: Answer, notes: int
) -> None:
    found, _ = described(tmp_path, capsys, metrics)
    assert (found["load"], found["problems"], len(found["notes"])) == (None, [], notes)


def test_nothing_is_read_without_running_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = [{"type": "Succeeded", "status": "True", "reason": "Completed", "message": ""}]
    for more in ({"phase": "Pending"}, {"conditions": over}):
        found, server = described(tmp_path, capsys, HANGS, **more)  # type: ignore[arg-type]
        assert found["load"] is None
        assert not [path for path in server.asked if path.endswith("/metrics")]
