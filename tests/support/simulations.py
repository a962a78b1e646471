"""Simulated runs for tests: many in one separate process, as `dlion simulate` runs them.

The runs of one process load TensorFlow and trace its functions once. Results are read from each
run's result folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dlion_api.drift import DriftMeter
from dlion_api.protocol.progress import EvaluationRecord
from dlion_api.protocol.records import record_from_json
from process_starter import reported_cpu_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits.yaml"
DENSE = Path(__file__).with_name("dense.py")

_PROGRAM = """
import json, os, pathlib, sys
from dlion_cli.__main__ import main

answers = os.fdopen(os.dup(1), "w")

def one(words, folder):
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)

for line in sys.stdin:
    folder, words = json.loads(line)
    print(one(words, pathlib.Path(folder)), sum(os.times()[:4]), file=answers, flush=True)
"""


@dataclass(frozen=True)
class EndedCommand:
    """The result of a command."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Case:
    """One run of the quick start's job with the program `DENSE`.

    The environment's fields, settings, further flags.
    """

    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Simulated:
    """The result of one run."""

    summary: Mapping[str, Any]
    trace_hash: str
    records: Sequence[Mapping[str, Any]]
    exit_code: int
    steps: Mapping[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    """The steps of each rank, in order."""

    def events(self, reason: str) -> list[Mapping[str, Any]]:
        """Events of one reason, in order."""
        return [r for r in self.records if r["kind"] == "event" and r["reason"] == reason]

    def sent_bytes(self, sender: int, receiver: int, kind: str = "sent_bytes") -> int:
        """Sent bytes over the whole run, as far as they were reported."""
        return sum(
            r[kind]
            for r in self.records
            if r["kind"] == "link" and (r["rank"], r["peer"]) == (sender, receiver)
        )


def drift_over_time(run: Simulated) -> list[tuple[float, float]]:
    """Seconds, and the drift at that time."""
    meter = DriftMeter()
    evaluations = (record for record in run.records if record["kind"] == "evaluation")
    records = (record_from_json(json.dumps(one)) for one in evaluations)
    points = (meter.add(record) for record in records if isinstance(record, EvaluationRecord))
    return [point for point in points if point is not None]


def two_workers(folder: Path) -> str:
    """Write an environment of two equal workers into that folder; return the file."""
    file = folder / "two.yaml"
    workers = [{"count": 2, "cores": 2, "mbitPerS": 20}]
    file.write_text(yaml.safe_dump({"name": "two", "workers": workers}))
    return str(file)


def four_workers(**fields: Any) -> dict[str, Any]:
    """An environment of four equal workers, three at one site and one at another."""
    return {
        "name": "four",
        "workers": [{"count": 4, "cores": 4, "mbitPerS": 100}],
        "sites": [{"name": "a", "workers": 3}, {"name": "b", "workers": 1}],
        **fields,
    }


class _CommandProcess:
    """A process that runs commands of `dlion` in sequence. The first command starts it."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def run(self, folder: Path, words: Sequence[str]) -> EndedCommand:
        """Run that command in that folder; return its result."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                env=self._environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps((str(folder), words)), file=self._process.stdin, flush=True)
        answer = ""
        try:
            answer = self._process.stdout.readline()
            assert answer, f"the process has ended at {words}"
        finally:
            if not answer:  # after a test's time limit, the next test would read this answer
                self._process.kill()
                self.end()
        code, cpu_s = answer.split()
        reported_cpu_s[self._process.pid] = float(cpu_s)
        outputs = [(folder / name).read_text() for name in ("stdout", "stderr")]
        return EndedCommand(int(code), *outputs)

    def end(self) -> None:
        """Wait until it has ended."""
        if self._process is not None:
            self._process.communicate()
            reported_cpu_s.pop(self._process.pid, None)  # it is in the times of children now
            self._process = None


_shared: list[_CommandProcess] = []


@contextmanager
def one_process(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run all commands of the context in one process. `environment` has its variables, else the
    test's."""
    process = _CommandProcess(environment)
    _shared.append(process)
    try:
        yield
    finally:
        _shared.remove(process)
        process.end()


def run_commands(folder: Path, commands: Mapping[str, Sequence[str]]) -> dict[str, EndedCommand]:
    """Run commands of `dlion` in sequence, in one process other than the test's.

    Each has a folder of its name below `folder` for its files.
    """
    if not _shared:
        with one_process():
            return run_commands(folder, commands)
    return {name: _shared[-1].run(folder / name, words) for name, words in commands.items()}


def run_command(*words: str) -> EndedCommand:
    """Run one command of `dlion` in a process other than the test's."""
    with tempfile.TemporaryDirectory() as folder:
        return run_commands(Path(folder), {"only": words})["only"]


def simulate_all(folder: Path, cases: Mapping[str, Case]) -> dict[str, Simulated]:
    """Simulate them in sequence, in a process other than the test's."""
    commands = {
        name: ["simulate", *_arguments(folder / name, case)] for name, case in cases.items()
    }
    ended = run_commands(folder, commands)
    for name, one in ended.items():
        assert (folder / name / "out" / "summary.json").exists(), one.stderr[-4000:]
    return {name: _read(folder / name, ended[name].exit_code) for name in cases}


class SimulatedCases(dict[str, Simulated]):
    """Runs by their names, each simulated when a test first needs it."""

    def __init__(self, folder: Path, cases: Mapping[str, Case]) -> None:
        super().__init__()
        self._folder, self._cases = folder, cases

    def __missing__(self, name: str) -> Simulated:
        self.update(simulate_all(self._folder, {name: self._cases[name]}))
        return self[name]


def _arguments(folder: Path, case: Case) -> list[str]:
    folder.mkdir(parents=True)
    environment = folder / "environment-asked.yaml"
    environment.write_text(yaml.safe_dump(dict(case.environment)))
    job = Path(shutil.copy(DIGITS, folder))
    shutil.copy(DENSE, folder)  # a program is beside its manifest
    chosen = {"trainer.program": {"file": DENSE.name}, **case.settings}
    settings = [f"{path}={json.dumps(value)}" for path, value in chosen.items()]
    return [
        str(job), "-e", str(environment), "--out", str(folder / "out"), "-o", "json",
        "--no-report", *case.flags, *(word for one in settings for word in ("--set", one)),
    ]  # fmt: skip


def _read(folder: Path, exit_code: int) -> Simulated:
    out = folder / "out"
    records = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    steps: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record["kind"] == "step":
            steps[record["rank"]].append(record)
    return Simulated(
        json.loads((out / "summary.json").read_text()),
        json.loads((out / "simulation.json").read_text())["traceHash"],
        records,
        exit_code,
        steps,
    )
