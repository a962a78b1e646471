"""Environments: which machines and links a run is to have, read by the local runner and simulator.

What goes in: the environment file's model and loading, the plan it comes to for a job's workers,
the published environments (`files/`). What stays out: imposing it (`dlion_worker.local`).
"""

from dlion_worker.environments.loading import environment_names, load_environment
from dlion_worker.environments.model import Environment
from dlion_worker.environments.plan import (
    BYTES_PER_MBIT,
    Change,
    Conditions,
    Pipe,
    Plan,
    WorkerConditions,
    unlimited_plan,
)

__all__ = [
    "BYTES_PER_MBIT",
    "Change",
    "Conditions",
    "Environment",
    "Pipe",
    "Plan",
    "WorkerConditions",
    "environment_names",
    "load_environment",
    "unlimited_plan",
]
