"""Kubernetes events on DLionJobs: reasons are API (docs/conditions.md), words are for people."""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from dlion_api.cluster_names import MANAGER
from dlion_api.errors import DLionError
from dlion_operator.cluster import Cluster, Document, RefusedError
from dlion_operator.decisions import Notice
from dlion_operator.statuses import as_kubernetes

_LOG = logging.getLogger(__name__)

AGAIN_AFTER_S = 60.0
"""The same reason is not told of a job more often."""
MOST_REMEMBERED = 4096
MOST_WAITING = 64
"""Events of a job that are kept for later, the newest."""
LONGEST_MESSAGE = 1024
"""What the API takes."""


class Notices:
    """Posts events; one that the API server refuses is logged and forgotten."""

    def __init__(
        self, cluster: Cluster, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._cluster = cluster
        self._now = now
        self._told: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Job's UID and reason → when that was told last."""

    async def post_all(self, about: Document, notices: Sequence[Notice]) -> list[Notice]:
        """Those of them for which the API server has no answer now; it is asked no further then."""
        for number, notice in enumerate(notices):
            try:
                await self.post(about, notice)
            except DLionError as error:
                _LOG.warning("event %s is posted later: %s", notice.reason, error)
                return list(notices[number:])[-MOST_WAITING:]
        return []

    async def post(self, about: Document, notice: Notice) -> None:
        """An event on that object, unless its like was posted a moment ago.

        Raises: DLionError where it may be posted later.
        """
        metadata = about["metadata"]
        key = (str(metadata["uid"]), f"{notice.reason} {notice.message}")
        last_s = self._told.get(key)
        if last_s is not None and time.monotonic() - last_s < AGAIN_AFTER_S:
            return
        at = as_kubernetes(self._now())
        event: Document = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{secrets.token_hex(8)}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": notice.type,
            "reason": notice.reason,
            "message": notice.message[:LONGEST_MESSAGE],
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": notice.count,
        }
        try:
            await self._cluster.create(event)
        except RefusedError as error:
            _LOG.warning("event %s could not be posted: %s", notice.reason, error)
        self._told[key] = time.monotonic()
        while len(self._told) > MOST_REMEMBERED:
            self._told.popitem(last=False)
