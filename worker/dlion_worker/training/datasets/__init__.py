"""A worker's training data: reading, partitioning, selecting, batching.

The trainer calls `load` once, `BatchStream.next` per step, and `FolderWatch.poll` at an interval
where the data grows. Everything follows from the manifest and its seed, so workers agree on the
partition without communication. Images stay uint8 in memory; the compiled step scales them,
except those of a program's `load_data`.
"""

from dlion_worker.training.datasets.dataset import DataSet
from dlion_worker.training.datasets.loading import load
from dlion_worker.training.datasets.open_sources import training_set_size_is_known
from dlion_worker.training.datasets.sources import DatasetCache, SharedDatasetCache
from dlion_worker.training.datasets.stream import BatchStream
from dlion_worker.training.datasets.watch import FileChange, FolderWatch

__all__ = [
    "BatchStream",
    "DataSet",
    "DatasetCache",
    "FileChange",
    "FolderWatch",
    "SharedDatasetCache",
    "load",
    "training_set_size_is_known",
]
