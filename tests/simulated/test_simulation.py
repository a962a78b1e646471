"""Tests of `dlion simulate` as users start it.

The same run repeats bit for bit. Threads and a busy machine change nothing, but another seed does.
Replicas under `full` in lock step are identical. Slower links make a run longer, not different. The
result folder is like that of a real run.

Left out: pipes and clocks (tests/unit/simulator); the accuracy of simulations (benchmarks).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.simulations import EndedCommand, run_commands

from dlion_api.exit_codes import ExitCode
from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs import builtin

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits.yaml"

FULL = (
    "exchange.policy=full",
    "exchange.codec=float32",
    "synchronization.mode=synchronous",
    "knowledgeTransfer.policy=none",
)


def words(
    out: Path,
    *flags: str,
    settings: tuple[str, ...] = (),
    stop: str = "{maxSteps: 15}",
    report: bool = False,
) -> list[str]:
    """The command that simulates the quick start's job."""
    settings = (f"trainer.stop={stop}", "trainer.evaluation.everySamples=2000", *settings)
    return [
        "simulate", str(DIGITS), "-e", "quickstart", "--out", str(out), "-o", "json", *flags,
        *(() if report else ("--no-report",)),
        *(word for setting in settings for word in ("--set", setting)),
    ]  # fmt: skip


def four_workers(path: Path, *, mbit_per_s: float = 100, **document: Any) -> str:
    """An environment of four equal workers."""
    workers = [{"count": 4, "cores": 2, "mbitPerS": mbit_per_s}]
    path.write_text(yaml.safe_dump({"name": path.stem, "workers": workers, **document}))
    return str(path)


FREEZES: dict[str, tuple[str, ...]] = {"all": (), "last": ("conv*", "dense1*")}
"""The trained variables, and those frozen for that."""
RING = ("exchange.policy=dlion", "exchange.topology=ring", "exchange.propagation=selective")


class Runs:
    """Simulated runs of one process, and commands that it refused; `again` has its own process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        again = words(folder / "again" / "out", "--threads", "2")
        late = {"at": {"seconds": 5000}, "cores": [1, 1, 1, 1]}
        environments = {
            "slow": four_workers(folder / "slow.yaml", mbit_per_s=4),
            "fast": four_workers(folder / "fast.yaml", mbit_per_s=400),
            "late": four_workers(folder / "late.yaml", changes=[late]),
        }
        commands = {
            "first": self._words("first", "--threads", "1"),
            "other": self._words("other", "--seed", "2"),
            "slow": self._words("slow", "-e", environments["slow"], settings=FULL),
            "fast": self._words("fast", "-e", environments["fast"], settings=FULL),
            "report": self._words("report", report=True),
            "late": self._words(
                "late", "-e", environments["late"],
                settings=("synchronization.mode=bounded",), stop="{maxSeconds: 10}",
            ),
            "ring": self._words("ring", settings=RING),
            "ring-again": self._words("ring-again", settings=RING),
            "too-few": self._words("too-few", "-e", "hetero-sys-a"),
            "endless": self._words("endless", stop="{continuous: true}"),
        }  # fmt: skip
        for policy in ("full", "hierarchical"):
            for trained, freeze in FREEZES.items():
                name = f"{policy}-{trained}"
                settings = (*FULL, f"exchange.policy={policy}")
                settings += (f"trainer.freeze={json.dumps(freeze)}",)
                commands[name] = self._words(name, settings=settings, stop="{maxSteps: 6}")
        with subprocess.Popen(
            [sys.executable, "-m", "dlion_cli", *again],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as beside:  # fmt: skip
            self.ended = run_commands(folder, commands)
            stdout, stderr = beside.communicate()
        self.ended["again"] = EndedCommand(beside.returncode, stdout, stderr)

    def _words(self, name: str, *flags: str, **more: Any) -> list[str]:
        return words(self.out(name), *flags, **more)

    def out(self, name: str) -> Path:
        """The result folder of that run."""
        return self.folder / name / "out"

    def summary(self, name: str) -> Any:
        """The printed summary of that run."""
        assert self.ended[name].exit_code == 0, self.ended[name].stderr
        return json.loads(self.ended[name].stdout)

    def events(self, name: str) -> bytes:
        """The records of that run."""
        return (self.out(name) / "events.jsonl").read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("simulated"))


def test_a_seed_gives_the_same_run_on_a_busy_machine(runs: Runs) -> None:
    """The other process has two threads instead of one, and runs beside the others."""
    hashes = {
        name: runs.summary(name)["simulation"]["traceHash"] for name in ("first", "again", "other")
    }
    assert hashes["again"] == hashes["first"] != hashes["other"]
    assert runs.events("again") == runs.events("first")


def test_whole_gradients_in_lock_step_keep_replicas_identical_at_any_link_rate(
    runs: Runs,
) -> None:
    at_slow, at_fast = runs.summary("slow"), runs.summary("fast")
    for summary in (at_slow, at_fast):
        assert summary["drift"]["max"] == 0.0
    assert at_slow["accuracy"]["mean"] == at_fast["accuracy"]["mean"]
    assert at_slow["time_s"] > 1.1 * at_fast["time_s"]


def test_the_result_folder_is_like_that_of_a_real_run(runs: Runs) -> None:
    summary, out = runs.summary("report"), runs.out("report")
    for name in ("job.yaml", "environment.yaml", "summary.json", "simulation.json", "report.html"):
        assert (out / name).is_file(), name
    assert (out / "models" / "plant-a" / "model.keras").is_file()
    assert summary["ending"]["stop_reason"] == "maxSteps 15 reached"
    assert summary["time_s"] == summary["simulation"]["virtualSeconds"]


def test_a_job_that_does_not_match_the_environment_is_refused(runs: Runs) -> None:
    assert runs.ended["too-few"].exit_code == ExitCode.SPEC
    assert "6 workers" in runs.ended["too-few"].stderr
    assert not runs.out("too-few").exists()


def test_time_stops_with_the_run(runs: Runs) -> None:
    summary = runs.summary("late")
    assert summary["ending"]["stop_reason"] == "maxSeconds 10 reached"
    assert 10 <= summary["simulation"]["virtualSeconds"] < 15
    assert summary["time_s"] == summary["simulation"]["virtualSeconds"]


def test_an_endless_run_is_refused(runs: Runs) -> None:
    assert runs.ended["endless"].exit_code == ExitCode.SPEC
    assert "a stop condition that is always reached" in runs.ended["endless"].stderr


def comparing(out: Path, *flags: str) -> list[str]:
    return [
        "compare", str(DIGITS), "-e", "quickstart", "--out", str(out), "--seconds", "10",
        "--target-accuracy", "0.3", *flags,
    ]  # fmt: skip


def compare(folder: Path, *flags: str) -> tuple[EndedCommand, dict[Path, int], EndedCommand]:
    """A comparison, the times at which its runs were written, and the same command again, which
    writes no run.
    """
    command = comparing(folder / "out", *flags)
    (first,) = run_commands(folder, {"first": command}).values()
    assert first.exit_code == 0, first.stderr
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("events.jsonl")}
    (again,) = run_commands(folder, {"again": command}).values()
    assert again.exit_code == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("events.jsonl")} == times
    return first, times, again


def test_a_comparison_runs_every_column_once_and_is_continued(tmp_path: Path) -> None:
    first, times, again = compare(
        tmp_path, "--policies", "topk,ideal", "--seeds", "1", "--variant",
        "even:batching.policy=even", "--set", "exchange={policy: topk, parameters: {share: 0.1}}",
        "-o", "json",
    )  # fmt: skip
    rows = {row["variant"]: row for row in json.loads(first.stdout)["rows"]}
    assert list(rows) == ["topk", "ideal", "even"]
    assert rows["ideal"]["sent_bytes"]["median"] == 0
    assert rows["topk"]["sent_bytes"]["median"] > 0
    assert len(times) == 3
    assert json.loads(again.stdout)["rows"] == json.loads(first.stdout)["rows"]
    (judged,) = json.loads(first.stdout)["verdicts"].values()
    assert judged["winner"] in {"topk", "even"}, "ideal is not a competitor"
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert judged["text"] in page, "the title names it"
    assert all(f">{name}<" in page for name in rows)


def test_a_comparison_warns_once_of_a_column_whose_runs_are_shorter_than_an_exchange(
    tmp_path: Path,
) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text("name: slow\nworkers: [{count: 4, cores: 1, mbitPerS: 0.001}]\n")
    command = [
        "compare", str(DIGITS), "-e", str(path), "--policies", "full,none", "--seconds", "2",
        "--seeds", "2", "--target-accuracy", "0.3", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    for ended in run_commands(tmp_path, {"first": command, "again": command}).values():
        assert ended.exit_code == 0, ended.stderr
        warned = [line for line in ended.stderr.splitlines() if "takes" in line]
        (line,) = warned
        assert line.startswith("dlion: full in slow: one exchange of policy full has ")
        assert "longer than the run: 2 s" in line


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "policy": (("--policies", "dlion,nonsense"), "there is no exchange policy of that name"),
    "form": (("--variant", "nothing"), "allowed: NAME:PATH=VALUE"),
    "codec": (("--variant", "wrong:exchange.codec=morse"), "spec.exchange.codec"),
    "environment": (("-e", "homo-a"), "6 workers"),
    "rate": (("--learning-rates", "0.1,-1"), "spec.trainer.optimizer.learningRate"),
    "folder": (
        ("--variant", "a b:trainer.seed=1", "--variant", "a-b:trainer.seed=2"),
        "would have the same folder",
    ),
    "calibration": (("--calibration", "no/such/file.json"), "cannot be read"),
}
WHOLE = ("exchange.policy=full", "exchange.codec=float32", "batching.policy=goodput")
BACKUP = ("synchronization={mode: backup, backupWorkers: 2}",)
OWN_SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "others": (
        "dlion,topk", ("exchange={policy: dlion, propagation: selective, residual: perLink}",)
    ),
    "ideal": ("ideal", ("exchange={policy: dlion, propagation: selective, residual: perLink}",)),
    "goodput": ("full,ideal", (*WHOLE, "synchronization.mode=synchronous")),
    "backup": ("dlion,ideal", BACKUP),
}  # fmt: skip
"""Policies to compare, and the part of the manifest that suits only its own policy."""


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EndedCommand]:
    """Comparisons that end before any run."""
    folder = tmp_path_factory.mktemp("judged")
    commands = {
        name: comparing(folder / name / "out", *flags) for name, (flags, _) in REFUSED.items()
    }
    for name, (policies, settings) in OWN_SETTINGS.items():
        flags = [word for setting in settings for word in ("--set", setting)]
        out = folder / name / "out"
        commands[name] = comparing(out, "--policies", policies, *flags, "--dry-run")
    ended = run_commands(folder, commands)
    assert not list(folder.glob("*/out"))
    return ended


@pytest.mark.parametrize("name", REFUSED)
def test_a_comparison_refuses_invalid_arguments_before_any_run(
    judged: dict[str, EndedCommand], name: str
) -> None:
    assert judged[name].exit_code
    assert REFUSED[name][1] in " ".join(judged[name].stderr.split())


@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_columns_of_other_policies_and_the_ideal_accept_a_manifest_made_for_one_policy(
    judged: dict[str, EndedCommand], name: str
) -> None:
    assert judged[name].exit_code == ExitCode.OK, judged[name].stderr


def test_on_a_ring_only_neighbours_are_linked_and_the_run_repeats(runs: Runs) -> None:
    first, again = runs.summary("ring"), runs.summary("ring-again")
    assert first["simulation"]["traceHash"] == again["simulation"]["traceHash"]
    records = [json.loads(line) for line in runs.events("ring").splitlines()]
    pairs = {(record["rank"], record["peer"]) for record in records if "peer" in record}
    assert pairs == {(rank, (rank + step) % 4) for rank in range(4) for step in (1, 3)}


def test_a_learning_rate_that_diverges_is_not_selected_and_not_repeated(tmp_path: Path) -> None:
    first, times, _ = compare(
        tmp_path, "--policies", "", "--variant", "whole:exchange.policy=full", "--seeds", "1",
        "--learning-rates", "full:0.1,100", "--tuning-seeds", "1", "--target-accuracy", "0.6",
        "--set", "batching.globalBatchSize.initial=24", "-o", "json",
    )  # fmt: skip
    (row,) = json.loads(first.stdout)["rows"]
    assert row["learningRate"] == 0.1
    assert row["accuracy"]["median"] is not None
    (report,) = tmp_path.rglob("diverged.txt")
    assert "lr-100" in str(report)
    assert report.read_text()
    assert {path.parents[1].name for path in times} == {"lr-0.0001", "lr-0.1", "lr-100"}
    assert len(times) == 4, "three rates, and the best with the reported seed"


@pytest.mark.parametrize("policy", ["full", "hierarchical"])
def test_bytes_fall_in_proportion_to_the_frozen_variables(policy: str, runs: Runs) -> None:
    def travelled(trained: str) -> float:
        return float(runs.summary(f"{policy}-{trained}")["sent_bytes"])

    def size(trained: str) -> int:
        model = FlatModel(
            builtin("digits"),
            input_shape=(8, 8, 1),
            class_count=10,
            seed=1,
            freeze=FREEZES[trained],
        )
        return model.layout.size

    parameters = size("all") / size("last")
    assert parameters > 40  # only the last layer is left
    assert travelled("all") / travelled("last") == pytest.approx(parameters, rel=0.1)
