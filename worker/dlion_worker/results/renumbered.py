"""The records of a run whose workers were numbered by group, as in clusters, by counted ranks.

Called by `dlion replay`, since whatever is simulated counts its workers. Both ways to number them
are `dlion_api.spec.ranks`'.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from dlion_api.progress import DirectiveRecord, LinkRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dlion_api.names import Rank
    from dlion_api.progress import ProgressRecord
    from dlion_api.spec import Job

_Value = TypeVar("_Value")


def counted_ranks(job: Job) -> dict[Rank, Rank]:
    """The counted rank of each worker of the manifest, by the one that it has in that job."""
    counted = job.with_counted_ranks()
    return {
        worker.rank: counted.worker_at(worker.site, worker.group, worker.index).rank
        for worker in job.workers()
    }


def renumbered(
    records: Iterable[ProgressRecord], ranks: Mapping[Rank, Rank]
) -> Iterator[ProgressRecord]:
    """The records of and about workers in `ranks`, which says what becomes of their ranks."""
    for record in records:
        if record.rank not in ranks or (
            isinstance(record, LinkRecord) and record.peer not in ranks
        ):
            continue
        match record:
            case LinkRecord():
                yield replace(record, rank=ranks[record.rank], peer=ranks[record.peer])
            case DirectiveRecord():
                yield replace(
                    record,
                    rank=ranks[record.rank],
                    budget_bytes=_by(ranks, record.budget_bytes),
                    capacities=_by(ranks, record.capacities),
                    bandwidth_bytes_per_s=_by(ranks, record.bandwidth_bytes_per_s),
                )
            case _:
                yield replace(record, rank=ranks[record.rank])


def _by(ranks: Mapping[Rank, Rank], found: Mapping[Rank, _Value]) -> dict[Rank, _Value]:
    return {ranks[rank]: value for rank, value in found.items() if rank in ranks}
