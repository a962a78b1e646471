"""Tests of the ends of simulated runs: by target, during steps, stuck, by Ctrl-C and by a
closed pipe.

The target uses the workers that can still join. A run is as long as its last step. Links are
reported to the last byte. A run without possible progress has not succeeded. An interruption waits
for no gradient that has not started, and states what is kept. A failure before the first step
leaves no folder. A run in which no exchange ends is warned of at its start. In lock step no step
begins that would end long after the run.

Left out: crashes and cuts (test_faults.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.support.simulations import (
    DIGITS,
    Case,
    EndedCommand,
    Simulated,
    four_workers,
    run_commands,
    simulate_all,
)

from dlion_api.exit_codes import ExitCode
from local_run import blobs, job_document

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TWO_STEPS = {"maxSteps": 2}
STEP_S, LATENCY_S = 0.5, 0.1


def settings(stop: dict[str, Any], every_samples: int = 100_000) -> dict[str, Any]:
    """Half a second a step for all in lock step."""
    return {
        "trainer.stop": stop,
        "trainer.evaluation.everySamples": every_samples,
        "batching": {"policy": "even", "globalBatchSize": {"initial": 80, "growth": False}},
        "knowledgeTransfer.policy": "none",
        "exchange.policy": "full",
        "exchange.codec": "float32",
        "synchronization.mode": "synchronous",
    }


def one_is_slower() -> dict[str, Any]:
    return four_workers(
        workers=[
            {"count": 3, "cores": 4, "mbitPerS": 100},
            {"count": 1, "cores": 2, "mbitPerS": 100},
        ],
        betweenSites={"latencyMs": LATENCY_S * 1000},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Simulated]:
    gone = four_workers(absences=[{"worker": 1, "leaves": {"seconds": STEP_S / 2}}])
    target = {"targetAccuracy": 0.3, "maxSeconds": 60}
    cases = {
        "target": Case(gone, settings(target, every_samples=40)),
        "short": Case(four_workers(), settings({"maxSteps": 4})),
        "long": Case(four_workers(), settings({"maxSteps": 9})),
        "epochs": Case(four_workers(), settings({"maxEpochs": 1})),
        "far": Case(one_is_slower(), settings({"maxSteps": 5})),
        "unmerged": Case(
            four_workers(betweenSites={"mbitPerS": 0.001}), settings({"maxSeconds": 2})
        ),
        "long steps": Case(
            four_workers(betweenSites={"latencyMs": 3000}), settings({"maxSeconds": 8})
        ),
    }
    return simulate_all(tmp_path_factory.mktemp("ends"), cases)


def test_the_target_is_judged_without_a_worker_that_never_returns(
    runs: dict[str, Simulated],
) -> None:
    """It died in its first step, so it will never have an evaluation."""
    reason = runs["target"].summary["ending"]["stop_reason"]
    assert reason.startswith("targetAccuracy 0.3 reached: mean over 3 replicas")


def test_links_are_reported_to_the_last_byte(runs: dict[str, Simulated]) -> None:
    """This holds for any position of the end between two reports."""
    short, long = runs["short"], runs["long"]
    assert (len(short.steps[0]), len(long.steps[0])) == (4, 9)
    for sender, receiver in ((0, 1), (2, 3)):
        sent = short.sent_bytes(sender, receiver) / 4
        assert sent == long.sent_bytes(sender, receiver) / 9 > 0


def test_records_have_the_passes_through_the_data(runs: dict[str, Simulated]) -> None:
    """The stop condition is met with the step that completes the first pass."""
    run = runs["epochs"]
    reasons = [event["message"] for event in run.events("TrainingStopped")]
    assert "maxEpochs 1 reached" in reasons
    for steps in run.steps.values():
        *_, before, last = [step["epochs"] for step in steps]
        assert before < 1 <= last


def test_a_run_in_which_no_exchange_ends_is_warned_of_before_its_first_step(
    runs: dict[str, Simulated],
) -> None:
    run = runs["unmerged"]
    (warning,) = run.events("ExchangeTooLong")
    assert "(0.001 Mbit/s) takes" in warning["message"]
    assert "longer than the run: 2 s" in warning["message"]
    assert warning["warning"]
    assert run.records.index(warning) < min(
        index for index, record in enumerate(run.records) if record["kind"] == "step"
    )
    assert runs["short"].events("ExchangeTooLong") == []


def test_in_lock_step_no_step_begins_that_would_end_long_after_the_run(
    runs: dict[str, Simulated],
) -> None:
    """A step takes 3.5 s, most of it the exchange, as in a real run over slow links."""
    run = runs["long steps"]
    (stopped,) = run.events("TrainingStopped")
    why = r"maxSeconds 8 reached: after 7\.\d s, as a step takes 3\.5 s"
    assert re.fullmatch(why, stopped["message"])
    assert [len(run.steps[rank]) for rank in range(4)] == [2] * 4
    assert run.summary["time_s"] < 8
    assert run.summary["drift"]["max"] == 0.0


def test_a_run_is_as_long_as_its_last_step(runs: dict[str, Simulated]) -> None:
    """The slowest worker needs only its own step. The others no longer compute and wait for its
    gradient.
    """
    run = runs["far"]
    (stopped,) = run.events("TrainingStopped")
    last_s = max(step["time_s"] for steps in run.steps.values() for step in steps)
    assert last_s >= stopped["time_s"] + LATENCY_S
    assert run.summary["time_s"] == last_s
    assert max(record["time_s"] for record in run.records) == last_s
    finals = [r["time_s"] for r in run.records if r["kind"] == "evaluation" and r["final"]]
    assert finals == [last_s] * 4


def command_words(folder: Path, job: Path, environment: dict[str, Any], *flags: str) -> list[str]:
    """A command that simulates that job; its results are in `out` of that folder."""
    path = folder / "environment.yaml"
    path.write_text(yaml.safe_dump(environment))
    return [
        "simulate", str(job), "-e", str(path), *flags, "--out", str(folder / "out"), "--no-report",
    ]  # fmt: skip


def dlion(folder: Path, job: Path, environment: dict[str, Any], *flags: str) -> list[str]:
    return [sys.executable, "-m", "dlion_cli", *command_words(folder, job, environment, *flags)]


def no_worker_can_continue(folder: Path) -> list[str]:
    """Three workers return and wait for the fourth, which does not."""
    absences = [
        {"worker": rank, "leaves": {"seconds": 3}, "comes": {"seconds": 6}} for rank in range(3)
    ]
    environment = four_workers(absences=[*absences, {"worker": 3, "leaves": {"seconds": 3}}])
    flags = [
        word
        for path, value in settings({"maxSeconds": 600}).items()
        for word in ("--set", f"{path}={json.dumps(value)}")
    ]
    return command_words(folder, DIGITS, environment, *flags)


def with_program(
    folder: Path, out: Path, *, fails: bool, stop: Mapping[str, int] = TWO_STEPS
) -> list[str]:
    """A command for two workers; its results are in `out`."""
    job, program = folder / "job.yaml", blobs(folder)
    source = (folder / "program.py").read_text()
    if fails:
        (folder / "program.py").write_text(f"{source}\nraise ValueError('boom')\n")
    trainer = {"program": program, "stop": dict(stop)}
    job.write_text(yaml.safe_dump(job_document(2, trainer=trainer)))
    environment = {"name": "two", "workers": [{"count": 2, "cores": 4, "mbitPerS": 100}]}
    return [*command_words(folder, job, environment), "--out", str(out)]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EndedCommand]:
    folder = tmp_path_factory.mktemp("failures")
    names = ("stuck", "wrong", "right", "two", "brief")
    stuck, wrong, right, two, brief = (folder / name for name in names)
    for one in (stuck, wrong, right, two, brief):
        one.mkdir()
    environment = {"name": "two", "workers": [{"count": 2, "cores": 4, "mbitPerS": 100}]}
    commands = {
        "stuck": no_worker_can_continue(stuck),
        "two": command_words(two, DIGITS, environment),
        "wrong": with_program(wrong, wrong / "out", fails=True),
        "right": with_program(right, wrong / "out", fails=False),
        "brief": with_program(brief, brief / "out", fails=False, stop={"maxSeconds": 3}),
    }
    return run_commands(folder, commands)


def test_a_run_too_slow_to_learn_reports_the_speed_of_a_core(
    failures: dict[str, EndedCommand],
) -> None:
    """Otherwise it looks like a model that learns nothing."""
    assert failures["brief"].exit_code == ExitCode.OK
    assert "iterations: a core computes 10 samples/s here" in failures["brief"].stderr
    assert "calibrate" not in failures["right"].stderr


def test_a_run_without_possible_progress_has_not_succeeded(
    failures: dict[str, EndedCommand],
) -> None:
    assert failures["stuck"].exit_code == ExitCode.UNAVAILABLE
    message = " ".join(failures["stuck"].stderr.split())
    assert "no worker can continue after 6" in message
    assert "worker 0 waits for other workers" in message


def test_an_environment_that_contradicts_the_job_names_its_file(
    failures: dict[str, EndedCommand],
) -> None:
    assert failures["two"].exit_code == ExitCode.SPEC
    assert "examples/digits.yaml" in "".join(failures["two"].stderr.split())


def test_a_failure_before_the_first_step_leaves_no_folder(
    failures: dict[str, EndedCommand],
) -> None:
    """Therefore the corrected command may name the same folder."""
    assert failures["wrong"].exit_code == ExitCode.PROGRAM
    assert failures["right"].exit_code == ExitCode.OK, failures["right"].stderr


NAMED_AS_THEY_BEGIN = """
def nap(nap_s):
    with open({path!r}, "a") as begun:
        begun.write("a gradient\\n")
    time.sleep(float(nap_s))
    return np.float32(0)
"""


def test_an_interruption_waits_for_no_gradient_that_has_not_started(tmp_path: Path) -> None:
    """Eight gradients of 3 s each run one at a time; at most one more starts."""
    job, begun = tmp_path / "job.yaml", tmp_path / "begun"
    begun.touch()
    program = blobs(tmp_path, nap_s=3.0, more=NAMED_AS_THEY_BEGIN.format(path=str(begun)))
    trainer = {"program": program, "stop": {"maxSteps": 3}}
    job.write_text(yaml.safe_dump(job_document(8, trainer=trainer)))
    environment = {"name": "eight", "workers": [{"count": 8, "cores": 4, "mbitPerS": 100}]}
    command = dlion(tmp_path, job, environment, "--threads", "1")
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def count() -> int:
        return len(begun.read_text().splitlines())

    try:
        until_s = time.monotonic() + 120
        while not count():
            assert time.monotonic() < until_s
            assert run.poll() is None
            time.sleep(0.1)
        before = count()
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=120)
        assert run.returncode == ExitCode.INTERRUPTED
        assert count() <= before + 1 < 8
        assert "dlion: interrupted before the first step: nothing is kept" in error
        assert not (tmp_path / "out").exists()
    finally:
        run.kill()
        run.wait()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_an_interrupted_run_reports_this_and_what_it_has_kept(
    tmp_path: Path, number: signal.Signals
) -> None:
    job, out = tmp_path / "job.yaml", tmp_path / "out"
    program = blobs(tmp_path, nap_s=0.02)
    trainer = {"program": program, "stop": {"maxSteps": 100_000}}
    job.write_text(yaml.safe_dump(job_document(2, trainer=trainer)))
    environment = {"name": "two", "workers": [{"count": 2, "cores": 4, "mbitPerS": 100}]}
    before = signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # received also if all tests run under nohup
    run = subprocess.Popen(
        dlion(tmp_path, job, environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGHUP, before)
    try:
        until_s = time.monotonic() + 120
        while (
            not (out / "events.jsonl").exists()
            or '"step"' not in (out / "events.jsonl").read_text()
        ):
            assert time.monotonic() < until_s
            assert run.poll() is None
            time.sleep(0.1)
        run.send_signal(number)
        _, error = run.communicate(timeout=120)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == ExitCode.INTERRUPTED
    message = " ".join(error.split())
    assert "dlion: interrupted after" in message
    assert f"{out} holds the records and the summary until then" in message
    ending = json.loads((out / "summary.json").read_text())["ending"]
    assert ending["stop_reason"] == "interrupted"
    assert not ending["succeeded"]


def test_a_closed_pipe_ends_the_run_with_its_summary(tmp_path: Path) -> None:
    """As by `dlion simulate … | head -1`."""
    job, out = tmp_path / "job.yaml", tmp_path / "out"
    trainer = {"program": blobs(tmp_path), "stop": {"maxSteps": 5}}
    job.write_text(yaml.safe_dump(job_document(2, trainer=trainer)))
    environment = {"name": "two", "workers": [{"count": 2, "cores": 4, "mbitPerS": 100}]}
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup: it would go on without output
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            dlion(tmp_path, job, environment),
            stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=120,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGHUP, before)
        os.close(writer)
    assert ended.returncode == ExitCode.INTERRUPTED
    assert "dlion: interrupted after" in ended.stderr
    ending = json.loads((out / "summary.json").read_text())["ending"]
    assert ending["stop_reason"] == "interrupted"
