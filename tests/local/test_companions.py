"""Test the restarts of sidecars and of the shared evaluator.

A killed process is reported and restarted after a growing wait. Training continues, and evaluations
resume. A process that ends repeatedly is given up, with the reason, unless it ran for a minute in
between. The sidecar of a worker that has ended is not restarted.

Left out: what a sidecar restores after a restart (test_sidecar).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
import yaml

from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord
from dlion_local.emulation.emulation import LINKS_MEASURED_ONCE_NOTE
from dlion_local.runner.auxiliary_processes import (
    FIRST_WAIT_S,
    HEALTHY_S,
    MAX_RESTARTS,
    MAX_WAIT_S,
    AuxiliaryProcess,
    AuxiliaryProcesses,
)
from dlion_local.runner.processes import ProcessGroup
from local_run import LocalRun, command_line, job_document
from shell_children import SHELL, shell_group


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroup]:
    with closing(shell_group(tmp_path_factory.mktemp("kept"))) as group:
        group.preload()
        yield group


class Kept:
    """Real auxiliary processes on a clock that the test sets."""

    def __init__(self, group: ProcessGroup) -> None:
        self.reports: list[tuple[Rank, str, str]] = []
        self.group = group
        self.companions = AuxiliaryProcesses(group, lambda *words: self.reports.append(words))
        start = partial(group.fork, "sidecar-1", SHELL, ["exec sleep 60"])
        self.companions.start(AuxiliaryProcess("sidecar-1", "SidecarEnded", start, Rank(1)), 0.0)
        self.now_s = 0.0

    def kill(self) -> None:
        self.group.kill("sidecar-1")
        while self.group.running():
            time.sleep(0.01)

    def wait_s(self) -> float | None:
        """Return the wait until the restart, in steps of a quarter of a second, or None if there is
        none.
        """
        began_s = self.now_s
        while not self.group.running():
            if self.now_s > began_s + 2 * MAX_WAIT_S:
                return None
            self.now_s += 0.25
            self.companions.poll(self.now_s, {Rank(1)})
        return self.now_s - began_s


def test_waits_grow_until_a_process_is_given_up(group: ProcessGroup) -> None:
    kept = Kept(group)
    waits = []
    for _ in range(MAX_RESTARTS):
        kept.kill()
        assert kept.companions.poll(kept.now_s, {Rank(1)}) == ""
        waits.append(kept.wait_s())
    assert waits == [min(MAX_WAIT_S, FIRST_WAIT_S * 2**n) for n in range(MAX_RESTARTS)]
    kept.kill()
    lost = kept.companions.poll(kept.now_s, {Rank(1)})
    assert "the sidecar of worker 1 ended with signal 9 (SIGKILL)" in lost
    assert "sidecar-1.log" in lost
    assert kept.wait_s() is None
    assert [(rank, reason) for rank, reason, _ in kept.reports] == [(1, "SidecarEnded")] * 6


def test_a_minute_of_health_resets_the_count(group: ProcessGroup) -> None:
    kept = Kept(group)
    for _ in range(MAX_RESTARTS + 1):
        kept.kill()
        assert kept.companions.poll(kept.now_s, {Rank(1)}) == ""
        kept.wait_s()
        kept.now_s += HEALTHY_S
    kept.kill()
    assert kept.companions.poll(kept.now_s, {Rank(1)}) == ""


def test_the_sidecar_of_an_ended_worker_is_not_restarted(group: ProcessGroup) -> None:
    kept = Kept(group)
    kept.kill()
    assert kept.companions.poll(0.0, {Rank(0)}) == ""
    assert kept.reports == []


def pid_of(run: LocalRun, module: str, worker: int) -> int | None:
    """Return the process of `python -m module` with that worker's configuration."""
    for pid in run.left_behind():
        try:
            words = command_line(pid)
        except OSError:
            continue
        if module in words and any(f"/w{worker}/config.json" in word for word in words):
            return pid
    return None


def niceness(run: LocalRun, module: str) -> set[int]:
    """Return the values of all threads, those of TensorFlow's pools among them."""
    found = []
    for task in Path(f"/proc/{pid_of(run, module, 0)}/task").iterdir():
        with suppress(ProcessLookupError):  # a thread may end meanwhile
            found.append(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    assert len(found) > 1
    return {*found}


def kill(run: LocalRun, module: str, worker: int) -> int:
    pid = pid_of(run, module, worker)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.timeout(300)
def test_a_continuous_run_survives_a_killed_sidecar_and_evaluator(
    tmp_path: Path,
) -> None:
    """The result of a continuous run that is stopped counts as complete. It states the requested
    environment, the means, and the achieved values.
    """
    environment = {
        "name": "slow", "coreScale": 0.3, "workers": [{"count": 2, "cores": 1, "mbitPerS": 50}],
        "changes": [{"at": {"seconds": 1}, "mbitPerS": [50, 20]}],
    }  # fmt: skip
    path = tmp_path / "environment.yaml"
    path.write_text(yaml.safe_dump(environment))
    trainer = {"evaluation": {"everySamples": 200}, "stop": {"continuous": True}}
    job = job_document(2, trainer=trainer)
    with LocalRun(tmp_path, job, "--environment", str(path), "--unprivileged") as run:

        def evaluations() -> int:
            return sum(isinstance(r, EvaluationRecord) for r in run.records())

        run.wait_until(lambda: evaluations() > 1, "the evaluator judges")
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert niceness(run, "dlion_worker.evaluator") == {min(19, own + 5)}
        killed = kill(run, "dlion_worker.evaluator", 0), kill(run, "dlion_worker.sidecar", 1)
        run.wait_until(lambda: run.events("SidecarEnded", 1), "the sidecar's end is reported")
        run.wait_until(lambda: run.events("EvaluatorEnded"), "the evaluator's end is reported")
        run.wait_until(
            lambda: pid_of(run, "dlion_worker.sidecar", 1) not in (None, killed[1]), "a new sidecar"
        )
        before = evaluations()
        run.wait_until(lambda: evaluations() > before + 1, "evaluations come again")
        run.end(signal.SIGINT)
        run.assert_nothing_left()
    assert run.process.returncode == 130, run.terminal()
    assert all("SIGKILL" in e.message and e.warning for e in run.events("SidecarEnded"))
    (changed,) = run.events("EnvironmentChanged")
    assert (changed.rank, "uplink 50 to 20 Mbit/s" in changed.message) == (1, True)
    summary = run.summary()
    assert summary["ending"]["succeeded"]
    assert summary["ending"]["stop_reason"] == "stopped by a signal"
    found = yaml.safe_load((run.folder / "environment.yaml").read_text())
    assert found == summary["environment"]
    (alike,) = found["document"]["workers"]
    assert (alike["count"], alike["cores"], alike["mbitPerS"]) == (2, 1, 50)
    assert found["notes"] == [
        "links: relay (requested to run without root's features)",
        "CPU: dutyCycle (requested to run without root's features)",
        LINKS_MEASURED_ONCE_NOTE,
    ]
    measured = {f["quantity"] for f in found["figures"] if f["measured"] is not None}
    assert measured == {"link rate", "CPU quota"}
