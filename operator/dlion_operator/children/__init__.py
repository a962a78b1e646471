"""A run's objects in a cluster, rendered: pure functions from a manifest to documents.

What goes in: how each object looks, and how a user's pod template is merged. What stays out: when
it is made (`dlion_operator.decide`) and how it gets there (`dlion_operator.reconcile`).
"""

from dlion_operator.children.exposing import worker_service
from dlion_operator.children.issuing_request import authority_certificate
from dlion_operator.children.keeping import keeper_objects
from dlion_operator.children.routing import worker_routes
from dlion_operator.children.run_objects import config_map, headless_service, to_follow
from dlion_operator.children.worker_jobs import worker_job

__all__ = [
    "authority_certificate",
    "config_map",
    "headless_service",
    "keeper_objects",
    "to_follow",
    "worker_job",
    "worker_routes",
    "worker_service",
]
