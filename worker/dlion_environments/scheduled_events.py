"""Packet loss, stragglers, absences, temperatures and other work of an environment.

Only the simulator supports them; on real processes they are rejected, each by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dlion_api.errors import Problem
from dlion_api.names import Rank
from dlion_api.spec import Job
from dlion_environments.plan import Absence, CoLocatedDemand, HardwareThrottle, Straggler, Thermals
from dlion_environments.times import seconds_of

if TYPE_CHECKING:
    from dlion_environments.model import Environment, EnvironmentThermals, EnvironmentTime

ADVICE_ABSENCE = "Take it out, or end and restart the worker by hand."
ADVICE_DEMAND = "Take it out: on a real machine other work takes what it does."
ADVICE_LOSS = "Take it out, or give the rate that the loss leaves (docs/simulating.md)."
ADVICE_THERMALS = "Take it out: a real machine has a temperature of its own."
ADVICE_RADIO = "Take radio and tracks out, and give the rates of workers in changes."
ADVICE_STRAGGLER = "Take it out, or lower the worker's cores in changes."


def late_problems(environment: Environment, job: Job, source: str) -> Iterable[Problem]:
    """Workers that come late to a run that would wait for them."""
    spec = job.spec
    late = {f"absences[{i}]": a.worker for i, a in enumerate(environment.absences) if not a.leaves}
    sites = {worker.site for worker in job.workers() if worker.rank not in late.values()}
    for path, rank in late.items():
        if spec.start_deadline_seconds is None:
            yield Problem(
                path=path,
                message=f"{source} has no startDeadlineSeconds: its run does not begin before "
                f"worker {rank} has come",
                allowed="workers that are there at the start",
                advice="Set startDeadlineSeconds, or give leaves as well.",
            )
        elif len(sites) < spec.min_sites:
            yield Problem(
                path=path,
                message=f"{source} does not begin with fewer than {spec.min_sites} sites "
                "(minSites)",
                value=f"{len(sites)} sites at the start",
                advice="Lower minSites, or let a worker of another site be there.",
            )


def simulator_only_problems(environment: Environment) -> Iterable[Problem]:
    """Parts of the file that cannot be emulated with real processes."""
    unsupported = [
        *((f"absences[{i}]", ADVICE_ABSENCE) for i in range(len(environment.absences))),
        *((f"stragglers[{i}]", ADVICE_STRAGGLER) for i in range(len(environment.stragglers))),
        *((path, ADVICE_LOSS) for path in _paths_of_loss(environment)),
        *((f"workers[{i}].thermals", ADVICE_THERMALS) for i, _ in _thermals(environment)),
        *(
            (f"workers[{i}].demand", ADVICE_DEMAND)
            for i, machine in enumerate(environment.workers)
            if machine.demand is not None
        ),
        *((("radio", ADVICE_RADIO),) if environment.radio is not None else ()),
    ]
    for path, advice in unsupported:
        yield Problem(
            path=path,
            message="is for `dlion simulate` only: `dlion run` cannot impose it",
            advice=advice,
        )


def _thermals(environment: Environment) -> Iterable[tuple[int, EnvironmentThermals]]:
    """Index and thermals of each machine that has any."""
    for index, machine in enumerate(environment.workers):
        if machine.thermals is not None:
            yield index, machine.thermals


def _paths_of_loss(environment: Environment) -> Iterable[str]:
    for index, machine in enumerate(environment.workers):
        if machine.loss_percent:
            yield f"workers[{index}].lossPercent"
    for name, reach in (
        ("insideSites", environment.inside_sites),
        ("betweenSites", environment.between_sites),
    ):
        if reach is not None and reach.loss_percent:
            yield f"{name}.lossPercent"
    for index, change in enumerate(environment.changes):
        if any(change.loss_percent or ()):
            yield f"changes[{index}].lossPercent"
        if change.inside_sites_loss_percent:
            yield f"changes[{index}].insideSitesLossPercent"
        if change.between_sites_loss_percent:
            yield f"changes[{index}].betweenSitesLossPercent"


def unreached_paths(environment: Environment, duration_s: float | None) -> list[str]:
    """Paths of times after the end of a run, such as `changes[2].at` or `absences[0].leaves`. A
    fraction of the run is always before its end."""
    if duration_s is None:
        return []
    return [
        path
        for path, at in times_of(environment)
        if at.seconds is not None and at.seconds >= duration_s and not path.endswith(".ends")
    ]


def times_of(environment: Environment) -> list[tuple[str, EnvironmentTime]]:
    """Every time in the file, with its path."""
    times: list[tuple[str, EnvironmentTime | None]] = [
        *((f"changes[{i}].at", change.at) for i, change in enumerate(environment.changes)),
        *((f"stragglers[{i}].begins", s.begins) for i, s in enumerate(environment.stragglers)),
        *((f"stragglers[{i}].ends", s.ends) for i, s in enumerate(environment.stragglers)),
        *((f"absences[{i}].leaves", a.leaves) for i, a in enumerate(environment.absences)),
        *((f"absences[{i}].comes", a.comes) for i, a in enumerate(environment.absences)),
        *(
            (f"workers[{i}].thermals.ambient[{j}].at", later.at)
            for i, thermals in _thermals(environment)
            for j, later in enumerate(thermals.ambient)
        ),
    ]
    return [(path, at) for path, at in times if at is not None]


def absences_of(environment: Environment, duration_s: float | None) -> tuple[Absence, ...]:
    """Absences in seconds, in order of worker and time."""
    return tuple(
        Absence(Rank(a.worker), seconds_of(a.leaves, duration_s), seconds_of(a.comes, duration_s))
        for a in sorted(environment.absences, key=lambda absence: absence.worker)
    )


def stragglers_of(environment: Environment, duration_s: float | None) -> tuple[Straggler, ...]:
    """Stragglers in seconds, in the order of the file."""
    everyone = tuple(range(environment.worker_count))
    made = []
    for fields in environment.stragglers:
        ends_s = seconds_of(fields.ends, duration_s)
        made.append(
            Straggler(
                ranks=frozenset(map(Rank, everyone if fields.workers is None else fields.workers)),
                slowdown=fields.slowdown,
                chance=fields.chance,
                begins_s=seconds_of(fields.begins, duration_s) or 0.0,
                ends_s=float("inf") if ends_s is None else ends_s,
            )
        )
    return tuple(made)


def demands_of(environment: Environment) -> dict[Rank, CoLocatedDemand]:
    """Other work on the machine of every worker that has any."""
    machines = [machine for each in environment.workers for machine in [each] * each.count]
    return {
        Rank(rank): CoLocatedDemand(
            tuple((phase.seconds, phase.cores) for phase in machine.demand.phases),
            machine.demand.repeat,
        )
        for rank, machine in enumerate(machines)
        if machine.demand is not None
    }


def thermals_of(environment: Environment, duration_s: float | None) -> dict[Rank, Thermals]:
    """Thermal properties of the machine of every worker that has any."""
    machines = [machine for each in environment.workers for machine in [each] * each.count]
    return {
        Rank(rank): _thermals_in_seconds(machine.thermals, duration_s)
        for rank, machine in enumerate(machines)
        if machine.thermals is not None
    }


def _thermals_in_seconds(fields: EnvironmentThermals, duration_s: float | None) -> Thermals:
    throttle = fields.throttle
    later = ((seconds_of(each.at, duration_s) or 0.0, each.celsius) for each in fields.ambient)
    return Thermals(
        joules_per_kelvin=fields.joules_per_kelvin,
        kelvin_per_watt=fields.kelvin_per_watt,
        idle_watts=fields.idle_watts,
        busy_watts=fields.busy_watts,
        ambient=((0.0, fields.ambient_celsius), *later),
        throttle=None
        if throttle is None
        else HardwareThrottle(
            throttle.trip_celsius,
            throttle.resume_celsius,
            throttle.speed,
            throttle.speed if throttle.power is None else throttle.power,
        ),
    )
