"""What it takes from `kubectl apply` to each worker's first step, on this machine's clock.

Pods of a testbed share the machine's monotonic clock; that a run's records count from is in what a
worker keeps of its membership, and how long imports and the first trace took in its trainer's log.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trained_jobs import records

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.kubectl import Kubectl

KEPT_MEMBERSHIP = "/var/lib/dlion/worker/membership.json"
WORKERS = "app.kubernetes.io/component=worker"


@dataclass(frozen=True)
class Start:
    """Of one worker."""

    pod: str
    rank: int
    imports_s: float
    trace_s: float
    zero_s: float
    """Of the run's records, on the monotonic clock."""

    def first_step_s(self, results: Path) -> float:
        """On the monotonic clock, by the fetched records."""
        own = [each for each in records(results, "step") if each["rank"] == self.rank]
        return self.zero_s + min(float(each["time_s"]) for each in own)


def starts_of(kubectl: Kubectl, job: str) -> list[Start]:
    """Of all workers of a job that trains, in the order of their ranks."""
    chosen = f"dlion.dev/job-name={job},{WORKERS}"
    pods = kubectl.get("pods", "-l", chosen)["items"]
    return sorted((_start(kubectl, pod["metadata"]["name"]) for pod in pods), key=_rank)


def _rank(start: Start) -> int:
    return start.rank


def _start(kubectl: Kubectl, pod: str) -> Start:
    said = kubectl.run("logs", pod, "-c", "trainer")
    kept = kubectl.run("exec", pod, "-c", "trainer", "--", "cat", KEPT_MEMBERSHIP)
    (rank,) = re.findall(r"worker \S+ of \S+, rank (\d+)", said)
    return Start(
        pod=pod,
        rank=int(rank),
        imports_s=_seconds(said, "imports"),
        trace_s=_seconds(said, "first trace"),
        zero_s=float(json.loads(kept)["start_time_monotonic_s"]),
    )


def _seconds(said: str, what: str) -> float:
    """Of the first trainer there."""
    found: list[Any] = re.findall(rf"{what} took (\d+\.\d) s", said)
    return float(found[0])


def report_starts(starts: list[Start], results: Path, applied_s: float) -> float:
    """Prints a row for each worker; the longest time to a first step less imports and trace."""
    print("\n| worker | imports | first trace | first step after apply | less both |")
    print("|---|---|---|---|---|")
    rests = []
    for start in starts:
        whole_s = start.first_step_s(results) - applied_s
        rests.append(whole_s - start.imports_s - start.trace_s)
        print(
            f"| {start.pod} | {start.imports_s:.1f} s | {start.trace_s:.1f} s | {whole_s:.1f} s "
            f"| {rests[-1]:.1f} s |"
        )
    return max(rests)
