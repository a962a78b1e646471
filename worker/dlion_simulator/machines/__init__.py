"""Machines of simulated workers: their temperature (`thermal`, `heat`), and what other work takes
from them (`shared_machine`, `demand`). Used by `worker`; pure but for the job's policies.
"""
