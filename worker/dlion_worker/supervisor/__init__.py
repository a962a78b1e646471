"""Keeps a trainer running: PID 1 of a worker's container, and parent of every local worker.

`supervision` decides about restarts, without I/O; `process` executes. Any child that follows the
exit codes can be supervised. Imports neither TensorFlow nor gRPC, so that it starts at once and
stays small.
"""
