"""Test workers that are lost, added and removed during training, with real pods.

A killed trainer (by a signal, or by the kernel for lack of memory), a deleted and an evicted pod
make the job Degraded. Each causes an event at most a minute old (the same event is not repeated
sooner). The job then trains with all workers again. No index fails for good, and an eviction is not
counted. A group grows from two workers to four and shrinks to two, each with its share of the
batch. The other workers discard no iteration. No iteration exceeds twice the median by waiting for
removed workers, and at most one for each new worker: two at once may delay them for a moment
(docs/faults.md). Only waits in the records count, since computing depends on the quota and the
machine. The test prints a table of the times and waits.

Left out: pods that never start, a program that ends for good, too little memory to start
(test_training), a node without power (test_training_on_a_dead_node).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cause_places import evict
from dlion_api.names import Rank
from dlion_api.protocol.progress import ProgressRecord, StepRecord
from dlion_operator.apply.event_recorder import REPEAT_AFTER_S
from dlion_results.run_folder.events import read_events
from gitops.agreement import agree
from gitops.documents import DEGRADED
from iteration_losses import iteration_losses, lost_by_waiting
from trained_jobs import (
    degraded,
    eventually,
    fetched,
    iteration,
    manifest,
    status_of,
    wait_until_trains,
)

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
KILL = (
    "import os, signal; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit()"
    " and b'dlion_worker.trainer' in open(f'/proc/{p}/cmdline','rb').read()"
    " and p != '1' and int(p) != os.getpid()]"
)
FILL = """
import os, time
def trains(pid):
    try:
        return b"dlion_worker.trainer" in open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        return False
others = [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())]
(pid,) = filter(trains, others)
open(f"/proc/{pid}/oom_score_adj", "w").write("1000")
while trains(pid):
    done, write = os.pipe()
    if not os.fork():
        held = b"x" * (64 << 20)
        os.write(write, b".")
        while trains(pid):
            time.sleep(0.05)
        os._exit(0)
    os.close(write)
    os.read(done, 1)
    os.close(done)
"""
"""Allocate the container's memory in many small processes until the kernel kills the trainer: among
processes of equal scores it chooses the largest."""
INDEX = "batch.kubernetes.io/job-completion-index"
CAME = 2
"""New workers in the growing group."""


def pod_of(kubectl: Kubectl, index: int) -> str:
    """Return the name of that worker's pod."""
    pods = kubectl.get("pods", "-l", f"dlion.dev/group=a,{INDEX}={index}")["items"]
    (name,) = [p["metadata"]["name"] for p in pods if p["status"]["phase"] == "Running"]
    return str(name)


def kill_process(kubectl: Kubectl) -> None:
    pod = pod_of(kubectl, 0)
    kubectl.run("exec", pod, "-c", "trainer", "--", "python3", "-c", KILL)


def take_its_memory(kubectl: Kubectl) -> None:
    pod = pod_of(kubectl, 0)
    kubectl.run("exec", pod, "-c", "trainer", "--", "python3", "-c", FILL)


def delete_pod(kubectl: Kubectl) -> None:
    kubectl.run("delete", "pod", pod_of(kubectl, 0), "--wait=false")


def evict_pod(kubectl: Kubectl) -> None:
    evict(kubectl, pod_of(kubectl, 0))


LOSSES: dict[str, Callable[[Kubectl], None]] = {
    "process killed": kill_process,
    "killed for want of memory": take_its_memory,
    "pod deleted": delete_pod,
    "pod evicted": evict_pod,
}


def scale(kubectl: Kubectl, workers: int) -> float:
    """Scale the group; return the seconds until this many workers train."""
    path = "/spec/sites/0/groups/0/workers"
    patch = [{"op": "replace", "path": path, "value": workers}]
    began_s = time.monotonic()
    kubectl.run("patch", "dlj", "digits", "--type=json", "-p", json.dumps(patch))

    def trains() -> bool:
        status = status_of(kubectl)
        return (status["readyWorkers"], status["state"]) == (f"{workers}/{workers}", "Training")

    eventually(trains, within_s=180, what=f"training with {workers} workers")
    return time.monotonic() - began_s


def train_on(kubectl: Kubectl) -> int:
    """Return after several more iterations, with the first of them."""
    before = iteration(kubectl)
    eventually(lambda: iteration(kubectl) >= before + 10, what="iterations")
    return before


def has_event(kubectl: Kubectl, reason: str, since: datetime) -> bool:
    """Report whether an event of that reason has been posted since then."""
    events = kubectl.get("events", "--field-selector", f"reason={reason}")["items"]
    return any(datetime.fromisoformat(each["lastTimestamp"]) >= since for each in events)


def failures(kubectl: Kubectl) -> int:
    """Return how often the worker of index 0 has failed according to its Job."""
    annotations = kubectl.get("pod", pod_of(kubectl, 0))["metadata"]["annotations"]
    return int(annotations["batch.kubernetes.io/job-index-failure-count"])


def test_workers_are_lost_added_and_removed_during_training(
    restricted: Kubectl, tmp_path: Path
) -> None:
    kubectl = restricted
    document = manifest({"a": 400}, workers=2)
    document["spec"]["trainer"] |= {
        "stop": {"maxSeconds": 3000},
        "evaluation": {"everySamples": 100_000},
    }
    # An iteration takes many periods of the quota, so that one period does not matter.
    document["spec"]["batching"]["globalBatchSize"] = {"initial": 4800, "max": 4800}
    kubectl.apply(document)
    wait_until_trains(kubectl)
    print("\n| what happens | Degraded after | all train again after |\n|---|---|---|")
    for name, lose in LOSSES.items():
        charged = failures(kubectl)
        began, began_s = datetime.now(UTC), time.monotonic()
        lose(kubectl)
        agree(eventually(lambda: degraded(kubectl), what=f"Degraded, {name}"), DEGRADED)
        degraded_s = time.monotonic() - began_s
        wait_until_trains(kubectl)
        print(f"| {name} | {degraded_s:.0f} s | {time.monotonic() - began_s:.0f} s |")
        for reason in ("PeersLost", "Training"):
            is_posted = partial(
                has_event, kubectl, reason, began - timedelta(seconds=REPEAT_AFTER_S)
            )
            eventually(is_posted, what=f"an event {reason}, {name}")
        if name == "pod evicted":
            assert failures(kubectl) == charged
    assert has_event(kubectl, "PeerLost", began - timedelta(seconds=3600))
    scaled_at = train_on(kubectl)
    print(f"| 2 to 4 workers | | {scale(kubectl, 4):.0f} s |")
    grown_at = train_on(kubectl) + 5
    shrunk_at = iteration(kubectl)
    print(f"| 4 to 2 workers | | {scale(kubectl, 2):.0f} s |")
    train_on(kubectl)
    (job,) = kubectl.get("jobs")["items"]
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (2, 2)
    assert not job["status"].get("failedIndexes")
    recorded = list(read_events(fetched(kubectl, tmp_path / "all", "--all") / "events.jsonl"))
    assert_shares(recorded, grown_at)
    assert_none_lost(recorded, scaled_at, shrunk_at)
    kubectl.run("delete", "dlj", "digits", "--wait=true")
    eventually(lambda: not kubectl.get("pods")["items"], within_s=90, what="no pod")


def assert_none_lost(recorded: list[ProgressRecord], scaled_at: int, shrunk_at: int) -> None:
    """Check that worker 1 discarded nothing, and worker 0 nothing during the scaling.

    No worker waited an iteration's time for removed workers, and at most once for each new one.
    """
    judged = [each for each in recorded if each.rank == 1 or each.iteration > scaled_at]
    losses = iteration_losses(judged, killed=[Rank(2), Rank(3)])
    for rank, loss in losses.items():
        assert loss.discarded == ()
        print(
            f"worker {rank}: {loss.iterations} iterations, none discarded, {len(loss.slow)} longer"
            f" than twice the median of {loss.median_s:.2f} s"
        )
    scaled = [each for each in recorded if each.iteration > scaled_at]
    lost_s = lost_by_waiting(scaled, staying=[Rank(0), Rank(1)])
    print(f"seconds of waiting for more than an iteration's time, by iteration: {lost_s}")
    assert not {each for each in lost_s if each > shrunk_at}
    assert len(lost_s) <= CAME


def assert_shares(recorded: list[ProgressRecord], iteration: int) -> None:
    """Check that four equal workers shared the batch from about that iteration on."""
    shares: dict[int, dict[Rank, float]] = {}
    for each in recorded:
        if isinstance(each, StepRecord) and each.iteration >= iteration:
            share = each.local_batch_size / each.global_batch_size
            shares.setdefault(each.iteration, {})[each.rank] = share
    together = [each for each in shares.values() if sorted(each) == [0, 1, 2, 3]]
    assert together, sorted(shares)
    assert max(together[-1].values()) < 0.5
