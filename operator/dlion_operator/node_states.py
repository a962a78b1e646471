"""Whether the nodes of pods that should be gone are there and ready, as the API server knows it.

A pod that is deleted by force on a node that works goes on running beside its successor. `tidying`
asks for a node only where it would release a pod; `reconcile` looks here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

from dlion_api.errors import DLionError
from dlion_operator.cluster import Cluster, Kind, RefusedError

_LOG = logging.getLogger(__name__)


class NodeState(StrEnum):
    """Of one node."""

    READY = "ready"
    NOT_READY = "not ready"
    """Its condition Ready is False or Unknown, or it has none."""
    ABSENT = "absent"
    FORBIDDEN = "forbidden"
    """The operator may not read nodes."""
    UNANSWERED = "unanswered"
    """The API server did not say."""


class NodeStates:
    """Looks nodes up, each time anew: a state that is remembered may be wrong by then."""

    def __init__(self, cluster: Cluster, *, may_ask: bool) -> None:
        """`may_ask`: whether the operator has rights over the whole cluster."""
        self._cluster = cluster
        self._may_ask = may_ask

    async def of(self, nodes: Collection[str]) -> Mapping[str, NodeState]:
        """The state of each of these nodes, by its name."""
        return {name: await self._look(name) for name in sorted(nodes)}

    async def _look(self, name: str) -> NodeState:
        if not self._may_ask:
            return NodeState.FORBIDDEN
        try:
            node = await self._cluster.get(Kind.NODE, "", name)
        except RefusedError:
            return NodeState.FORBIDDEN
        except DLionError as error:
            _LOG.warning("node %s: %s", name, error)
            return NodeState.UNANSWERED
        if node is None:
            return NodeState.ABSENT
        return NodeState.READY if _is_ready(node) else NodeState.NOT_READY


def _is_ready(node: Mapping[str, Any]) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
