"""What in an environment file contradicts the file itself, whatever the job.

Called when a file is parsed, also of what could be read of one that is wrong elsewhere: nothing is
asked of a place that is not sound. Called again by `planning`, which knows how long the run is: a
fraction of it can be held against seconds only then.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dlion_api.errors import Problem
from dlion_worker.environments.times import Moment, Order, Times

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dlion_api.document import Sound

_MOST_NAMED = 20
"""Sites that are named; more are counted."""


def contradictions(it: Any, sound: Sound) -> Iterator[Problem]:
    """All that holds for no run of any job; `it` is an `Environment`, or what was read of one."""
    return contradictions_in_time(it, sound, Times())


def contradictions_in_time(it: Any, sound: Sound, times: Times) -> Iterator[Problem]:
    """The same, and what is out of order in a run of the length that `times` has."""
    everyone = _everyone(it, sound)
    if everyone is not None:
        yield from _of_sizes(it, sound, everyone)
        yield from _of_ranks(it, sound, everyone)
        yield from _of_the_start(it, sound, everyone)
    yield from _of_site_names(it, sound)
    yield from _of_absences(it, sound)
    yield from times.out_of_order(orders(it, sound))


def _everyone(it: Any, sound: Sound) -> range | None:
    """The ranks; None where the number of workers is not known."""
    machines = getattr(it, "workers", None)
    if machines is None or not all(sound(f"workers[{i}].count") for i in range(len(machines))):
        return None
    return range(sum(machine.count for machine in machines))


def _each(it: Any, name: str, field: str, sound: Sound) -> Iterator[tuple[str, Any]]:
    """The path and value of a field (both its names, as `cutSites/cut_sites`), where it is given.

    Of each item of the list of that name.
    """
    written, _, attribute = field.partition("/")
    for index, item in enumerate(getattr(it, name, ())):
        path = f"{name}[{index}].{written}"
        if sound(path) and (value := getattr(item, attribute or written)) is not None:
            yield path, value


def _of_sizes(it: Any, sound: Sound, everyone: range) -> Iterator[Problem]:
    """Lists that hold something of every worker, or share the workers out."""
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


def _of_ranks(it: Any, sound: Sound, everyone: range) -> Iterator[Problem]:
    """Workers that there are not."""
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


def _of_site_names(it: Any, sound: Sound) -> Iterator[Problem]:
    """Sites that there are not."""
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


def _of_links(it: Any, name: str, sound: Sound) -> Iterator[tuple[str, Sequence[Any]]]:
    """The ends of cut links, by their workers or sites."""
    for index, change in enumerate(getattr(it, "changes", ())):
        for place, link in enumerate(getattr(change, "cut_links", None) or ()):
            path = f"changes[{index}].cutLinks[{place}].{name}"
            if sound(path) and (ends := getattr(link, name)) is not None:
                yield path, ends


def _of_the_start(it: Any, sound: Sound, everyone: range) -> Iterator[Problem]:
    late = {
        absence.worker
        for _, absence in _sound_absences(it, sound)
        if absence.leaves is None and absence.worker in everyone
    }
    if len(late) == len(everyone):
        yield Problem(
            "absences", "nobody is there at the start", allowed="a worker whose absence has leaves"
        )


def _sound_absences(it: Any, sound: Sound) -> Iterator[tuple[str, Any]]:
    for index, absence in enumerate(getattr(it, "absences", ())):
        path = f"absences[{index}]"
        if all(sound(f"{path}.{field}") for field in ("worker", "leaves", "comes")):
            yield path, absence


def _successive(it: Any, sound: Sound) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Each two absences of one worker that follow on each other in the file."""
    found = sorted(_sound_absences(it, sound), key=lambda one: int(one[1].worker))
    for _, own in itertools.groupby(found, key=lambda one: int(one[1].worker)):
        yield from itertools.pairwise(own)


def _of_absences(it: Any, sound: Sound) -> Iterator[Problem]:
    """Workers that leave while they are away, whatever the times."""
    for (earlier_path, earlier), (path, absence) in _successive(it, sound):
        if earlier.comes is None or absence.leaves is None:
            stays = f"nothing: it stays away after {earlier_path}"
            yield Problem(
                path=path,
                message=f"worker {absence.worker} cannot leave before it has come back",
                value="" if absence.leaves is not None else "no leaves: away from the start on",
                allowed=stays if earlier.comes is None else f"leaves after {earlier_path}.comes",
            )


def orders(it: Any, sound: Sound) -> Iterator[Order]:
    """All that has to be in order of time."""
    latest: dict[bool, Moment] = {}
    for path, at in _each(it, "changes", "at", sound):
        moment, is_fraction = Moment(path, at), at.fraction is not None
        for earlier in latest.values():
            yield Order(earlier, moment, "changes must be in order of time", is_strict=False)
        known = latest.get(is_fraction)
        if known is None or known.seconds(1) <= moment.seconds(1):
            latest[is_fraction] = moment
    yield from _spans(it, sound, "stragglers", "begins", "ends")
    yield from _spans(it, sound, "absences", "leaves", "comes")
    for (earlier_path, earlier), (path, absence) in _successive(it, sound):
        if earlier.comes is not None and absence.leaves is not None:
            yield Order(
                Moment(f"{earlier_path}.comes", earlier.comes),
                Moment(f"{path}.leaves", absence.leaves),
                f"worker {absence.worker} cannot leave before it has come back",
            )


def _spans(it: Any, sound: Sound, name: str, first: str, last: str) -> Iterator[Order]:
    for index, item in enumerate(getattr(it, name, ())):
        begins, ends = f"{name}[{index}].{first}", f"{name}[{index}].{last}"
        if sound(begins) and sound(ends) and (at := getattr(item, last)) is not None:
            earlier = Moment(begins, getattr(item, first))
            yield Order(earlier, Moment(ends, at), f"must be after {first}")


def _shortened(values: Iterable[object]) -> str:
    words = list(map(str, values))
    left = len(words) - _MOST_NAMED
    return ", ".join(words[:_MOST_NAMED]) + (f" and {left} more" if left > 0 else "")
