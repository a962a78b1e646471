"""What a trainer starts from: its data and first model, and optional parts of the program."""

import os
from pathlib import Path

from dlion_api.names import Rank, WorkerIdentity
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_api.spec.trainer import Trainer
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.stopping import JobProgress
from dlion_environments.slow_exchange import report_slow_exchange
from dlion_worker.initializers.folders import model_root
from dlion_worker.training import datasets
from dlion_worker.training.datasets import BatchStream, DataSet
from dlion_worker.training.model import FlatModel
from dlion_worker.training.private.model import model_of
from dlion_worker.training.programs.callbacks import TrainingCallbacks
from dlion_worker.training.programs.compiled import unused_optimizer
from dlion_worker.training.programs.program import TrainingProgram

FOLDER = "callbacks"
"""Name in the folder of results: one folder for each worker, which callbacks write into."""


def report_notes(job: Job, config: WorkerConfig, model: FlatModel, reporter: Reporter) -> None:
    """Report once for the job what has no effect in this run: a part of the program, or the
    exchange."""
    if reporter.rank != job.workers()[0].rank:
        return
    if note := unused_optimizer(model.program, job.spec.trainer.optimizer):
        reporter.event(EventReason.PROGRAM_PART_UNUSED, note, warning=True)
    report_slow_exchange(job.spec, model.layout.size, config.slowest_link, reporter)


def load_data(
    program: TrainingProgram, job: Job, identity: WorkerIdentity, config: WorkerConfig
) -> DataSet:
    """This worker's data. With a shared evaluator all workers hold out the same samples: they are
    decoded once on this machine.

    Raises: ProgramError, DataError.
    """
    shared = config.snapshots_dir
    cache = datasets.SharedDatasetCache(Path(shared)) if shared else datasets.DatasetCache()
    root = Path(config.data_root)
    return datasets.load(job, identity, program=program, data_root=root, cache=cache)


def first_model(
    program: TrainingProgram, data: DataSet, trainer: Trainer, rank: Rank, data_root: Path
) -> FlatModel:
    """The manifest's model, with the weights of `trainer.startFrom`, if there is one.

    Raises: ProgramError, DataError.
    """
    model = model_of(program, data, trainer, rank=rank)
    if trainer.start_from:
        model.load_keras(model_root(trainer, data_root) / trainer.start_from)
    return model


def make_callbacks(
    model: FlatModel,
    config: WorkerConfig,
    identity: WorkerIdentity,
    *,
    stream: BatchStream,
    progress: JobProgress,
) -> TrainingCallbacks:
    """The program's callbacks. Their relative paths lie in a folder of this worker.

    All other paths of a trainer are absolute. Raises: ProgramError; OSError.
    """
    if model.program.callbacks is not None:
        name = f"{identity.site}.{identity.group}-{identity.index}"
        folder = Path(config.results_dir) / FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
    return TrainingCallbacks(
        model.program,
        model.readable,
        epoch_samples=lambda: stream.samples,
        own_samples=lambda: progress.own_samples,
    )
