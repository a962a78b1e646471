"""Test workers and keeper that start as in pods, by `dlion_worker.pod`, and train.

The keeper has every record once, the checkpoints, the model and a summary with the result of the
run. Suspended workers (SIGTERM) restart with empty folders, wait for the keeper, and continue from
its checkpoints. Their steps equal those of a run without a break. The exception is a worker whose
peer made the last update, which takes that update over. A keeper that is killed and restarted has
every record once.

A group grows from two workers to four and shrinks to two again during training. A new worker takes
a state and a share of the batch, a removed one returns its share, and the others lose no iteration.
Pods that are asked to end do so in time. A pod that the manifest lacks states what to change.

Processes, coordinator, mutual TLS and files are real, on loopback. Left out: containers and
Kubernetes (tests/cluster), hostile callers of a keeper (test_keeper), several sites.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from dlion_api import cluster_names as names
from dlion_api.endings import EndReport
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.protocol.provenance import PROVENANCE_FILE
from iteration_losses import iteration_losses, lost_by_waiting
from local_run import blobs, hashes, job_document
from pod_run import PodRun, pod_run

STEPS, BREAK = 40, 10
BOTH = ("trainer-0", "trainer-1")
MAX_WAIT_S = 1.0
"""Maximum wait of an iteration while others start or leave; usually it takes a fifth of a second.
On a busy machine it may be longer, but not as long as half of a pod's start there."""
MAX_END_S = 25.0
"""The kubelet kills a pod that ends later than 30 s after SIGTERM."""


def document(steps: int = STEPS, **spec: object) -> dict[str, object]:
    """Return a job of two workers in lock step, with checkpoints every second."""
    return job_document(
        2, trainer={"stop": {"maxSteps": steps}}, checkpoint={"everySeconds": 1}, runId="r1", **spec
    )


def growing_document(folder: Path, **spec: object) -> dict[str, object]:
    """Return a job of two workers at first, with a global batch of 64 samples.

    Iterations of a fifth of a second take almost no CPU, so that a busy machine delays few of them.
    """
    batching = {
        "policy": "even", "globalBatchSize": {"initial": 64, "max": 64, "growth": False}
    }  # fmt: skip
    trainer = {"program": blobs(folder, nap_s=0.2), "stop": {"maxSteps": 100_000}}
    return job_document(
        2, trainer=trainer, checkpoint={"everySeconds": 1}, runId="r1", batching=batching, **spec
    )


def start_all(run: PodRun) -> None:
    run.start_keeper()
    for rank in range(2):
        run.start_worker(rank)


def finish(run: PodRun) -> None:
    """Wait for the workers' end and for the keeper's summary of it."""
    assert {name: run.wait(name) for name in BOTH} == dict.fromkeys(BOTH, 0), run.story()
    run.run_is_over("maxSteps", succeeded=True)
    run.wait_until((run.results / "summary.json").exists, "a summary")


def assert_once(run: PodRun) -> None:
    """Check that no record is missing or duplicated."""
    made = Counter((step.rank, step.iteration) for step in run.steps())
    assert set(made.values()) == {1}
    for rank in range(2):
        iterations = [step.iteration for step in run.steps(rank)]
        assert iterations == list(range(iterations[0], iterations[0] + len(iterations)))


@pytest.mark.timeout(300)
def test_a_suspended_run_continues_from_the_keepers_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    with pod_run(tmp_path / "whole", document(), subnet=1) as whole:
        start_all(whole)
        whole.wait_until(lambda: len(whole.steps()) >= BREAK, "some steps")
        whole.end("keeper", number=signal.SIGKILL)
        whole.start_keeper()
        for rank in range(2):  # as the kubelet creates it
            (whole.root(f"w{rank}") / "dev").mkdir()
            (whole.root(f"w{rank}") / "dev/termination-log").write_text("an earlier message")
        finish(whole)
        assert_once(whole)
        saved, other = (
            EndReport.from_json((whole.root(f"w{rank}") / "dev/termination-log").read_text())
            for rank in range(2)
        )
        assert saved == EndReport(f"maxSteps {STEPS} reached", STEPS, ranks=(Rank(0), Rank(1)))
        assert other == EndReport(f"maxSteps {STEPS} reached", STEPS), "no model is saved"
        expected, whole_story = hashes(whole.steps()), whole.story()
        assert max(expected) == STEPS
        summary = whole.summary()
        assert summary["ending"]["succeeded"]
        assert summary["steps"] == 2 * STEPS
        assert json.loads((whole.results / "keeper.json").read_text())["sequence"] > 2 * STEPS
        assert [model["site"] for model in summary["models"]] == ["plant-a"]
        model = whole.results / "models/plant-a/model.keras"
        assert (
            model.read_bytes()
            == (
                next(whole.folder.glob("w*/var/lib/dlion/results/models/plant-a/model.keras"))
            ).read_bytes()
        )
        assert "payloadType" in model.with_name(PROVENANCE_FILE).read_text(), "the keeper signs"
        began_s = time.monotonic()
        assert whole.end("keeper") == {"keeper": ExitCode.OK}
        assert time.monotonic() - began_s < 5

    (tmp_path / "broken").mkdir()
    with pod_run(tmp_path / "broken", document(), subnet=2) as run:
        start_all(run)
        run.wait_until(lambda: all(len(run.steps(rank)) >= BREAK for rank in range(2)), "the break")
        began_s = time.monotonic()
        codes = run.end(*BOTH)
        took_s = time.monotonic() - began_s
        assert codes == dict.fromkeys(BOTH, ExitCode.INTERRUPTED), run.story()
        assert took_s < 25
        run.end("sidecar-0", "sidecar-1")
        broken_at = max(step.iteration for step in run.steps())
        assert broken_at < STEPS
        run.end("keeper", number=signal.SIGKILL)
        for rank in range(2):
            run.lose_worker(rank)
            run.start_worker(rank)
        for rank in range(2):
            run.wait_until(lambda: "waits for its checkpoint" in run.log(f"trainer-{rank}"), "that")  # noqa: B023
        run.start_keeper()
        finish(run)
        assert len(run.events("Resumed")) == len(run.events("KeeperAway")) == 2, run.story()
        made = [(step.rank, step.iteration) for step in run.steps()]
        assert len(made) == len(set(made))
        steps = [*whole.steps(), *run.steps()]
        assert {step.local_batch_size for step in steps} == {16}, run.story()
        for iteration, known in hashes(run.steps()).items():
            stories = f"unbroken:\n{whole_story}\nsuspended:\n{run.story()}"
            assert known.items() <= expected[iteration].items(), f"{iteration} differs. {stories}"
        # A worker whose peer made the last update before the break takes that update over.
        left_out = {(rank, i) for rank in range(2) for i in range(1, STEPS + 1)} - set(made)
        assert {iteration for _, iteration in left_out} <= {broken_at}
        print(f"ended {took_s:.1f} s after SIGTERM, continued after iteration {broken_at}")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_keeper_has_every_record_once(tmp_path: Path) -> None:
    with pod_run(tmp_path, document(), subnet=3) as run:
        start_all(run)
        run.wait_until(lambda: len(run.steps()) >= BREAK, "some steps")
        run.end("keeper", number=signal.SIGKILL)
        run.start_keeper()
        finish(run)
        assert_once(run)
        assert run.summary()["steps"] == 2 * STEPS
        assert json.loads((run.results / "keeper.json").read_text())["sequence"] > 2 * STEPS


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("policy", "max_s"),
    # Under adaptive the others wait at the end of a round for the first step of a new worker.
    [("full", MAX_WAIT_S), pytest.param("adaptive", 3 * MAX_WAIT_S, marks=pytest.mark.slow)],
)
def test_a_group_grows_and_shrinks_while_it_trains(
    tmp_path: Path, policy: str, max_s: float
) -> None:
    """The new pods get a manifest with two workers, as the others.

    An iteration is lost if it is discarded, or if it waits for a pod that starts, which takes
    seconds. The slow tests compare shorter waits with the median (test_worker_losses).
    """
    spec = growing_document(tmp_path, exchange={"policy": policy})
    with pod_run(tmp_path, spec, subnet=7) as run:
        run.start_keeper()
        for rank in range(2):
            run.start_worker(rank)
        run.wait_until(lambda: all(len(run.steps(rank)) >= BREAK for rank in range(2)), "training")
        run.scale(range(4))
        began_s = time.monotonic()
        for rank in (2, 3):
            run.start_worker(rank)
        run.wait_until(lambda: any(map(run.steps, (2, 3))), "a new worker trains")
        start_s = time.monotonic() - began_s
        run.wait_until(lambda: all(len(run.steps(rank)) >= BREAK for rank in range(4)), "all four")
        grown_at = max(step.iteration for step in run.steps())
        run.wait_until(lambda: len(run.steps(0)) > grown_at, "a step of four")
        run.scale(range(2))
        leaving = ("trainer-2", "trainer-3")
        codes = run.end(*leaving)
        assert codes == dict.fromkeys(leaving, ExitCode.INTERRUPTED), run.story()
        run.end("sidecar-2", "sidecar-3")
        shrunk_at = max(step.iteration for step in run.steps())
        run.wait_until(lambda: len(run.steps(0)) >= shrunk_at + BREAK, "training on")
        run.stop("enough")
        assert {name: run.wait(name) for name in BOTH} == dict.fromkeys(BOTH, 0), run.story()
        run.run_is_over("enough", succeeded=True)
        run.wait_until((run.results / "summary.json").exists, "a summary")
        assert_once(run)
        batches = {(s.rank, s.iteration): s.local_batch_size for s in run.steps()}
        assert [batches[rank, grown_at] for rank in range(4)] == [16] * 4
        assert [batches[rank, shrunk_at + BREAK] for rank in range(2)] == [32] * 2
        losses = iteration_losses(run.records(), killed=[Rank(2), Rank(3)])
        assert [loss.discarded for loss in losses.values()] == [(), ()]
        waited_s = lost_by_waiting(run.records(), staying=[Rank(0), Rank(1)])
        print(f"start of a pod: {start_s:.1f} s, waits: {waited_s}")
        assert max(waited_s.values(), default=0.0) < max(max_s, start_s / 2), waited_s
        names_of = {w["rank"]: w["name"] for w in run.summary()["workers"]}
        assert names_of == {rank: f"plant-a/g-{rank}" for rank in range(4)}
        for rank, loss in losses.items():
            print(f"worker {rank}: median {loss.median_s:.3f} s, longest {loss.longest_s:.3f} s,"
                  f" {len(loss.slow)} of {loss.iterations} iterations slow")  # fmt: skip


def test_a_pod_outside_the_manifest_names_the_change(tmp_path: Path) -> None:
    with pod_run(tmp_path, document(exchange={"policy": "hop"}), subnet=4) as run:
        worker = run.job.workers()[1]
        root = run.prepare("w1", worker)
        run._start(
            "extra",
            "trainer",
            root,
            {names.GROUP_VARIABLE: "g", names.INDEX_VARIABLE: "2", names.POD_IP_VARIABLE: "::1"},
        )
        assert run.wait("extra") == ExitCode.SPEC
        assert "the manifest has 2 workers in group g of site plant-a" in run.log("extra")
        assert "allowed: 0 to 1" in run.log("extra")


@pytest.mark.parametrize(
    "role", ["trainer", *(pytest.param(r, marks=pytest.mark.slow) for r in ("sidecar", "keeper"))]
)
def test_a_waiting_pod_that_is_asked_to_end_ends(tmp_path: Path, role: str) -> None:
    """No call is answered: the coordinator is gone before the pods start."""
    with pod_run(tmp_path, document(), subnet=5) as run:
        run.coordinator.close()
        root = run.prepare("w0", run.job.workers()[0])
        variables = {
            names.GROUP_VARIABLE: "g",
            names.INDEX_VARIABLE: "0",
            names.POD_IP_VARIABLE: run.address(1),
        }
        run._start("it", role, root, variables)
        run.wait_until(lambda: "no certificate yet" in run.log("it"), "it waits")
        began_s = time.monotonic()
        codes = run.end("it")
        wanted = ExitCode.INTERRUPTED if role == "trainer" else ExitCode.OK
        assert codes["it"] == wanted, run.log("it")
        assert time.monotonic() - began_s < MAX_END_S


@pytest.mark.root
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ["trainer", "sidecar", "keeper"])
def test_pid_1_receives_a_signal_from_before_its_handlers(
    tmp_path: Path, role: str, times: int
) -> None:
    """The kernel drops a signal that PID 1 does not handle, so it is blocked until then. The signal
    is sent as soon as Python runs.
    """
    with pod_run(tmp_path, document(), subnet=6) as run:
        run.coordinator.close()
        root = run.prepare("w0", run.job.workers()[0])
        variables = {
            names.GROUP_VARIABLE: "g",
            names.INDEX_VARIABLE: "0",
            names.POD_IP_VARIABLE: run.address(1),
        }
        for _ in range(times):
            run._start("it", role, root, variables, enter=["unshare", "--pid", "--fork"])
            os.kill(first_python(run.processes["it"].pid), signal.SIGTERM)
            code = run.wait("it", 60)
            assert code == (ExitCode.INTERRUPTED if role == "trainer" else ExitCode.OK)


def first_python(parent: int) -> int:
    """Return the only child of that process once it runs Python; poll without pauses."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for pid in children.read_text().split():
            if Path(f"/proc/{pid}/exe").readlink().name.startswith("python"):
                return int(pid)
    raise AssertionError(f"process {parent} never started a Python")
