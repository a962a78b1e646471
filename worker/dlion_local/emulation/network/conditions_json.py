"""Link conditions as JSON, for the pipe between the runner and its relay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlion_api.names import Rank
from dlion_environments.plan import Conditions, Pipe, WorkerConditions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def links_to_json(conditions: Conditions) -> list[dict[str, Any]]:
    """Links of the conditions, by rank; quotas are left out."""
    return [
        {
            "uplink": _pipes_to_json(worker.uplink),
            "downlink": _pipes_to_json(worker.downlink),
            "latency_s": [[peer, seconds] for peer, seconds in worker.latency_s.items()],
            "cut_peers": sorted(worker.cut_peers),
        }
        for worker in conditions.workers
    ]


def links_from_json(document: Sequence[Mapping[str, Any]]) -> Conditions:
    """Parse conditions, without quotas."""
    return Conditions(
        tuple(
            WorkerConditions(
                rank=Rank(index),
                uplink=_pipes_from_json(worker["uplink"]),
                downlink=_pipes_from_json(worker["downlink"]),
                latency_s={Rank(peer): float(seconds) for peer, seconds in worker["latency_s"]},
                cut_peers=frozenset(Rank(peer) for peer in worker["cut_peers"]),
            )
            for index, worker in enumerate(document)
        )
    )


def _pipes_to_json(pipes: Sequence[Pipe]) -> list[dict[str, Any]]:
    return [{"peers": sorted(pipe.peers), "bytes_per_s": pipe.bytes_per_s} for pipe in pipes]


def _pipes_from_json(pipes: Sequence[Mapping[str, Any]]) -> tuple[Pipe, ...]:
    return tuple(
        Pipe(frozenset(Rank(peer) for peer in pipe["peers"]), float(pipe["bytes_per_s"]))
        for pipe in pipes
    )
