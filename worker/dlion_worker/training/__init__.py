"""All code that uses TensorFlow: models, optimizers, data, evaluation.

Builds the user's model, compiles its step over flat arrays, reads and splits data sets, and
evaluates. Knows nothing of exchange, policies, clocks or processes. Used by trainer, evaluator and
simulator.

TensorFlow reads its environment at import, so the variables are set here.
"""

import os

# C++ messages bypass Python's logging; show only errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
