"""Computes the plan of an environment for a job's workers, and all mismatches between the two."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dlion_api.document import line_of
from dlion_api.errors import Problem, SpecError
from dlion_api.names import Rank, WorkerIdentity
from dlion_api.spec import Job
from dlion_environments.plan import (
    BYTES_PER_MBIT,
    MESSAGE_OVERHEAD_BYTES,
    Conditions,
    ConditionsChange,
    Pipe,
    Plan,
    WorkerConditions,
    combined_fraction,
)
from dlion_environments.radio import (
    Radio,
    Track,
    radio_of,
    rates_over_time,
    size_problems,
    with_radio,
)
from dlion_environments.scheduled_events import (
    absences_of,
    demands_of,
    late_problems,
    simulator_only_problems,
    stragglers_of,
    thermals_of,
    times_of,
)
from dlion_environments.times import seconds_of
from dlion_environments.validation import run_problems

if TYPE_CHECKING:
    from dlion_environments.model import Environment, EnvironmentChange, EnvironmentLink

_Value = TypeVar("_Value")

MACHINE_FRACTION = 0.8
"""Fraction of the machine's cores for all trainers' quotas. The rest is for the coordinator, the
relay and other processes. Source: this project."""
SIDECAR_CORES = 0.02
"""Reserved for each worker's sidecar, whose limit this is."""
MIN_QUOTA_CORES = 0.02
"""Minimum of the kernel's controller with our period (`emulation.compute.quotas`)."""


@dataclass(frozen=True)
class _EnvironmentState:
    """The file's values at one time, per rank."""

    cores: tuple[float, ...]
    uplink_mbit_per_s: tuple[float | None, ...]
    downlink_mbit_per_s: tuple[float | None, ...]
    between_mbit_per_s: float | None
    loss_percent: tuple[float, ...]
    latency_ms: tuple[float, float]
    """(Inside sites, between sites); also for `site_loss_percent`."""
    site_loss_percent: tuple[float, float]
    cut_workers: frozenset[int] = frozenset()
    cut_sites: frozenset[str] = frozenset()
    cut_links: tuple[EnvironmentLink, ...] = ()


def plan_environment(
    environment: Environment,
    workers: tuple[WorkerIdentity, ...],
    machine_cores: float | None,
    duration_s: float | None,
    source: str,
) -> Plan:
    """Compute the plan. With `machine_cores` None, a relative unit is a core of virtual time.
    Raises SpecError with every problem, naming environment and job."""
    problems = [
        *_count_problems(environment, workers, source),
        *(_fraction_problems(environment, source) if duration_s is None else ()),
        *run_problems(environment, lambda _: True, duration_s),
        *_motion_problems(environment, duration_s),
    ]
    if machine_cores is not None:
        problems += simulator_only_problems(environment)
    if problems:
        raise _spec_error(environment, problems)
    states = _states(environment)
    scale = 1.0
    if machine_cores is not None:
        scale = _core_scale(environment, [state for _, state in states], machine_cores)
    timeline = [
        (
            seconds_of(None if change is None else change.at, duration_s) or 0.0,
            _conditions(environment, workers, state, scale),
        )
        for change, state in states
    ]
    timeline = _with_motion(environment, timeline, duration_s)
    return Plan(
        environment=environment.name,
        workers=workers,
        core_scale=scale,
        samples_per_s_per_core=environment.samples_per_s_per_core,
        message_overhead_bytes=MESSAGE_OVERHEAD_BYTES
        if environment.message_overhead_bytes is None
        else environment.message_overhead_bytes,
        initial=timeline[0][1],
        changes=tuple(ConditionsChange(time_s, conditions) for time_s, conditions in timeline[1:]),
        stragglers=stragglers_of(environment, duration_s),
        thermals=thermals_of(environment, duration_s),
        demands=demands_of(environment),
        absences=absences_of(environment, duration_s),
    )


def _motion_problems(environment: Environment, duration_s: float | None) -> list[Problem]:
    """A plan whose rates would not fit into memory."""
    if (radio := environment.radio) is None:
        return []
    points = [point.seconds for machine in environment.workers for point in machine.track]
    ends_s = min(max(points, default=0.0), math.inf if duration_s is None else duration_s)
    return list(size_problems(len(environment.workers), ends_s, radio.every_seconds))


def _with_motion(
    environment: Environment, timeline: list[tuple[float, Conditions]], duration_s: float | None
) -> list[tuple[float, Conditions]]:
    """The timeline with the links of a radio, if there is one, at each of its intervals."""
    if (fields := environment.radio) is None:
        return timeline
    radio = radio_of(
        fields.range_metres,
        fields.mbit_per_s,
        fields.beyond_mbit_per_s,
        fields.fading_decibels,
        fields.every_seconds,
        fields.seed,
    )
    tracks = [
        Track(
            tuple(point.seconds for point in machine.track),
            tuple((point.x, point.y) for point in machine.track),
        )
        for machine in environment.workers
    ]
    until_s = float("inf") if duration_s is None else duration_s
    moving = list(rates_over_time(radio, tracks, until_s))
    return _merged(radio, timeline, moving)


def _merged(
    radio: Radio,
    timeline: list[tuple[float, Conditions]],
    moving: list[tuple[float, dict[tuple[int, int], float]]],
) -> list[tuple[float, Conditions]]:
    times_s, moved_s = [at for at, _ in timeline], [at for at, _ in moving]
    merged = []
    for time_s in sorted({*times_s, *moved_s}):
        conditions = timeline[bisect_right(times_s, time_s) - 1][1]
        rates = moving[bisect_right(moved_s, time_s) - 1][1]
        merged.append((time_s, with_radio(conditions, radio, rates)))
    return merged


def check_start(environment: Environment, job: Job, source: str) -> None:
    """Raises SpecError if the run would wait for workers that come late."""
    if problems := list(late_problems(environment, job, source)):
        raise _spec_error(environment, problems)


def _spec_error(environment: Environment, problems: list[Problem]) -> SpecError:
    """The problems with their lines in the file, if known."""
    lines = environment.lines
    placed = [replace(problem, line=line_of(problem.path, lines)) for problem in problems]
    return SpecError(placed, source=environment.file or f"environment {environment.name}")


def _count_problems(
    environment: Environment, workers: Sequence[WorkerIdentity], source: str
) -> Iterable[Problem]:
    if len(workers) != environment.worker_count:
        yield Problem(
            path="workers",
            message=f"environment {environment.name} is made for {environment.worker_count} "
            f"workers, {source} has another number",
            value=str(len(workers)),
            allowed=str(environment.worker_count),
            advice="Change the job's groups, or take another environment.",
        )
    counts = [len(list(members)) for _, members in itertools.groupby(workers, lambda w: w.site)]
    expected = [site.workers for site in environment.sites]
    if expected and counts != expected:
        yield Problem(
            path="sites",
            message=f"environment {environment.name} has sites of other sizes than {source}",
            value=" + ".join(map(str, counts)),
            allowed=" + ".join(map(str, expected)),
            advice="Change the job's sites, or take another environment.",
        )


def _fraction_problems(environment: Environment, source: str) -> Iterable[Problem]:
    """Fractions of a run of unknown length."""
    for path, at in times_of(environment):
        if at.fraction is not None:
            yield Problem(
                path=f"{path}.fraction",
                message=f"environment {environment.name} changes at a fraction of the run, but "
                f"{source} has no stop.maxSeconds to take the fraction of",
                value=str(at.fraction),
                advice="Set trainer.stop.maxSeconds, or give seconds.",
            )


def _states(environment: Environment) -> list[tuple[EnvironmentChange | None, _EnvironmentState]]:
    machines = [m for machine in environment.workers for m in [machine] * machine.count]
    inside, between = environment.inside_sites, environment.between_sites
    start = _EnvironmentState(
        cores=tuple(machine.cores for machine in machines),
        uplink_mbit_per_s=tuple(m.uplink_mbit_per_s or m.mbit_per_s for m in machines),
        downlink_mbit_per_s=tuple(m.downlink_mbit_per_s or m.mbit_per_s for m in machines),
        between_mbit_per_s=None if between is None else between.mbit_per_s,
        loss_percent=tuple(machine.loss_percent for machine in machines),
        latency_ms=(
            0.0 if inside is None else inside.latency_ms,
            0.0 if between is None else between.latency_ms,
        ),
        site_loss_percent=(
            0.0 if inside is None else inside.loss_percent,
            0.0 if between is None else between.loss_percent,
        ),
    )
    states: list[tuple[EnvironmentChange | None, _EnvironmentState]] = [(None, start)]
    for change in environment.changes:
        states.append((change, _changed(states[-1][1], change, start)))
    return states


def _changed(
    state: _EnvironmentState, change: EnvironmentChange, start: _EnvironmentState
) -> _EnvironmentState:
    if (order := change.permutation) is not None:
        state = replace(
            state,
            cores=tuple(start.cores[k] for k in order),
            uplink_mbit_per_s=tuple(start.uplink_mbit_per_s[k] for k in order),
            downlink_mbit_per_s=tuple(start.downlink_mbit_per_s[k] for k in order),
        )
    (inside_ms, between_ms), (inside, between) = state.latency_ms, state.site_loss_percent
    return _EnvironmentState(
        cores=_new(change.cores, state.cores),
        uplink_mbit_per_s=_new(change.mbit_per_s, state.uplink_mbit_per_s),
        downlink_mbit_per_s=_new(change.mbit_per_s, state.downlink_mbit_per_s),
        between_mbit_per_s=_new(change.between_sites_mbit_per_s, state.between_mbit_per_s),
        loss_percent=_new(change.loss_percent, state.loss_percent),
        latency_ms=(
            _new(change.inside_sites_latency_ms, inside_ms),
            _new(change.between_sites_latency_ms, between_ms),
        ),
        site_loss_percent=(
            _new(change.inside_sites_loss_percent, inside),
            _new(change.between_sites_loss_percent, between),
        ),
        cut_workers=frozenset(_new(change.cut_workers, state.cut_workers)),
        cut_sites=frozenset(_new(change.cut_sites, state.cut_sites)),
        cut_links=_new(change.cut_links, state.cut_links),
    )


def _new(changed: _Value | None, before: _Value) -> _Value:
    return before if changed is None else changed


def _core_scale(
    environment: Environment, states: list[_EnvironmentState], machine_cores: float
) -> float:
    most = max(sum(state.cores) for state in states)
    least = min(min(state.cores) for state in states)
    scale = environment.core_scale
    if scale is None:
        usable = MACHINE_FRACTION * machine_cores - SIDECAR_CORES * environment.worker_count
        scale = usable / most
    if scale * least < MIN_QUOTA_CORES:
        problem = Problem(
            path="coreScale",
            message=f"environment {environment.name} leaves its smallest worker less CPU than a "
            f"quota can hold, on this machine of {machine_cores:g} cores",
            value=f"{least:g} units of {scale:.4g} cores",
            allowed=f"at least {MIN_QUOTA_CORES:g} cores: coreScale of "
            f"{MIN_QUOTA_CORES / least:.4g} or more",
            advice="Use a larger machine, fewer workers, or give coreScale (quotas that together "
            "are more than the machine has are not kept).",
        )
        raise _spec_error(environment, [problem])
    return scale


def _conditions(
    environment: Environment,
    workers: tuple[WorkerIdentity, ...],
    state: _EnvironmentState,
    scale: float,
) -> Conditions:
    env_sites = [site.name for site in environment.sites for _ in range(site.workers)]
    sites: list[str] = env_sites or [worker.site for worker in workers]
    everyone = range(len(workers))
    site_pipes = {site: _site_pipes(environment, state, sites, site) for site in {*sites}}
    return Conditions(
        tuple(
            WorkerConditions(
                rank=Rank(k),
                quota_cores=state.cores[k] * scale,
                uplink=(
                    *_pipes(environment, state, sites, k, state.uplink_mbit_per_s[k]),
                    *site_pipes[sites[k]],
                ),
                downlink=(
                    *_pipes(environment, state, sites, k, state.downlink_mbit_per_s[k]),
                    *site_pipes[sites[k]],
                ),
                latency_s=_latencies(state, sites, k),
                loss_fraction=_losses(state, sites, k),
                cut_peers=frozenset(
                    Rank(j) for j in everyone if j != k and _is_cut(state, sites, k, j)
                ),
            )
            for k in everyone
        )
    )


def _pipes(
    environment: Environment, state: _EnvironmentState, sites: list[str], k: int, own: float | None
) -> tuple[Pipe, ...]:
    """The pipes in one direction that worker k has to itself."""
    peers = [j for j in range(len(sites)) if j != k]
    near = [j for j in peers if sites[j] == sites[k]]
    inside = None if environment.inside_sites is None else environment.inside_sites.mbit_per_s
    if environment.link_shape == "perPeer":
        rates = [(j, (own, inside if j in near else state.between_mbit_per_s)) for j in peers]
        groups = [([j], min((r for r in pair if r is not None), default=None)) for j, pair in rates]
    else:
        groups = [(peers, own), (near, inside)]
    return tuple(
        Pipe(frozenset(Rank(j) for j in group), rate * BYTES_PER_MBIT)
        for group, rate in groups
        if group and rate is not None
    )


def _site_pipes(
    environment: Environment, state: _EnvironmentState, sites: list[str], site: str
) -> tuple[Pipe, ...]:
    """The pipe in one direction to all other sites, which the workers of a site share; none with a
    rate for each link, as those share nothing."""
    rate = state.between_mbit_per_s
    members = frozenset(Rank(j) for j, name in enumerate(sites) if name == site)
    others = frozenset(map(Rank, range(len(sites)))) - members
    if rate is None or not others or environment.link_shape == "perPeer":
        return ()
    sharers = members if len(members) > 1 else frozenset[Rank]()
    return (Pipe(others, rate * BYTES_PER_MBIT, sharers),)


def _latencies(state: _EnvironmentState, sites: list[str], k: int) -> dict[Rank, float]:
    in_ms = {j: state.latency_ms[site != sites[k]] for j, site in enumerate(sites) if j != k}
    return {Rank(j): latency_ms / 1000 for j, latency_ms in in_ms.items() if latency_ms}


def _losses(state: _EnvironmentState, sites: list[str], k: int) -> dict[Rank, float]:
    percents = {
        j: (state.loss_percent[k], state.site_loss_percent[site != sites[k]], state.loss_percent[j])
        for j, site in enumerate(sites)
        if j != k
    }
    return {Rank(j): combined_fraction(parts) for j, parts in percents.items() if any(parts)}


def _is_cut(state: _EnvironmentState, sites: list[str], k: int, j: int) -> bool:
    ends, homes = {k, j}, {sites[k], sites[j]}
    return (
        not ends.isdisjoint(state.cut_workers)
        or any(
            ends == {*(one.workers or ())} or homes == {*(one.sites or ())}
            for one in state.cut_links
        )
        or (len(homes) > 1 and not homes.isdisjoint(state.cut_sites))
    )
