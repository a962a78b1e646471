"""One batch of a program, before a run: everything that its trainers will call, once.

Of the manifest's data it reads no more than it uses. Without them here, it makes samples up.

A separate process (`python -m dlion_worker.training.trial`), as a program may do anything. It
reads a request from standard input and writes its answer to a file, both JSON.
"""

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DLionError, ProgramError
from dlion_api.exit_codes import ExitCode
from dlion_api.plain_text import error_text
from dlion_api.spec import Job, load_job
from dlion_api.spec.trainer import Trainer
from dlion_core.lifecycle.stopping import JobProgress
from dlion_worker.program_traceback import program_traceback
from dlion_worker.training import datasets, programs
from dlion_worker.training.building import call_arguments, few_samples, new_keras_model
from dlion_worker.training.evaluation import evaluated_subset
from dlion_worker.training.keras_optimizer import make_optimizer
from dlion_worker.training.model import FlatModel
from dlion_worker.training.private.model import model_of
from dlion_worker.training.programs.callbacks import TrainingCallbacks
from dlion_worker.training.programs.compiled import unused_optimizer

MAX_BATCH, MAX_EVALUATED = 32, 64
"""Samples: enough to call everything, few enough to take no time."""
MADE_UP_SIZE = 32
"""Length of each dimension that the model's input leaves open."""


@dataclass(frozen=True)
class ProgramTrial:
    """What a trial has found."""

    text: str
    parameters: int | None
    """Trained entries of the model; None: it could not be trained without its data."""


def try_program(
    job: Job, *, data_root: Path, program_root: Path, has_data: bool = True
) -> ProgramTrial:
    """Train the first worker's model on one batch of its data, evaluate and save it.

    The program's functions are called in the order of a run: `load_data` may set what `build_model`
    reads. Without `has_data` the samples are made up, as the model takes them. Raises:
    ProgramError, DataError.
    """
    trainer, worker = job.spec.trainer, job.workers()[0]
    program = programs.load(trainer.program, directory=program_root)
    with tempfile.TemporaryDirectory() as folder:  # callbacks may write
        if has_data:
            data = datasets.load(
                job, worker, program=program, data_root=data_root, max_samples=MAX_EVALUATED
            )
            samples = f"{worker.name} has {data.samples + data.unread_samples:,} samples"
        elif isinstance(found := _made_up(program, trainer), str):
            text = "its program builds a model; shapes are not known without the data: not tried"
            return ProgramTrial(f"{text} ({found})" if found else text, None)
        else:
            data = found
            samples = f"made-up samples {list(data.input_shape)}"
        model = model_of(program, data, trainer)
        with contextlib.chdir(folder):
            loss = _train_one_batch(model, data, trainer, rank=worker.rank)
    size, kind = model.layout.size, f"{data.class_count} classes" if data.class_count else "targets"
    note = unused_optimizer(model.program, trainer.optimizer)
    shown = "" if math.isnan(loss) else f": loss {loss:.4g}"
    text = (
        f"{size:,} parameters ({4 * size / 1e6:.3g} MB); {samples} with {kind}; one batch "
        f"trained{shown}{note and f'. Note: {note}'}"
    )
    return ProgramTrial(text, size)


def _made_up(program: programs.TrainingProgram, trainer: Trainer) -> datasets.DataSet | str:
    """Samples for the model's own input, with labels for its outputs.

    Text: it cannot be called with the length that is assumed for an open dimension, and this is its
    error. Empty text: it has no single input and output of a known shape and a type of numbers.
    Raises: ProgramError.
    """
    model = new_keras_model(program, (), 0, trainer.seed)
    try:
        (place,), (output,) = model.inputs, model.outputs
        shape = [MADE_UP_SIZE if each is None else int(each) for each in place.shape[1:]]
        class_count = max(2, int(output.shape[-1]))
        is_integer = np.issubdtype(place.dtype, np.integer)
    except (AttributeError, TypeError, ValueError):
        return ""
    rng = np.random.default_rng(trainer.seed)
    x: NDArray[Any]
    if is_integer:  # perhaps an index: 0 is always allowed
        x = np.zeros((MAX_EVALUATED, *shape), np.int32)
    elif trainer.dataset.format == "npz":
        x = rng.random((MAX_EVALUATED, *shape), np.float32)
    else:
        x = rng.integers(0, 256, (MAX_EVALUATED, *shape), np.uint8)
    if None in place.shape[1:] and (error := _call_error(model, shape, x.dtype)):
        return f"a call with made-up samples {shape} fails: {error}"
    y = (np.arange(MAX_EVALUATED) % class_count).astype(np.int32)
    return datasets.DataSet({"": (x, y)}, x, y, class_count, training_set_samples=len(y))


def _call_error(model: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> str:
    """The error of the model with samples of that shape; empty: it takes them. With open dimensions
    it may need larger ones, so that its failure need not be a fault of the program."""
    samples = few_samples(shape, dtype, scales_pixels=True)
    try:
        model(samples, **call_arguments(model, training=False))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        return f"{type(error).__name__}: {' '.join(error_text(error).split())[:300]}"
    return ""


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
            has_data=request["hasData"],
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
