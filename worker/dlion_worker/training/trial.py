"""One batch of a program, before a run: everything that its trainers will call, once.

A separate process (`python -m dlion_worker.training.trial`), as a program may do anything. It
reads a request from standard input and writes its answer to a file, both JSON.
"""

import contextlib
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlion_api.errors import DLionError, ProgramError
from dlion_api.exit_codes import ExitCode
from dlion_api.spec import Job, load_job
from dlion_api.spec.trainer import Trainer
from dlion_core.lifecycle.stopping import JobProgress
from dlion_worker.program_traceback import program_traceback
from dlion_worker.training import datasets, programs
from dlion_worker.training.evaluation import evaluated_subset
from dlion_worker.training.keras_optimizer import make_optimizer
from dlion_worker.training.model import FlatModel
from dlion_worker.training.private.model import model_of
from dlion_worker.training.programs.callbacks import TrainingCallbacks
from dlion_worker.training.programs.compiled import unused_optimizer

MAX_BATCH, MAX_EVALUATED = 32, 64
"""Samples: enough to call everything, few enough to take no time."""


@dataclass(frozen=True)
class ProgramTrial:
    """What a trial has found."""

    text: str
    parameters: int
    """Trained entries of the model."""


def try_program(job: Job, *, data_root: Path, program_root: Path) -> ProgramTrial:
    """Train the first worker's model on one batch of its data, evaluate and save it.

    The program's functions are called in the order of a run: `load_data` may set what `build_model`
    reads. Raises: ProgramError, DataError.
    """
    trainer, worker = job.spec.trainer, job.workers()[0]
    program = programs.load(trainer.program, directory=program_root)
    with tempfile.TemporaryDirectory() as folder:  # callbacks may write
        data = datasets.load(job, worker, program=program, data_root=data_root)
        model = model_of(program, data, trainer)
        with contextlib.chdir(folder):
            loss = _train_one_batch(model, data, trainer, rank=worker.rank)
    size, kind = model.layout.size, f"{data.class_count} classes" if data.class_count else "targets"
    note = unused_optimizer(model.program, trainer.optimizer)
    found = "" if math.isnan(loss) else f": loss {loss:.4g}"
    text = (
        f"{size:,} parameters ({4 * size / 1e6:.3g} MB); {worker.name} has {data.samples:,} "
        f"samples with {kind}; one batch trained{found}{note and f'. Note: {note}'}"
    )
    return ProgramTrial(text, size)


def _train_one_batch(
    model: FlatModel, data: datasets.DataSet, trainer: Trainer, *, rank: int
) -> float:
    """Make one step, evaluate and save the model, with all callbacks.

    Return the loss, NaN with `trainer.privacy`. Raises: ProgramError, DataError.
    """
    stream = datasets.BatchStream(data, seed=trainer.seed, rank=rank)
    samples, progress = min(MAX_BATCH, data.samples), JobProgress()
    callbacks = TrainingCallbacks(
        model.program,
        model.readable,
        epoch_samples=lambda: samples,
        own_samples=lambda: progress.own_samples,
    )
    callbacks.training_begins()
    callbacks.step_begins()
    step = model.step(*stream.next(samples))
    optimizer = make_optimizer(model, trainer.optimizer)
    optimizer.apply(model.weights_D, step.gradient_D, trainer.optimizer.learning_rate)
    if not step.finite or not np.isfinite(model.weights_D).all():
        raise ProgramError(
            f"program {model.program.name}: loss or gradient of the first batch has NaN or "
            f"infinity (loss: {step.loss:g}). Scale the data, or correct the loss"
        )
    progress.own_samples = samples  # a whole epoch
    callbacks.step_ended(step.loss, samples)
    x, y = data.held_out_x, data.held_out_y
    subset = evaluated_subset(len(x), seed=trainer.seed, max_samples=MAX_EVALUATED)
    callbacks.training_ended(model.evaluate(x[subset], y[subset]))
    model.save_keras(Path("model.keras"))
    return step.loss


def main() -> None:
    request = json.load(sys.stdin)
    try:
        found = try_program(
            load_job(request["job"]),
            data_root=Path(request["dataRoot"]),
            program_root=Path(request["programRoot"]),
        )
        answer = {"exitCode": 0, "text": found.text, "parameters": found.parameters}
    except (DLionError, OSError) as error:
        if isinstance(error, ProgramError) and error.__cause__ is not None:
            sys.stderr.write(f"{program_traceback(error.__cause__)}\n")
        code = error.exit_code if isinstance(error, DLionError) else ExitCode.DATA
        answer = {"exitCode": int(code), "text": str(error)}
    sys.stdout.flush()
    sys.stderr.flush()
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    os._exit(0)  # the program may have left threads


if __name__ == "__main__":
    main()
