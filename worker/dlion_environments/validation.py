"""Finds contradictions within an environment file, independent of the job.

Called when a file is parsed, also for the valid parts of an invalid file: paths that are not
`sound` are skipped. `planning` calls it again with the length of the run, because only then can
fractions be compared with seconds.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dlion_api.document import IsValid
from dlion_api.errors import Problem
from dlion_environments.times import TimeOrder, TimePoint, out_of_order

_MAX_NAMED = 20
"""Maximum number of items listed; more are counted."""


def file_problems(it: Any, sound: IsValid) -> Iterator[Problem]:
    """Problems for every run of any job; `it` is an `Environment`, or its parsed parts."""
    return run_problems(it, sound, None)


def run_problems(it: Any, sound: IsValid, duration_s: float | None) -> Iterator[Problem]:
    """Problems for a run of that length, including the order of times."""
    everyone = _everyone(it, sound)
    if everyone is not None:
        yield from _of_sizes(it, sound, everyone)
        yield from _of_ranks(it, sound, everyone)
        yield from _of_the_start(it, sound, everyone)
    yield from _of_site_names(it, sound)
    yield from _of_absences(it, sound)
    yield from _of_tracks(it, sound)
    yield from out_of_order(time_orders(it, sound), duration_s)


def _everyone(it: Any, sound: IsValid) -> range | None:
    """The ranks; None if the number of workers is unknown."""
    machines = getattr(it, "workers", None)
    if machines is None or not all(sound(f"workers[{i}].count") for i in range(len(machines))):
        return None
    return range(sum(machine.count for machine in machines))


def _each(it: Any, name: str, field: str, sound: IsValid) -> Iterator[tuple[str, Any]]:
    """Path and value of a field, if set, in each item of the list `name`. `field` may hold both of
    its names, as `cutSites/cut_sites`."""
    written, _, attribute = field.partition("/")
    for index, item in enumerate(getattr(it, name, ())):
        path = f"{name}[{index}].{written}"
        if sound(path) and (value := getattr(item, attribute or written)) is not None:
            yield path, value


def _of_sizes(it: Any, sound: IsValid, everyone: range) -> Iterator[Problem]:
    """Lists with one value per worker, and sites, that do not match the number of workers."""
    sites = getattr(it, "sites", ())
    if sites and all(sound(f"sites[{i}].workers") for i in range(len(sites))):
        sizes = [site.workers for site in sites]
        if sum(sizes) != len(everyone):
            yield Problem(
                path="sites",
                message="the workers of the sites must add up to the workers",
                value=f"{sum(sizes)} in {len(sizes)} sites",
                allowed=str(len(everyone)),
            )
    for field in ("cores", "mbitPerS/mbit_per_s", "lossPercent/loss_percent"):
        for path, values in _each(it, "changes", field, sound):
            if len(values) != len(everyone):
                yield Problem(
                    path=path,
                    message="must hold a value for every worker",
                    value=f"{len(values)} values",
                    allowed=f"{len(everyone)} values",
                )
    for path, order in _each(it, "changes", "permutation", sound):
        if len(order) != len(everyone) or sorted(order) != list(everyone):
            yield Problem(
                path=path,
                message="must hold every rank once",
                value=_shortened(order),
                allowed=f"an order of 0 to {everyone[-1]}",
            )


def _of_ranks(it: Any, sound: IsValid, everyone: range) -> Iterator[Problem]:
    """Workers that do not exist."""
    named: list[tuple[str, Sequence[int]]] = [
        *_each(it, "changes", "cutWorkers/cut_workers", sound),
        *_of_links(it, "workers", sound),
        *_each(it, "stragglers", "workers", sound),
        *((path, [rank]) for path, rank in _each(it, "absences", "worker", sound)),
    ]
    for path, ranks in named:
        if unknown := [rank for rank in ranks if rank not in everyone]:
            yield Problem(
                path=path,
                message="there is no such worker",
                value=_shortened(unknown),
                allowed=f"0 to {everyone[-1]}",
            )


def _of_site_names(it: Any, sound: IsValid) -> Iterator[Problem]:
    """Sites that do not exist."""
    sites = getattr(it, "sites", None)
    if sites is None or any(getattr(site, "name", None) is None for site in sites):
        return
    names = dict.fromkeys(site.name for site in sites)
    named = [*_each(it, "changes", "cutSites/cut_sites", sound), *_of_links(it, "sites", sound)]
    for path, given in named:
        if unknown := [name for name in given if name not in names]:
            yield Problem(
                path=path,
                message="there is no such site",
                value=_shortened(unknown),
                allowed=_shortened(names) or "none: the file has no sites",
            )


def _of_links(it: Any, name: str, sound: IsValid) -> Iterator[tuple[str, Sequence[Any]]]:
    """The ends of cut links, by `workers` or by `sites`."""
    for index, change in enumerate(getattr(it, "changes", ())):
        for place, link in enumerate(getattr(change, "cut_links", None) or ()):
            path = f"changes[{index}].cutLinks[{place}].{name}"
            if sound(path) and (ends := getattr(link, name)) is not None:
                yield path, ends


def _of_the_start(it: Any, sound: IsValid, everyone: range) -> Iterator[Problem]:
    late = {
        absence.worker
        for _, absence in _sound_absences(it, sound)
        if absence.leaves is None and absence.worker in everyone
    }
    if len(late) == len(everyone):
        yield Problem(
            "absences",
            "no worker is present at the start",
            allowed="a worker whose absence has leaves",
        )


def _sound_absences(it: Any, sound: IsValid) -> Iterator[tuple[str, Any]]:
    for index, absence in enumerate(getattr(it, "absences", ())):
        path = f"absences[{index}]"
        if all(sound(f"{path}.{field}") for field in ("worker", "leaves", "comes")):
            yield path, absence


def _successive(it: Any, sound: IsValid) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Consecutive absences of the same worker, in the order of the file."""
    found = sorted(_sound_absences(it, sound), key=lambda one: int(one[1].worker))
    for _, own in itertools.groupby(found, key=lambda one: int(one[1].worker)):
        yield from itertools.pairwise(own)


def _of_absences(it: Any, sound: IsValid) -> Iterator[Problem]:
    """Workers that leave while they are away, whatever the times."""
    for (earlier_path, earlier), (path, absence) in _successive(it, sound):
        if earlier.comes is None or absence.leaves is None:
            stays = f"nothing: it stays away after {earlier_path}"
            yield Problem(
                path=path,
                message=f"worker {absence.worker} cannot leave before it has returned",
                value="" if absence.leaves is not None else "no leaves: away from the start on",
                allowed=stays if earlier.comes is None else f"leaves after {earlier_path}.comes",
            )


def time_orders(it: Any, sound: IsValid) -> Iterator[TimeOrder]:
    """All pairs of times that must be in order."""
    latest: dict[bool, TimePoint] = {}
    for path, at in _each(it, "changes", "at", sound):
        moment, is_fraction = TimePoint(path, at), at.fraction is not None
        for earlier in latest.values():
            yield TimeOrder(earlier, moment, "changes must be in order of time", is_strict=False)
        known = latest.get(is_fraction)
        if known is None or known.seconds(1) <= moment.seconds(1):
            latest[is_fraction] = moment
    yield from _ambient_orders(it, sound)
    yield from _spans(it, sound, "stragglers", "begins", "ends")
    yield from _spans(it, sound, "absences", "leaves", "comes")
    for (earlier_path, earlier), (path, absence) in _successive(it, sound):
        if earlier.comes is not None and absence.leaves is not None:
            yield TimeOrder(
                TimePoint(f"{earlier_path}.comes", earlier.comes),
                TimePoint(f"{path}.leaves", absence.leaves),
                f"worker {absence.worker} cannot leave before it has returned",
            )


def _ambient_orders(it: Any, sound: IsValid) -> Iterator[TimeOrder]:
    for index, machine in enumerate(getattr(it, "workers", ())):
        path = f"workers[{index}].thermals"
        thermals = getattr(machine, "thermals", None)
        if thermals is None or not sound(path) or not sound(f"{path}.ambient"):
            continue
        moments = [
            TimePoint(f"{path}.ambient[{place}].at", later.at)
            for place, later in enumerate(thermals.ambient)
            if sound(f"{path}.ambient[{place}].at")
        ]
        for earlier, moment in itertools.pairwise(moments):
            yield TimeOrder(earlier, moment, "ambient must be in order of time", is_strict=False)


def _spans(it: Any, sound: IsValid, name: str, first: str, last: str) -> Iterator[TimeOrder]:
    for index, item in enumerate(getattr(it, name, ())):
        begins, ends = f"{name}[{index}].{first}", f"{name}[{index}].{last}"
        if sound(begins) and sound(ends) and (at := getattr(item, last)) is not None:
            earlier = TimePoint(begins, getattr(item, first))
            yield TimeOrder(earlier, TimePoint(ends, at), f"must be after {first}")


def _of_tracks(it: Any, sound: IsValid) -> Iterator[Problem]:
    """Workers of a radio without a place, tracks without a radio, and points out of order."""
    if not sound("radio"):
        return
    has_radio = getattr(it, "radio", None) is not None
    for index, machine in enumerate(getattr(it, "workers", ())):
        path = f"workers[{index}].track"
        if not sound(path) or machine is None:
            continue
        track = getattr(machine, "track", ())
        if has_radio and not track:
            yield Problem(path, "is missing: with a radio each worker needs at least one point")
        if has_radio and track and sound(f"workers[{index}].count") and machine.count > 1:
            yield Problem(
                f"workers[{index}].count",
                "several workers cannot have one track",
                value=str(machine.count),
                allowed="1",
            )
        if track and not has_radio:
            yield Problem(path, "has no effect without a radio", advice="Give radio as well.")
        times = [at for point in track if (at := getattr(point, "seconds", None)) is not None]
        if any(later <= earlier for earlier, later in itertools.pairwise(times)):
            yield Problem(f"{path}.seconds", "must rise from point to point")


def _shortened(values: Iterable[object]) -> str:
    texts = list(map(str, values))
    left = len(texts) - _MAX_NAMED
    return ", ".join(texts[:_MAX_NAMED]) + (f" and {left} more" if left > 0 else "")
