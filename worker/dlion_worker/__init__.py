"""What runs beside the data: trainer, sidecar, supervisor, policies, exchange, local runner.

What goes in: the one worker code path. What stays out: Kubernetes, and whatever serves a whole
site. The parts: `training` (TensorFlow), `policies` and `codecs` (state machines and arithmetic
without I/O), `exchange` (gRPC between peers), `sidecar` (measuring), `trainer` (the process that
joins them), `supervisor`, `environments`, `local` (namespaces, quotas, relays), `results`.
"""
