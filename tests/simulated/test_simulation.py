"""`dlion simulate` as users start it: the same run again bit for bit, and what it is worth.

Proves: threads and a busy machine change nothing; another seed does; replicas under `full` in lock
step are identical; slower links make a run longer, not different; a result folder like a run's.
Left out: pipes and clocks (tests/unit/simulation), how near to reality it is (benchmarks).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def simulate(
    out: Path,
    *flags: str,
    settings: tuple[str, ...] = (),
    stop: str = "{maxSteps: 25}",
    report: bool = False,
) -> Any:
    """The summary of a simulated run of the quick start's job."""
    settings = (f"trainer.stop={stop}", "trainer.evaluation.everySamples=2000", *settings)
    command = [
        sys.executable, "-m", "dlion_cli", "simulate", str(DIGITS), "-e", "quickstart",
        "--out", str(out), "-o", "json", *flags, *(() if report else ("--no-report",)),
        *(word for setting in settings for word in ("--set", setting)),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def events(out: Path) -> bytes:
    return (out / "events.jsonl").read_bytes()


def test_a_seed_gives_the_same_run_whatever_else_the_machine_does(tmp_path: Path) -> None:
    first = simulate(tmp_path / "first", "--threads", "1")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        again = simulate(tmp_path / "again", "--threads", "2")
    finally:
        busy.kill()
        busy.wait()
    assert again["simulation"]["traceHash"] == first["simulation"]["traceHash"]
    assert events(tmp_path / "first") == events(tmp_path / "again")
    other = simulate(tmp_path / "other", "--seed", "2")
    assert other["simulation"]["traceHash"] != first["simulation"]["traceHash"]


def test_whole_gradients_in_lock_step_keep_replicas_identical_at_any_rate_of_links(
    tmp_path: Path,
) -> None:
    slow = tmp_path / "slow.yaml"
    slow.write_text(
        yaml.safe_dump({"name": "slow", "workers": [{"count": 4, "cores": 2, "mbitPerS": 4}]})
    )
    fast = tmp_path / "fast.yaml"
    fast.write_text(
        yaml.safe_dump({"name": "fast", "workers": [{"count": 4, "cores": 2, "mbitPerS": 400}]})
    )
    at_slow = simulate(tmp_path / "s", "-e", str(slow), settings=FULL)
    at_fast = simulate(tmp_path / "f", "-e", str(fast), settings=FULL)
    for summary in (at_slow, at_fast):
        assert summary["drift"]["max"] == 0.0
    assert at_slow["accuracy"]["mean"] == at_fast["accuracy"]["mean"]
    assert at_slow["time_s"] > 1.1 * at_fast["time_s"]


def test_the_result_folder_is_like_a_runs(tmp_path: Path) -> None:
    summary = simulate(tmp_path / "out", report=True)
    out = tmp_path / "out"
    for name in ("job.yaml", "environment.yaml", "summary.json", "simulation.json", "report.html"):
        assert (out / name).is_file(), name
    assert (out / "models" / "plant-a" / "model.keras").is_file()
    assert summary["ending"]["stop_reason"] == "maxSteps 25 reached"
    assert summary["time_s"] == summary["simulation"]["virtualSeconds"]


def test_a_job_that_the_environment_does_not_fit_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dlion_cli", "simulate", str(DIGITS), "-e", "hetero-sys-a",
         "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == ExitCode.SPEC
    assert "6 workers" in done.stderr
    assert not (tmp_path / "out").exists()


def four_workers(path: Path, **document: Any) -> str:
    """An environment of four equal workers."""
    workers = [{"count": 4, "cores": 2, "mbitPerS": 100}]
    path.write_text(yaml.safe_dump({"name": "four", "workers": workers, **document}))
    return str(path)


def test_time_stops_with_the_run(tmp_path: Path) -> None:
    late = {"at": {"seconds": 5000}, "cores": [1, 1, 1, 1]}
    environment = four_workers(tmp_path / "late.yaml", changes=[late])
    summary = simulate(
        tmp_path / "late", "-e", environment,
        settings=("synchronization.mode=bounded",), stop="{maxSeconds: 20}",
    )  # fmt: skip
    assert summary["ending"]["stop_reason"] == "maxSeconds 20 reached"
    assert 20 <= summary["simulation"]["virtualSeconds"] < 30
    assert summary["time_s"] == summary["simulation"]["virtualSeconds"]


def test_what_would_never_end_is_refused(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "dlion_cli", "simulate", str(DIGITS), "-e", "quickstart",
        "--set", "trainer.stop={continuous: true}", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.SPEC
    assert "a stop condition that is always reached" in done.stderr


def compare(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "dlion_cli", "compare", str(DIGITS), "-e", "quickstart",
        "--out", str(out), "--seconds", "60", "--target-accuracy", "0.3", *flags,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_comparison_runs_every_column_once_and_is_taken_up_again(tmp_path: Path) -> None:
    flags = (
        "--policies", "topk,full,ideal", "--seeds", "1", "--variant", "even:batching.policy=even",
        "--set", "exchange={policy: topk, parameters: {share: 0.1}}",
    )  # fmt: skip
    first = compare(tmp_path, *flags, "-o", "json")
    assert first.returncode == 0, first.stderr
    rows = {row["variant"]: row for row in json.loads(first.stdout)["rows"]}
    assert list(rows) == ["topk", "full", "ideal", "even"]
    assert rows["ideal"]["sent_bytes"]["median"] == 0
    assert rows["full"]["sent_bytes"]["median"] > 0
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("events.jsonl")}
    assert len(times) == 4
    again = compare(tmp_path, *flags, "-o", "json")
    assert json.loads(again.stdout)["rows"] == json.loads(first.stdout)["rows"]
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_comparison_refuses_what_is_wrong_before_it_runs_anything(tmp_path: Path) -> None:
    for flags, words in (
        (("--policies", "dlion,nonsense"), "there is no exchange policy of that name"),
        (("--variant", "nothing"), "allowed: NAME:PATH=VALUE"),
        (("--variant", "wrong:exchange.codec=morse"), "spec.exchange.codec"),
        (("-e", "homo-a"), "6 workers"),
        (("--learning-rates", "0.1,-1"), "spec.trainer.optimizer.learningRate"),
        (
            ("--variant", "a b:trainer.seed=1", "--variant", "a-b:trainer.seed=2"),
            "would have the same folder",
        ),
        (("--calibration", "no/such/file.json"), "cannot be read"),
    ):
        done = compare(tmp_path / "out", *flags)
        assert done.returncode, flags
        assert words in " ".join(done.stderr.split()), done.stderr
        assert not (tmp_path / "out").exists()


def test_other_policies_columns_and_the_ideal_take_a_manifest_made_for_its_own(
    tmp_path: Path,
) -> None:
    whole = ("exchange.policy=full", "exchange.codec=float32", "batching.policy=goodput")
    backup = ("synchronization={mode: backup, backupWorkers: 2}",)
    for policies, settings in (
        ("dlion,topk", ("exchange={policy: dlion, propagation: selective, residual: perLink}",)),
        ("ideal", ("exchange={policy: dlion, propagation: selective, residual: perLink}",)),
        ("full,ideal", (*whole, "synchronization.mode=synchronous")),
        ("dlion,ideal", backup),
    ):
        flags = [word for setting in settings for word in ("--set", setting)]
        done = compare(tmp_path / "out", "--policies", policies, *flags, "--dry-run")
        assert done.returncode == ExitCode.OK, done.stderr


def test_on_a_ring_neighbours_alone_are_linked_and_the_run_is_the_same_again(
    tmp_path: Path,
) -> None:
    settings = ("exchange.topology=ring", "exchange.propagation=selective")
    first = simulate(tmp_path / "first", settings=settings)
    again = simulate(tmp_path / "again", settings=settings)
    assert first["simulation"]["traceHash"] == again["simulation"]["traceHash"]
    records = [json.loads(line) for line in events(tmp_path / "first").splitlines()]
    pairs = {(record["rank"], record["peer"]) for record in records if "peer" in record}
    assert pairs == {(rank, (rank + step) % 4) for rank in range(4) for step in (1, 3)}


def test_a_learning_rate_that_diverges_is_not_taken_and_not_tried_again(tmp_path: Path) -> None:
    flags = (
        "--policies", "", "--variant", "whole:exchange.policy=full", "--seeds", "1",
        "--learning-rates", "full:0.1,100", "-o", "json",
    )  # fmt: skip
    first = compare(tmp_path, *flags)
    assert first.returncode == 0, first.stderr
    (row,) = json.loads(first.stdout)["rows"]
    assert row["learningRate"] == 0.1
    assert row["accuracy"]["median"] is not None
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("events.jsonl")}
    (told,) = tmp_path.rglob("diverged.txt")
    assert "lr-100" in str(told)
    assert told.read_text()
    assert len(times) == 2
    assert compare(tmp_path, *flags).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("policy", ["full", "hierarchical"])
def test_bytes_fall_in_proportion_to_what_is_frozen(policy: str, tmp_path: Path) -> None:
    encoder = ("conv*", "dense1*")
    settings = (*FULL, f"exchange.policy={policy}")

    def travelled(freeze: tuple[str, ...]) -> float:
        said = simulate(
            tmp_path / f"frozen-{len(freeze)}",
            settings=(*settings, f"trainer.freeze={json.dumps(freeze)}"),
            stop="{maxSteps: 6}",
        )
        return float(said["sent_bytes"])

    def trained(freeze: tuple[str, ...]) -> int:
        model = FlatModel(
            builtin("digits"), input_shape=(8, 8, 1), class_count=10, seed=1, freeze=freeze
        )
        return model.layout.size

    parameters = trained(()) / trained(encoder)
    assert parameters > 40  # the last layer alone is left
    assert travelled(()) / travelled(encoder) == pytest.approx(parameters, rel=0.1)
