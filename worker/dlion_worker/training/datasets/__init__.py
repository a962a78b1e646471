"""What a worker trains on: reading, sharing out, choosing, and handing out in batches.

Called by the trainer: `load` once, `BatchStream.next` per step, `FolderWatch.poll` on an interval
where the data grows. Everything follows from the manifest and its seed, so that all workers agree
on who has which sample without a word between them. Images stay uint8 in memory; the compiled
step scales them.
"""

from __future__ import annotations

from dlion_worker.training.datasets.dataset import DataSet
from dlion_worker.training.datasets.loading import load
from dlion_worker.training.datasets.opened_once import OpenedOnce
from dlion_worker.training.datasets.opening import whole_is_known
from dlion_worker.training.datasets.stream import BatchStream
from dlion_worker.training.datasets.watch import Change, ChangeKind, FolderWatch

__all__ = [
    "BatchStream",
    "Change",
    "ChangeKind",
    "DataSet",
    "FolderWatch",
    "OpenedOnce",
    "load",
    "whole_is_known",
]
