"""Workers that are lost, come and go while a job trains, by real pods.

Proves: a killed trainer (by a signal, or by the kernel for want of memory), a deleted and an
evicted pod make the job Degraded, each with an event not older than a minute (the same is not told
again sooner), and it trains with all again by itself, no index failed for good, an eviction not
counted against it; a group grows from two workers to four and shrinks to two, each with its share
of the batch: those who were there before throw no iteration away; none becomes longer than
twice the median by waiting for those who go, and for each who comes one at most: two at once may
hold them for a moment (docs/faults.md). (By waiting alone, as the records tell it: how long
computing takes is the quota's and the machine's business.) Prints a table of how long each took,
and what they waited. Left out: pods that never start, a program that ends for good, too little
memory to start (test_training), a node without power (test_training_on_a_dead_node).
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
    told, tells = os.pipe()
    if not os.fork():
        held = b"x" * (64 << 20)
        os.write(tells, b".")
        while trains(pid):
            time.sleep(0.05)
        os._exit(0)
    os.close(tells)
    os.read(told, 1)
    os.close(told)
"""
"""Takes what memory the container may have until the kernel has killed the trainer for it: by many
small processes, as among those whose scores are alike it chooses the largest."""
INDEX = "batch.kubernetes.io/job-completion-index"
CAME = 2
"""Workers, in the growing group."""


def pod_of(kubectl: Kubectl, index: int) -> str:
    """The name of that worker's pod."""
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
    """Another count of the group; seconds until as many train."""
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
    """Returns after some more iterations; the one that it began with."""
    before = iteration(kubectl)
    eventually(lambda: iteration(kubectl) >= before + 10, what="iterations")
    return before


def is_told(kubectl: Kubectl, reason: str, since: datetime) -> bool:
    """Whether an event of that reason has been posted since then."""
    events = kubectl.get("events", "--field-selector", f"reason={reason}")["items"]
    return any(datetime.fromisoformat(each["lastTimestamp"]) >= since for each in events)


def failures(kubectl: Kubectl) -> int:
    """How often the worker of index 0 has failed in the eyes of its Job."""
    annotations = kubectl.get("pod", pod_of(kubectl, 0))["metadata"]["annotations"]
    return int(annotations["batch.kubernetes.io/job-index-failure-count"])


def test_workers_are_lost_come_and_go_while_a_job_trains(
    restricted: Kubectl, tmp_path: Path
) -> None:
    kubectl = restricted
    document = manifest({"a": 400}, workers=2)
    document["spec"]["trainer"] |= {
        "stop": {"maxSeconds": 3000},
        "evaluation": {"everySamples": 100_000},
    }
    # Iterations of many of the quota's periods: one period more or less is not an iteration then.
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
            told = partial(is_told, kubectl, reason, began - timedelta(seconds=REPEAT_AFTER_S))
            eventually(told, what=f"an event {reason}, {name}")
        if name == "pod evicted":
            assert failures(kubectl) == charged
    assert is_told(kubectl, "PeerLost", began - timedelta(seconds=3600))
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
    """Worker 1 threw nothing away by all of it, nor did worker 0 by coming and going of others;
    nobody waited an iteration's time for those who went, and for each who came at most once."""
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
    """From about that iteration on four equal workers shared the batch, once all had come in."""
    shares: dict[int, dict[Rank, float]] = {}
    for each in recorded:
        if isinstance(each, StepRecord) and each.iteration >= iteration:
            share = each.local_batch_size / each.global_batch_size
            shares.setdefault(each.iteration, {})[each.rank] = share
    together = [each for each in shares.values() if sorted(each) == [0, 1, 2, 3]]
    assert together, sorted(shares)
    assert max(together[-1].values()) < 0.5
