"""Test workers that are drained, evicted or preempted (SIGTERM to the pod).

Such a worker ends in order within its grace period. Its exit code is never counted against its
restarts. It finishes its step and saves it at the keeper. The others discard no step, and none of
their iterations waits for it longer than for a lost worker. The drain costs them at most one
iteration, and its return another at most. Its next pod has empty folders, takes a peer's state and
trains. Workers that all failed continue from the keeper's checkpoints under a new coordinator, as
in the next attempt of a run.

Left out: the part of Kubernetes (tests/cluster), the rules (tests/unit/operator/test_run_ends.py).
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.protocol.progress import StepRecord
from dlion_api.spec.failures import end_of_exit
from iteration_losses import iteration_losses, lost_by_waiting
from local_run import UNTIL_THERE, blobs, job_document
from pod_run import PodRun, pod_run

BREAK = 5
DRAINED, STAYING = 2, (Rank(0), Rank(1))


def document(
    folder: Path, workers: int, steps: int = 100_000, more: str = "", **spec: object
) -> dict[str, object]:
    """Make iterations that take almost no CPU, and longer than a busy machine delays a process."""
    trainer = {"program": blobs(folder, nap_s=0.4, more=more), "stop": {"maxSteps": steps}}
    return job_document(
        workers, trainer=trainer, checkpoint={"everySeconds": 600}, runId="r1", **spec
    )


def start(run: PodRun, workers: int) -> None:
    run.start_keeper()
    for rank in range(workers):
        run.start_worker(rank)
    run.wait_until(
        lambda: all(len(run.steps(rank)) >= BREAK for rank in range(workers)), "training"
    )


def drain(run: PodRun, *ranks: int) -> float:
    """End a worker's processes as the kubelet ends pods, sidecars after trainers.

    Their folders are removed. Return the duration in seconds.
    """
    began_s = time.monotonic()
    trainers = [f"trainer-{rank}" for rank in ranks]
    assert run.end(*trainers) == dict.fromkeys(trainers, ExitCode.INTERRUPTED), run.story()
    took_s = time.monotonic() - began_s
    run.end(*(f"sidecar-{rank}" for rank in ranks))
    for rank in ranks:
        run.lose_worker(rank)
    return took_s


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["adaptive", pytest.param("full", marks=pytest.mark.slow)])
def test_a_drained_worker_costs_the_others_at_most_one_iteration(
    tmp_path: Path, policy: str
) -> None:
    subnet = 61 if policy == "full" else 62
    job = document(tmp_path, 3, exchange={"policy": policy})
    with pod_run(tmp_path, job, subnet=subnet) as run:
        start(run, 3)
        at = max(step.iteration for step in run.steps(DRAINED))
        took_s = drain(run, DRAINED)
        assert took_s < 20, "of a grace period of 30 s"
        last = run.steps(DRAINED)[-1]
        assert last.iteration >= at
        assert (run.results / f"state/w{DRAINED}/checkpoint.npz").exists(), "saved at its end"
        gone_at = max(step.iteration for step in run.steps(0))
        run.wait_until(lambda: len(run.steps(0)) >= gone_at + BREAK, "the others train on")
        drained = lost_by_waiting(run.records(), staying=STAYING)

        run.start_worker(DRAINED)
        run.wait_until(lambda: run.steps(DRAINED)[-1].incarnation > last.incarnation, "it is back")
        again = next(s for s in run.steps(DRAINED) if s.incarnation > last.incarnation)
        run.wait_until(lambda: run.steps(0)[-1].iteration >= again.iteration + BREAK, "all three")
        both = lost_by_waiting(run.records(), staying=STAYING)
        losses = iteration_losses(run.records(), killed=[Rank(DRAINED)])
        rejoined = [event.rank for event in run.events("WorkerRejoined")]
        failed = run.events("WorkerFailed")
    print(f"{policy}: ended {took_s:.1f} s after SIGTERM behind iteration {last.iteration}")
    print(f"back at {again.iteration}; waited for longer than allowed: {drained}, then {both}")
    for rank, loss in losses.items():
        print(f"worker {rank}: median {loss.median_s:.3f} s, longest {loss.longest_s:.3f} s")
        assert not loss.discarded, loss
    assert len(drained) <= 1, drained
    assert len(both) <= 2, both
    assert rejoined == [DRAINED]
    assert not failed
    assert end_of_exit(ExitCode.INTERRUPTED) is None, "not an end that a rule counts"


@pytest.mark.timeout(300)
def test_the_next_attempt_continues_from_the_keepers_checkpoints(tmp_path: Path) -> None:
    """The coordinator asks the surviving worker to end; the next attempt has a new coordinator."""
    steps, continued = 150, tmp_path / "continued"
    more = UNTIL_THERE.format(path=str(continued))
    job = document(tmp_path, 2, steps, more, maxRestarts=0, exchange={"policy": "full"})
    job["spec"]["checkpoint"] = {"everySeconds": 1}  # type: ignore[index]
    with pod_run(tmp_path, job, subnet=63) as run:
        start(run, 2)
        run.wait_until(
            lambda: all((run.results / f"state/w{r}/checkpoint.npz").exists() for r in range(2)),
            "checkpoints",
        )
        run.end("trainer-1", number=signal.SIGKILL)  # its container, as after an out-of-memory kill
        run.stop("g-1 failed for good, and failurePolicy is Fail")
        assert run.wait("trainer-0") == ExitCode.OK, run.story()
        run.end("sidecar-0", "sidecar-1")
        # The coordinator has all that its workers have reported, the keeper maybe a little later.
        reported = [each for each in run.progress_records if isinstance(each, StepRecord)]
        reached = max(step.iteration for step in reported)
        assert reached < steps
        continued.touch()
        for rank in range(2):
            run.lose_worker(rank)
        run.coordinator.close()
        run.start_coordinator()
        for rank in range(2):
            run.start_worker(rank)
        codes = {name: run.wait(name) for name in ("trainer-0", "trainer-1")}
        assert set(codes.values()) == {ExitCode.OK}, run.story()
        run.run_is_over(f"maxSteps {steps} reached", succeeded=True)
        run.wait_until((run.results / "summary.json").exists, "a summary")
        first = {}
        for step in run.steps():
            first.setdefault((step.rank, step.incarnation), step.iteration)
        again = [iteration for (rank, _), iteration in first.items() if iteration > 1]
        print(f"ended behind iteration {reached}, continued at {again}")
        assert again
        assert max(again) == reached + 1
        assert run.summary()["ending"]["succeeded"]
