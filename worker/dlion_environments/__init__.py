"""Environments: the machines and links of a run, for the local runner and the simulator.

Contains the file's model and loading, its plan for a job's workers, and the published environments
(`files/`). `dlion_local` emulates a plan.
"""

from dlion_environments.aggregate_machine import single_machine_document
from dlion_environments.loading import environment_names, load_environment
from dlion_environments.model import Environment
from dlion_environments.plan import (
    BYTES_PER_MBIT,
    Absence,
    Conditions,
    ConditionsChange,
    Pipe,
    Plan,
    Straggler,
    WorkerConditions,
    unlimited_plan,
)

__all__ = [
    "BYTES_PER_MBIT",
    "Absence",
    "Conditions",
    "ConditionsChange",
    "Environment",
    "Pipe",
    "Plan",
    "Straggler",
    "WorkerConditions",
    "environment_names",
    "load_environment",
    "single_machine_document",
    "unlimited_plan",
]
