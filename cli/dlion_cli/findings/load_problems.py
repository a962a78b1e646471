"""Problems that the load of a job's workers shows, from their sidecars' metrics. Pure."""

from collections.abc import Iterator
from typing import Final

from dlion_cli.findings.job_problem import JobProblem, JobScope, Severity
from dlion_cli.views.worker_load import SILENT_AFTER_S, JobLoad, SiteLoad, WorkerLoad

THROTTLED_FRACTION: Final = 0.25
PRESSURE_FRACTION: Final = 0.5
LOST_FRACTION: Final = 0.02
"""A full link of 5 to 50 Mbit/s loses up to 1 % with CUBIC (measured). BBR loses more than this
where the queue is short: then the queue is what to mend."""
MIN_LOST_SEGMENTS: Final = 10.0
"""A connection to a peer that is gone repeats three within two seconds, by TCP's growing pauses."""

_CAUSES_OF_LOSS: Final = (
    "cables, radio, MTU, a policer, or a full queue (where hosts use BBR, make it longer)"
)


def load_problems(job: JobLoad, scope: JobScope) -> Iterator[JobProblem]:
    """The problems that the load of the workers and of their links shows."""
    lossy = [site for site in job.sites if _loses_packets(site)]
    known = [site for site in job.sites if site.retransmitted_fraction is not None]
    for load in job.workers:
        if (load.silent_seconds or 0.0) > SILENT_AFTER_S:
            yield JobProblem(
                Severity.ERROR,
                "TrainerHung",
                f"pod/{load.pod}",
                f"its trainer hangs: the process has not answered for {load.silent_seconds:.0f} s",
                "See what holds it (stopped by a signal, swapping, a dead disk or device); its pod "
                "is replaced if you delete it",
                scope.command(f"kubectl delete pod {load.pod}"),
            )
        for reason, message, advice in _causes_of_slowness(load):
            yield _warning(reason, f"pod/{load.pod}", message, advice, scope)
        # Where links to other sites are good, the pod loses packets on the path to the lossy one.
        if _loses_packets(load) and not 0 < len(lossy) < len(known):
            message = f"its links lose packets: {_lost(load)}"
            advice = f"Check the links from its node: {_CAUSES_OF_LOSS}"
            yield _warning("PacketsLost", f"pod/{load.pod}", message, advice, scope)
    for site in lossy:
        message = f"the links to it lose packets: {_lost(site)}"
        advice = f"Check the path to that site: {_CAUSES_OF_LOSS}"
        yield _warning("PacketsLost", f"site/{site.site}", message, advice, scope)


def _warning(reason: str, about: str, message: str, advice: str, scope: JobScope) -> JobProblem:
    command = scope.command(f"dlion top {scope.name}")
    return JobProblem(Severity.WARNING, reason, about, message, advice, command)


def _causes_of_slowness(load: WorkerLoad) -> Iterator[tuple[str, str, str]]:
    """Reason, message and advice of each."""
    held = load.throttled_fraction or 0.0
    if held >= THROTTLED_FRACTION:
        quota = "" if load.quota_cores is None else f" of {load.quota_cores:g} cores"
        yield (
            "CpuThrottled",
            f"its CPU quota{quota} withholds {_percent(held)} of the CPU time it wants",
            "Raise limits.cpu in the group's resources, or remove that limit",
        )
    pressure = load.memory_pressure_fraction or 0.0
    if pressure >= PRESSURE_FRACTION:
        yield (
            "MemoryPressure",
            f"tasks on its node waited for memory {_percent(pressure)} of the last 10 s",
            "Free memory on the node, or raise requests.memory so that less is placed there",
        )
    pressure = load.io_pressure_fraction or 0.0
    if pressure >= PRESSURE_FRACTION:
        yield (
            "DiskSlow",
            f"tasks on its node waited for the disk {_percent(pressure)} of the last 10 s",
            (
                "See what writes there, and the disk's health; write less often: "
                "checkpoint.everySeconds"
            ),
        )


def _loses_packets(load: WorkerLoad | SiteLoad) -> bool:
    fraction = load.retransmitted_fraction or 0.0
    return fraction >= LOST_FRACTION and fraction * (load.sent_segments or 0.0) >= MIN_LOST_SEGMENTS


def _lost(load: WorkerLoad | SiteLoad) -> str:
    return f"{_percent(load.retransmitted_fraction or 0.0)} of the TCP segments repeat lost ones"


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.3g} %"
