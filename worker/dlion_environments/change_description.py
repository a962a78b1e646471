"""Describes a change of the environment to each worker as text, for the events of a run."""

from collections.abc import Collection, Iterator, Mapping

from dlion_api.names import Rank
from dlion_environments.plan import BYTES_PER_MBIT, Conditions, Pipe, WorkerConditions

_MAX_NAMED = 8
"""Maximum number of peers listed by rank; more are counted."""


def describe_change(before: Conditions, after: Conditions) -> dict[Rank, str]:
    """Text for each worker whose conditions differ: `CPU 0.2 to 0.4 cores; uplink 10 to 5
    Mbit/s`."""
    everyone = len(after.workers)
    changes = {
        new.rank: "; ".join(_differences(old, new, everyone))
        for old, new in zip(before.workers, after.workers, strict=True)
    }
    return {rank: text for rank, text in changes.items() if text}


def _differences(old: WorkerConditions, new: WorkerConditions, everyone: int) -> Iterator[str]:
    if old.quota_cores != new.quota_cores:
        yield f"CPU {_cores(old.quota_cores)} to {_cores(new.quota_cores)} cores"
    yield from _rates("uplink", old.uplink, new.uplink, everyone)
    yield from _rates("downlink", old.downlink, new.downlink, everyone)
    yield from _of_peers("latency", old.latency_s, new.latency_s, 1000, "ms")
    yield from _of_peers("loss", old.loss_fraction, new.loss_fraction, 100, "%")
    if cut := new.cut_peers - old.cut_peers:
        yield f"cut off from {_peers(cut)}"
    if joined := old.cut_peers - new.cut_peers:
        yield f"no longer cut off from {_peers(joined)}"


def _rates(name: str, old: tuple[Pipe, ...], new: tuple[Pipe, ...], everyone: int) -> Iterator[str]:
    alike = [pipe.peers for pipe in old] == [pipe.peers for pipe in new]
    rates = [pipe.bytes_per_s for pipe in old] if alike else [None] * len(new)
    for pipe, rate in zip(new, rates, strict=True):
        if rate != pipe.bytes_per_s:
            is_of_all = pipe.sharers or len(pipe.peers) == everyone - 1
            which = "" if is_of_all else f" for {_peers(pipe.peers)}"
            owner = "the site's " if pipe.sharers else ""
            before = "any" if rate is None else _mbit(rate)
            yield f"{owner}{name}{which} {before} to {_mbit(pipe.bytes_per_s)} Mbit/s"


def _of_peers(
    name: str, old: Mapping[Rank, float], new: Mapping[Rank, float], scale: float, unit: str
) -> Iterator[str]:
    """Changes of a value per peer; peers with the same change are grouped."""
    changes: dict[tuple[float, float], list[Rank]] = {}
    for peer in sorted({*old, *new}):
        change = (old.get(peer, 0.0), new.get(peer, 0.0))
        if change[0] != change[1]:
            changes.setdefault(change, []).append(peer)
    for (before, after), peers in changes.items():
        yield f"{name} for {_peers(peers)} {before * scale:.4g} to {after * scale:.4g} {unit}"


def _cores(cores: float | None) -> str:
    return "any" if cores is None else f"{cores:.3g}"


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s / BYTES_PER_MBIT:.4g}"


def _peers(ranks: Collection[Rank]) -> str:
    if len(ranks) > _MAX_NAMED:
        return f"{len(ranks)} workers"
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
