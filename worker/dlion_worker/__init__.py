"""A worker's processes: trainer, sidecar, supervisor, keeper and evaluator. No Kubernetes.

`training` uses TensorFlow, `transport` is gRPC between peers, `sidecar` measures, and `trainer`
joins them with the decisions of `dlion_core`.
"""

import os

# Read when gRPC is first used. A caller whose idle connection its server closes is no error, but
# gRPC prints a line for it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
