"""What workers decide, without I/O: shared by the trainer, the sidecar and the simulator.

`policies` choose what to send and when to wait. `lifecycle` joins, continues and pauses a worker.
`links` frames and queues messages. `resource_control` sets batch sizes and link budgets. `topology`
groups workers, `codecs` encodes payloads. Nothing here opens a socket, reads a clock or imports
TensorFlow; time is an argument.
"""
