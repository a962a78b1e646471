"""What the load of a job's workers tells is wrong, from their sidecars' metrics. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from dlion_cli.findings.job_problem import JobProblem, JobScope, Severity
from dlion_cli.views.worker_load import SILENT_AFTER_S, WorkerLoad

THROTTLED_FRACTION: Final = 0.25
PRESSURE_FRACTION: Final = 0.5
LOST_FRACTION: Final = 0.01
"""Congestion alone makes TCP send less than this again."""
MIN_LOST_SEGMENTS: Final = 3.0
"""Fewer lost segments may be chance."""


def load_problems(loads: Sequence[WorkerLoad], scope: JobScope) -> Iterator[JobProblem]:
    """The problems that the load of each worker shows."""
    for load in loads:
        yield from _of_worker(load, scope)


def _of_worker(load: WorkerLoad, scope: JobScope) -> Iterator[JobProblem]:
    def problem(severity: Severity, reason: str, message: str, advice: str, command: str
                ) -> JobProblem:  # fmt: skip
        about = f"pod/{load.pod}"
        return JobProblem(severity, reason, about, message, advice, scope.command(command))

    if (load.silent_seconds or 0.0) > SILENT_AFTER_S:
        yield problem(
            Severity.ERROR, "TrainerHung",
            f"its trainer hangs: the process has not answered for {load.silent_seconds:.0f} s",
            "See what holds it (stopped by a signal, swapping, a dead disk or device); its pod is "
            "replaced if you delete it",
            f"kubectl delete pod {load.pod}",
        )  # fmt: skip
    if (load.throttled_fraction or 0.0) >= THROTTLED_FRACTION:
        quota = "" if load.quota_cores is None else f" of {load.quota_cores:g} cores"
        yield problem(
            Severity.WARNING, "CpuThrottled",
            f"its CPU quota{quota} holds the trainer {_percent(load.throttled_fraction)} of the "
            "time",
            "Raise limits.cpu in the group's resources, or remove that limit",
            f"dlion top {scope.name}",
        )  # fmt: skip
    if (load.memory_pressure_fraction or 0.0) >= PRESSURE_FRACTION:
        yield problem(
            Severity.WARNING, "MemoryPressure",
            f"tasks on its node waited for memory {_percent(load.memory_pressure_fraction)} of the "
            "last 10 s",
            "Free memory on the node, or raise requests.memory so that less is placed there",
            f"dlion top {scope.name}",
        )  # fmt: skip
    if (load.io_pressure_fraction or 0.0) >= PRESSURE_FRACTION:
        yield problem(
            Severity.WARNING, "DiskSlow",
            f"tasks on its node waited for the disk {_percent(load.io_pressure_fraction)} of the "
            "last 10 s",
            "See what writes there, and the disk's health; checkpoint.everySeconds writes less "
            "often",
            f"dlion top {scope.name}",
        )  # fmt: skip
    lost = load.retransmitted_fraction or 0.0
    if lost >= LOST_FRACTION and lost * (load.sent_segments or 0.0) >= MIN_LOST_SEGMENTS:
        yield problem(
            Severity.WARNING, "PacketsLost",
            f"its links lose packets: {_percent(lost)} of its TCP segments were sent again",
            "Check the links from its node: cables, radio, MTU, a full queue or a policer",
            f"dlion top {scope.name}",
        )  # fmt: skip


def _percent(fraction: float | None) -> str:
    """A share of at most all; counters of several processors may grow faster than time."""
    return f"{min(1.0, fraction or 0.0) * 100:.3g} %"
