"""Environments: which machines and links a run is to have, read by the local runner and simulator.

What goes in: the environment file's model and loading, the plan it comes to for a job's workers,
the published environments (`files/`). What stays out: imposing it (`dlion_worker.local`).
"""

from dlion_worker.environments.as_one import as_one_machine
from dlion_worker.environments.loading import environment_names, load_environment
from dlion_worker.environments.model import Environment
from dlion_worker.environments.plan import (
    BYTES_PER_MBIT,
    Absence,
    Change,
    Conditions,
    Pipe,
    Plan,
    Straggler,
    WorkerConditions,
    unlimited_plan,
)

__all__ = [
    "BYTES_PER_MBIT",
    "Absence",
    "Change",
    "Conditions",
    "Environment",
    "Pipe",
    "Plan",
    "Straggler",
    "WorkerConditions",
    "as_one_machine",
    "environment_names",
    "load_environment",
    "unlimited_plan",
]
