"""A local step to be timed: gradient and update, without exchange.

Called by `dlion calibrate`; `calibration` does the timing.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlion_api.spec import Job, Optimizer
from dlion_worker.training import datasets, programs, threads
from dlion_worker.training.keras_optimizer import make_optimizer
from dlion_worker.training.model import FlatModel
from dlion_worker.training.private.model import model_of

RANDOM_SHAPE, RANDOM_CLASSES = (32, 32, 3), 10


def job_step(job: Job, *, data_root: Path, program_root: Path) -> Callable[[int], None]:
    """Return a step function of the job's first worker, on one thread and its own data. Raises
    DLionError for bad data or a bad program."""
    threads.configure(1.0)
    trainer, identity = job.spec.trainer, job.workers()[0]
    program = programs.load(trainer.program, directory=program_root)
    data = datasets.load(job, identity, program=program, data_root=data_root)
    model = model_of(program, data, trainer)
    stream = datasets.BatchStream(data, seed=trainer.seed, rank=identity.rank)
    return _step(model, trainer.optimizer, stream.next)


def builtin_step(name: str, *, max_samples: int) -> Callable[[int], None]:
    """Return a step function of a built-in program on random images.

    Its argument is at most `max_samples`. Raises ProgramError if the program is not built in.
    """
    threads.configure(1.0)
    program = programs.builtin(name)
    model = FlatModel(
        program, input_shape=RANDOM_SHAPE, class_count=RANDOM_CLASSES, seed=1, input_dtype=np.uint8
    )
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (max_samples, *RANDOM_SHAPE), np.uint8)
    y = rng.integers(0, RANDOM_CLASSES, max_samples, np.int32)
    return _step(model, Optimizer(), lambda samples: (x[:samples], y[:samples]))


def _step(
    model: FlatModel,
    optimizer_spec: Optimizer,
    batch: Callable[[int], tuple[NDArray[np.generic], NDArray[np.int32]]],
) -> Callable[[int], None]:
    optimizer = make_optimizer(model, optimizer_spec)
    weights_D = model.weights_D.copy()

    def step(samples: int) -> None:
        result = model.step(*batch(samples))
        optimizer.apply(weights_D, result.gradient_D, 0.0)  # the model's own weights do not change

    return step
