"""A real `dlion run` for tests: started, watched through its result folder, and checked at its end.

Every process of the run has a mark in its environment, so that any leftover process is found. Its
temporary files go to its own folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import yaml

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.protocol.progress import EventRecord, ProgressRecord, StepRecord
from dlion_api.protocol.records import record_from_json
from dlion_local.emulation.compute.quotas import find_controller
from process_starter import RUN, RUN_MARK, ForkedProgram, start

LONG_S = 100.0 * float(os.environ.get("DLION_TEST_PATIENCE", "1"))

BLOBS = '''
"""Three blobs of points: learned in a moment. A step takes NAP_S of waiting, not of computing, an
evaluation of a batch EVALUATION_NAP_S."""
import time

import keras
import numpy as np
import tensorflow as tf

NAP_S, EVALUATION_NAP_S = {nap_s}, {evaluation_nap_s}


@keras.saving.register_keras_serializable("tests")
class Nap(keras.layers.Layer):
    def call(self, x, training=False):
        nap_s = NAP_S if training else EVALUATION_NAP_S
        if not nap_s:
            return x
        napped = tf.numpy_function(nap, [nap_s], tf.float32, stateful=True)
        with tf.control_dependencies([napped]):
            return tf.identity(x)


def nap(nap_s):
    time.sleep(float(nap_s))
    return np.float32(0)


def build_model():
    layers = [keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu")]
    return keras.Sequential([*layers, Nap(), keras.layers.Dense(3)])


def load_data(split, site, worker_index):
    chance = np.random.default_rng([len(split), sum(site.encode()), worker_index])
    y = chance.integers(0, 3, 240)
    return (chance.normal(0, 1, (240, 8)) + 2 * y[:, None]).astype(np.float32), y
{more}
'''

UNTIL_THERE = """
import os


def nap(nap_s):
    time.sleep(0.0 if os.path.exists({path!r}) else float(nap_s))
    return np.float32(0)
"""
"""More code for `blobs`: sleeps until that file exists. This keeps the rest of the run short."""

MUCH_TO_EVALUATE = """
_load = load_data


def load_data(split, site, worker_index):
    x, y = _load(split, site, worker_index)
    return (x, y) if split == "train" else (np.tile(x, (10, 1)), np.tile(y, 10))
"""
"""More code for `blobs`: an evaluation has ten batches and pauses, so a test can act during it."""

IMPATIENT = """
from dlion_worker.trainer import peer_selection

peer_selection.MIN_PATIENCE_S = 10.0
"""
"""More code for `blobs`: a worker that has ended waits this long for a peer without a link, not
three times as long."""


def job_document(workers: int | dict[str, int] = 3, **spec: Any) -> dict[str, Any]:
    """A small job with one site, or the given sites; keywords are fields of `spec`.

    `trainer` is merged into the defaults: the digits, whole float32 gradients, in lock step.
    """
    sites = {"plant-a": workers} if isinstance(workers, int) else workers
    trainer = {
        "program": {"builtin": "digits"},
        "optimizer": {"name": "sgd", "learningRate": 0.05, "momentum": 0.9},
        "evaluation": {"everySamples": 1_000_000},
        "hashWeights": True,
        "stop": {"maxSteps": 20},
        **spec.pop("trainer", {}),
    }
    if "builtin" in trainer["program"]:
        trainer.setdefault("dataset", {"name": "digits"})
    return {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": "test"},
        "spec": {
            "sites": [
                {"name": name, "groups": [{"name": "g", "workers": count}]}
                for name, count in sites.items()
            ],
            "trainer": trainer,
            "batching": {
                "policy": "even",
                "globalBatchSize": {"initial": 32, "max": 32, "growth": False},
            },
            "exchange": {"policy": "full", "codec": "float32"},
            "synchronization": {"mode": "synchronous"},
            "knowledgeTransfer": {"policy": "none"},
            **spec,
        },
    }


def blobs(
    folder: Path, *, nap_s: float = 0.02, evaluation_nap_s: float = 0.0, more: str = ""
) -> dict[str, str]:
    """A `trainer.program` with a tiny model; `more` is code appended to replace parts of it."""
    path = folder / "program.py"
    path.write_text(BLOBS.format(nap_s=nap_s, evaluation_nap_s=evaluation_nap_s, more=more))
    return {"file": str(path)}


def blobs_in_a_cluster(nap_s: float, *, more: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """A ConfigMap with such a program, and the `trainer.program` that names it."""
    text = BLOBS.format(nap_s=nap_s, evaluation_nap_s=0.0, more=more)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "blobs"},
        "data": {"job.py": text},
    }
    return config_map, {"configMap": {"name": "blobs", "key": "job.py"}}


class LocalRun:
    """One `dlion run`; a context that kills what is left at its end."""

    def __init__(
        self,
        folder: Path,
        document: dict[str, Any] | None,
        *flags: str,
        stdout: Path | None = None,
        report: bool = False,
        by_itself: bool = False,
    ) -> None:
        """`folder` gets the manifest and the result folder; if None, the existing manifest is used.

        `stdout` is a file or terminal for the output; then `terminal()` is standard error only.
        `report` writes report.html, which takes a second of CPU. `by_itself` starts it as users do,
        so that it imports everything (else `process_starter`); this takes five seconds of CPU.
        """
        self.folder = folder / "out"
        self._mark = uuid.uuid4().hex
        self._records: list[ProgressRecord] = []
        self._read_bytes = 0
        self._temporary = tempfile.TemporaryDirectory(prefix="dlt-")
        manifest = folder / "job.yaml"
        if document is not None:
            manifest.write_text(yaml.safe_dump(document))
        where = [] if "--resume" in flags else ["--out", str(self.folder)]
        arguments = ["run", str(manifest), *where, *flags, *([] if report else ["--no-report"])]
        environment = {**os.environ, RUN_MARK: self._mark, "TMPDIR": self._temporary.name}
        self._log = folder / "terminal"
        self._log.write_bytes(b"")
        self.process: subprocess.Popen[bytes] | ForkedProgram
        if not by_itself:
            self.process = start(RUN, arguments, environment, self._log, stdout)
            return
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", RUN, *arguments],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.left_behind():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._temporary.cleanup()

    # ---- output and records ----------------------------------------------------------------------

    def terminal(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def worker_log(self, rank: int) -> str:
        """The log of a worker's supervisor and trainers."""
        path = self.folder / "logs" / f"worker-{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def records(self) -> list[ProgressRecord]:
        """All records so far; each line is read once."""
        path = self.folder / "events.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                lines, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes += len(lines) + len(newline)
            for line in lines.splitlines():
                with contextlib.suppress(ContractError):  # cut off by a kill or a full disk
                    self._records.append(record_from_json(line))
        return list(self._records)

    def events(self, reason: str, rank: int | None = None) -> list[EventRecord]:
        """Events of that reason, of one worker or all."""
        return [
            record
            for record in self.records()
            if isinstance(record, EventRecord)
            and record.reason == reason
            and rank in (None, record.rank)
        ]

    def steps(self, rank: int | None = None) -> list[StepRecord]:
        """Iterations, of one worker or all."""
        return [
            record
            for record in self.records()
            if isinstance(record, StepRecord) and rank in (None, record.rank)
        ]

    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        content: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return content

    # ---- actions ---------------------------------------------------------------------------------

    def trainer_pids(self, rank: int) -> list[int]:
        """The pids of all trainers that the worker's supervisor has started, in order."""
        lines = (line for line in self.worker_log(rank).splitlines() if line.startswith("{"))
        events = (json.loads(line) for line in lines)
        return [event["pid"] for event in events if event.get("supervisor") == "started"]

    def kill_trainer(self, rank: int) -> None:
        """Send SIGKILL to the worker's present trainer."""
        os.kill(self.trainer_pids(rank)[-1], signal.SIGKILL)

    def wait_until(self, holds: Callable[[], object], what: str, within_s: float = LONG_S) -> None:
        """Wait until the condition holds; fail on a time-out or if the run ends before."""
        deadline_s = time.monotonic() + within_s
        while not holds():
            ended = self.process.poll() is not None and not holds()
            assert not ended, f"ended before: {what}\n{self._story()}"
            assert time.monotonic() < deadline_s, f"timed out: {what}\n{self._story()}"
            time.sleep(0.05)

    def wait_for_step(self, iteration: int, within_s: float = LONG_S) -> None:
        """Wait until all workers that have stepped are past that iteration."""

        def passed() -> bool:
            last = {step.rank: step.iteration for step in self.steps()}
            return bool(last) and min(last.values()) >= iteration

        self.wait_until(passed, f"iteration {iteration}", within_s)

    def end(self, number: signal.Signals) -> float:
        """Send the command a signal; return the seconds until all its processes are gone."""
        began_s = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(timeout=LONG_S)
        while self.left_behind() and time.monotonic() < began_s + 30:
            time.sleep(0.02)
        return time.monotonic() - began_s

    def finish(self, within_s: float = LONG_S) -> int:
        """Wait for the end; return the exit code. Fails if anything is left behind."""
        try:
            code = self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end\n{self._story()}") from None
        self.assert_nothing_left()
        return code

    def assert_nothing_left(self) -> None:
        """Assert that no process, temporary file, network namespace or control group is left, and
        no key is among the results."""
        assert not self.left_behind()
        assert not list(Path(self._temporary.name).iterdir())
        assert not list(self.folder.rglob("credentials.json"))
        assert not self.namespaces()
        assert not self.control_groups()

    def namespaces(self) -> list[str]:
        """Existing network namespaces of this run."""
        return self._named_in(Path("/run/netns"))

    def control_groups(self) -> list[str]:
        """Existing control groups of this run."""
        try:
            return self._named_in(find_controller().parent)
        except UnavailableError:
            return []

    def modules(self) -> set[str]:
        """The modules that processes of this run are started as (`dlion_worker.trainer`)."""
        found = set()
        for pid in self.left_behind():
            with contextlib.suppress(OSError):
                found |= {word for word in command_line(pid) if word.startswith("dlion_")}
        return found

    def stopped(self) -> list[int]:
        """Processes of this run that are stopped (SIGSTOP)."""
        them = []
        for pid in self.left_behind():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
                if stat.rpartition(")")[2].split()[0] == "T":
                    them.append(pid)
        return them

    def left_behind(self) -> list[int]:
        """Processes of this run that still exist."""
        return list(self._marked())

    def _named_in(self, folder: Path) -> list[str]:
        names = [entry.name for entry in folder.iterdir()] if folder.exists() else []
        return [name for name in names if f"dlion-{self.process.pid}-" in name]

    def _marked(self) -> Iterator[int]:
        wanted = f"{RUN_MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)

    def _story(self) -> str:
        logs = sorted((self.folder / "logs").glob("worker-*.log"))
        ends = [f"{log.name}: ...{log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join([self.terminal()[-3000:], *ends])


def run_command(
    folder: Path, *arguments: str, within_s: float = LONG_S
) -> subprocess.CompletedProcess[str]:
    """`dlion` with these arguments, forked like a `LocalRun`. `folder` is for its output."""
    stdout, stderr = (folder / f"{name}-of-{arguments[0]}" for name in ("stdout", "stderr"))
    for path in (stdout, stderr):
        path.write_bytes(b"")
    environment = {RUN_MARK: uuid.uuid4().hex, **os.environ}
    code = start(RUN, arguments, environment, stderr, stdout).wait(within_s)
    return subprocess.CompletedProcess(arguments, code, stdout.read_text(), stderr.read_text())


def command_line(pid: int) -> list[str]:
    """Return the process's arguments, or the words of its title; raises OSError if it has ended."""
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").split()


def hashes(steps: list[StepRecord]) -> dict[int, dict[int, str]]:
    """The hash of the weights by iteration and rank."""
    known: dict[int, dict[int, str]] = {}
    for step in steps:
        known.setdefault(step.iteration, {})[step.rank] = step.weights_hash
    return known
