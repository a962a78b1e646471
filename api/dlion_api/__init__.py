"""The contract of DLion: every name that crosses a process boundary.

What goes in: the manifest's model, status and conditions, membership, measurement records, names,
exit codes, errors, and the generated protobuf (`wire`). What stays out: behaviour. Anything that
does I/O, knows Kubernetes, TensorFlow or gRPC, or is used by one process alone lives elsewhere.

Called by the operator, the worker and the command line; imports the standard library only.
"""
