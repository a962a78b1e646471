"""Programs to train: the built-in models and the user's own.

The trainer passes the `TrainingProgram` to `FlatModel` and `datasets.load`. Knows nothing of
optimizers, exchange or shares.
"""

from dlion_worker.training.programs.loading import builtin, load
from dlion_worker.training.programs.program import TrainingProgram

__all__ = ["TrainingProgram", "builtin", "load"]
