"""Replaces all machines of an environment by one with their total cores and no network.

`dlion compare` uses it as the reference column.
"""

from typing import Any

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.model import Environment
from dlion_environments.plan import Plan


def single_machine_document(environment: Environment, *, duration_s: float) -> dict[str, Any]:
    """An environment document with one worker that always has the cores of all present workers.

    Follows changes of cores, and workers that leave and come. Stragglers are ignored: one machine
    does not wait for others. Raises SpecError if the environment is invalid for a run of
    `duration_s` seconds.
    """
    plan = environment.plan(_workers(environment), None, duration_s=duration_s)
    times = {0.0, *(change.time_s for change in plan.changes)}
    for absence in plan.absences:
        times |= {at for at in (absence.leaves_s, absence.comes_s) if at is not None}
    cores = [_cores(plan, 0.0)]
    changes = []
    for at_s in sorted(time_s for time_s in times if 0 < time_s < duration_s):
        there = _cores(plan, at_s)
        if there not in (
            0.0,
            cores[-1],
        ):  # without any worker present keep the last value, as a machine needs cores
            changes.append({"at": {"seconds": at_s}, "cores": [there]})
            cores.append(there)
    return {
        "name": f"{environment.name[:56]}-as-one",
        "workers": [{"cores": cores[0]}],
        "samplesPerSPerCore": environment.samples_per_s_per_core,
        **({"changes": changes} if changes else {}),
    }


def _workers(environment: Environment) -> tuple[WorkerIdentity, ...]:
    sites = [site.name for site in environment.sites for _ in range(site.workers)]
    return tuple(
        WorkerIdentity(Rank(rank), SiteName(sites[rank] if sites else "all"), "all", rank)
        for rank in range(environment.worker_count)
    )


def _cores(plan: Plan, time_s: float) -> float:
    """Total cores of the workers present at that time."""
    away = {
        absence.rank
        for absence in plan.absences
        if (absence.leaves_s or 0.0) <= time_s
        and (absence.comes_s is None or time_s < absence.comes_s)
    }
    workers = [worker for worker in plan.at(time_s).workers if worker.rank not in away]
    return sum(worker.quota_cores or 0.0 for worker in workers)
