"""Render a run's Kubernetes objects: pure functions from a manifest to documents.

Includes merging a user's pod template. Not here: when objects are created
(`dlion_operator.plan.decide`) and how they are applied (`dlion_operator.controller.reconcile`).
"""

from dlion_operator.children.exposed_workers import worker_routes, worker_service
from dlion_operator.children.keeper import keeper_objects
from dlion_operator.children.run_objects import (
    authority_certificate,
    config_map,
    config_map_changes,
    headless_service,
)
from dlion_operator.children.worker_jobs import worker_job

__all__ = [
    "authority_certificate",
    "config_map",
    "config_map_changes",
    "headless_service",
    "keeper_objects",
    "worker_job",
    "worker_routes",
    "worker_service",
]
