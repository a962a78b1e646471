"""Everything that knows TensorFlow: models, optimizers, data, evaluation.

What goes in: building the user's model, the compiled step over flat arrays, optimizers on flat
arrays, reading and splitting data sets, evaluation. What stays out: exchange, policies, clocks,
processes. Called by `dlion_worker.trainer` (and later by the simulator).

TensorFlow reads its environment when it is imported, so what must be set before stands here.
"""

from __future__ import annotations

import os

# Information and warnings of the C++ side go to stderr past Python's logging; errors still show.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
