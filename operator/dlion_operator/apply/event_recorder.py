"""Post Kubernetes events on DLionJobs. Reasons are API (docs/conditions.md); messages are not."""

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from dlion_api.cluster_names import MANAGER
from dlion_api.errors import DLionError
from dlion_operator.kubernetes.client import Document, Kind, KubernetesClient, RequestRefusedError
from dlion_operator.model.job_view import format_time
from dlion_operator.plan.decisions import JobEvent

_LOG = logging.getLogger(__name__)

REPEAT_AFTER_S = 60.0
"""Minimum time between equal events on a job."""
MAX_REMEMBERED = 4096
MAX_PENDING = 64
"""Unposted events that are kept per job; the newest stay."""
MAX_MESSAGE_CHARACTERS = 1024
"""Limit of the API."""


class EventRecorder:
    """Posts events. An event that the API server rejects is dropped."""

    def __init__(
        self, cluster: KubernetesClient, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._cluster = cluster
        self._now = now
        self._last_posted_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Job's UID, reason and message → when that was last posted."""

    async def post_all(self, about: Document, events: Sequence[JobEvent]) -> list[JobEvent]:
        """Post these events. Return those that must wait because the API server does not answer."""
        for number, event in enumerate(events):
            try:
                await self.post(about, event)
            except DLionError as error:
                _LOG.warning("event %s will be posted later: %s", event.reason, error)
                return list(events[number:])[-MAX_PENDING:]
        return []

    async def post(self, about: Document, event: JobEvent) -> None:
        """Post an event, unless an equal one was posted shortly before.

        Raises: DLionError if it may be posted later.
        """
        metadata = about["metadata"]
        key = (str(metadata["uid"]), f"{event.reason} {event.message}")
        last_s = self._last_posted_s.get(key)
        if last_s is not None and time.monotonic() - last_s < REPEAT_AFTER_S:
            return
        at = format_time(self._now())
        name = {"name": metadata["name"], "namespace": metadata["namespace"]}
        document = Kind.EVENT.document(
            name | {"name": f"{metadata['name']}.{secrets.token_hex(8)}"},
            involvedObject={
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "uid": metadata["uid"],
            }
            | name,
            type=event.type,
            reason=event.reason,
            message=event.message[:MAX_MESSAGE_CHARACTERS],
            source={"component": MANAGER},
            reportingComponent=MANAGER,
            firstTimestamp=at,
            lastTimestamp=at,
            count=event.count,
        )
        try:
            await self._cluster.create(document)
        except RequestRefusedError as error:
            _LOG.warning("event %s could not be posted: %s", event.reason, error)
        self._last_posted_s[key] = time.monotonic()
        while len(self._last_posted_s) > MAX_REMEMBERED:
            self._last_posted_s.popitem(last=False)
