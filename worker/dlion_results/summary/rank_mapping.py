"""Maps records of a run with ranks by group, as in clusters, to consecutive ranks.

`dlion replay` needs it, because simulated workers have consecutive ranks. `dlion_api.spec.ranks`
defines both numberings.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from dlion_api.names import Rank
from dlion_api.protocol.progress import DirectiveRecord, LinkRecord, ProgressRecord
from dlion_api.spec import Job

_Value = TypeVar("_Value")


def consecutive_ranks(job: Job) -> dict[Rank, Rank]:
    """The consecutive rank of each worker in the manifest, by its rank in the job."""
    counted = job.with_counted_ranks()
    return {
        worker.rank: counted.worker_at(worker.site, worker.group, worker.index).rank
        for worker in job.workers()
    }


def map_ranks(
    records: Iterable[ProgressRecord], ranks: Mapping[Rank, Rank]
) -> Iterator[ProgressRecord]:
    """The records of and about workers in `ranks`, with mapped ranks."""
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


def _by(ranks: Mapping[Rank, Rank], values: Mapping[Rank, _Value]) -> dict[Rank, _Value]:
    return {ranks[rank]: value for rank, value in values.items() if rank in ranks}
