"""A worker's processes: trainer, sidecar, supervisor, keeper and evaluator. No Kubernetes.

`training` uses TensorFlow, `transport` is gRPC between peers, `sidecar` measures, and `trainer`
joins them with the decisions of `dlion_core`.
"""
