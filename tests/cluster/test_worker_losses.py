"""Workers that are lost, come and go while a job trains, by real pods.

Proves: a killed trainer, a deleted and an evicted pod make the job Degraded, with an event, and it
trains with all again by itself, no index failed for good; a group grows from two workers to four
and shrinks to two, each with its share of the batch; the worker that was there all the time lost no
iteration by any of it. Prints a table of how long each took. Left out: pods that never start, a
program that ends for good, want of memory (test_training), a node without power
(test_training_on_a_dead_node).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.names import Rank
from dlion_api.progress import ProgressRecord, StepRecord
from dlion_worker.results.events import read_events
from dlion_worker.results.faults import iteration_losses
from gitops.agreement import agree
from gitops.documents import DEGRADED
from trained_jobs import (
    eventually,
    fetched,
    iteration,
    manifest,
    status_of,
    wait_until_trains,
)

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(900)]
KILL = (
    "import os, signal; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit()"
    " and b'dlion_worker.trainer' in open(f'/proc/{p}/cmdline','rb').read()"
    " and p != '1' and int(p) != os.getpid()]"
)
INDEX = "batch.kubernetes.io/job-completion-index"


def pod_of(kubectl: Kubectl, index: int) -> str:
    """The name of that worker's pod."""
    pods = kubectl.get("pods", "-l", f"dlion.dev/group=a,{INDEX}={index}")["items"]
    (name,) = [p["metadata"]["name"] for p in pods if p["status"]["phase"] == "Running"]
    return str(name)


def kill_process(kubectl: Kubectl) -> None:
    pod = pod_of(kubectl, 0)
    kubectl.run("exec", pod, "-c", "trainer", "--", "python3", "-c", KILL)


def delete_pod(kubectl: Kubectl) -> None:
    kubectl.run("delete", "pod", pod_of(kubectl, 0), "--wait=false")


def evict_pod(kubectl: Kubectl) -> None:
    """As a drain of its node asks for it."""
    name = pod_of(kubectl, 0)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": kubectl.namespace},
    }
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{name}/eviction"
    kubectl.run("create", "--raw", path, "-f", "-", text=json.dumps(eviction))


LOSSES: dict[str, Callable[[Kubectl], None]] = {
    "process killed": kill_process,
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


def degraded(kubectl: Kubectl) -> dict[str, Any] | None:
    """The job, while its status calls it Degraded."""
    document = kubectl.get("dlj", "digits")
    return document if document["status"].get("state") == "Degraded" else None


def test_workers_are_lost_come_and_go_while_a_job_trains(
    restricted: Kubectl, tmp_path: Path
) -> None:
    kubectl = restricted
    document = manifest({"a": 400}, workers=2)
    document["spec"]["trainer"]["stop"] = {"maxSeconds": 3000}
    kubectl.apply(document)
    wait_until_trains(kubectl)
    print("\n| what happens | Degraded after | all train again after |\n|---|---|---|")
    for name, lose in LOSSES.items():
        began_s = time.monotonic()
        lose(kubectl)
        agree(eventually(lambda: degraded(kubectl), what=f"Degraded, {name}"), DEGRADED)
        degraded_s = time.monotonic() - began_s
        wait_until_trains(kubectl)
        print(f"| {name} | {degraded_s:.0f} s | {time.monotonic() - began_s:.0f} s |")
    reasons = {each["reason"] for each in kubectl.get("events")["items"]}
    assert {"PeerLost", "PeersLost", "Training"} <= reasons
    scaled_at = train_on(kubectl)
    print(f"| 2 to 4 workers | | {scale(kubectl, 4):.0f} s |")
    grown_at = train_on(kubectl) + 5
    print(f"| 4 to 2 workers | | {scale(kubectl, 2):.0f} s |")
    train_on(kubectl)
    (job,) = kubectl.get("jobs")["items"]
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (2, 2)
    assert not job["status"].get("failedIndexes")
    recorded = list(read_events(fetched(kubectl, tmp_path / "all", "--all") / "events.jsonl"))
    assert_shares(recorded, grown_at)
    judged = [each for each in recorded if each.rank == 1 or each.iteration > scaled_at]
    losses = iteration_losses(judged, killed=[Rank(2), Rank(3)])
    for rank, loss in losses.items():
        assert loss.discarded == ()
        print(
            f"worker {rank}: {loss.iterations} iterations, none discarded, {len(loss.slow)} longer"
            f" than twice the median of {loss.median_s:.2f} s"
        )
    kubectl.run("delete", "dlj", "digits", "--wait=true")
    eventually(lambda: not kubectl.get("pods")["items"], within_s=90, what="no pod")


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
