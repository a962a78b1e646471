"""Look up whether nodes exist and are ready, for pods that should be gone.

A pod that is force-deleted on a working node keeps running beside its successor. `reconcile` looks
nodes up only where `garbage_collection` would release a pod.
"""

import logging
from enum import StrEnum

from dlion_api.errors import DLionError
from dlion_operator.kubernetes.client import Kind, KubernetesClient, RequestRefusedError
from dlion_operator.model.job_view import is_true

_LOG = logging.getLogger(__name__)


class NodeState(StrEnum):
    READY = "ready"
    NOT_READY = "not ready"
    """Its condition Ready is False, Unknown or absent."""
    ABSENT = "absent"
    FORBIDDEN = "forbidden"
    """The operator may not read nodes."""
    UNANSWERED = "unanswered"


async def read_node_state(cluster: KubernetesClient, name: str) -> NodeState:
    """Return the node's state. Nothing is cached, since a cached state may be outdated."""
    try:
        node = await cluster.get(Kind.NODE, "", name)
    except RequestRefusedError:
        return NodeState.FORBIDDEN
    except DLionError as error:
        _LOG.warning("node %s: %s", name, error)
        return NodeState.UNANSWERED
    if node is None:
        return NodeState.ABSENT
    return NodeState.READY if is_true(node, "Ready") else NodeState.NOT_READY
