"""The worker's processes: trainer, sidecar, supervisor, keeper, evaluator, and the local runner.

No Kubernetes. `training` uses TensorFlow; `policies` and `codecs` are state machines and arithmetic
without I/O; `exchange` is gRPC between peers; `sidecar` measures; `trainer` joins them.
`environments`, `local` (namespaces, quotas, relays) and `results` serve runs on one machine.
"""
