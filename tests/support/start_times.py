"""The time from `kubectl apply` to each worker's first step, on this machine's clock.

Pods of a testbed share the machine's monotonic clock. The zero of a run's records is in each
worker's stored membership. The times of imports and of the first trace are in its trainer's log.
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
    """The start of one worker."""

    pod: str
    rank: int
    imports_s: float
    trace_s: float
    zero_s: float
    """The zero of the run's records, on the monotonic clock."""

    def first_step_s(self, results: Path) -> float:
        """The time of the first step on the monotonic clock, from the fetched records."""
        own = [each for each in records(results, "step") if each["rank"] == self.rank]
        return self.zero_s + min(float(each["time_s"]) for each in own)


def starts_of(kubectl: Kubectl, job: str) -> list[Start]:
    """The starts of all workers of a job that trains, in the order of their ranks."""
    chosen = f"dlion.dev/job-name={job},{WORKERS}"
    pods = kubectl.get("pods", "-l", chosen)["items"]
    return sorted((_start(kubectl, pod["metadata"]["name"]) for pod in pods), key=_rank)


def _rank(start: Start) -> int:
    return start.rank


def _start(kubectl: Kubectl, pod: str) -> Start:
    log = kubectl.run("logs", pod, "-c", "trainer")
    kept = kubectl.run("exec", pod, "-c", "trainer", "--", "cat", KEPT_MEMBERSHIP)
    (rank,) = re.findall(r"worker \S+ of \S+, rank (\d+)", log)
    return Start(
        pod=pod,
        rank=int(rank),
        imports_s=_seconds(log, "imports"),
        trace_s=_seconds(log, "first trace"),
        zero_s=float(json.loads(kept)["start_time_monotonic_s"]),
    )


def _seconds(log: str, what: str) -> float:
    """The duration in the first trainer's log."""
    found: list[Any] = re.findall(rf"{what} took (\d+\.\d) s", log)
    return float(found[0])


def report_starts(starts: list[Start], results: Path, applied_s: float) -> float:
    """Print a row for each worker, and the longest time to a first step without imports and
    trace."""
    print("\n| worker | imports | first trace | first step after apply | without both |")
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
