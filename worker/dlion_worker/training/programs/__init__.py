"""What is trained: the built-in models and the user's own.

Called by the trainer, which hands the `Program` to `FlatModel` and `datasets.load`. Knows nothing
of optimizers, exchange or workers' shares.
"""

from __future__ import annotations

from dlion_worker.training.programs.loading import BUILTIN_NAMES, builtin, load
from dlion_worker.training.programs.program import Program, user_code

__all__ = ["BUILTIN_NAMES", "Program", "builtin", "load", "user_code"]
