"""PID 1 of a worker's container, and the parent of every local worker: keeps its trainer running.

What goes in: when to restart, when to give up (`supervision`, no I/O), and the process that does
it (`process`). What stays out: what a trainer is; any child that keeps to the exit codes will do.
Imports no TensorFlow, no gRPC: it has to start at once and to stay small.
"""
