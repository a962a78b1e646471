"""Callers that this site's operator or a keeper refused, as events on the jobs that they concern.

Owns which refusals are told (docs/conditions.md): not those of an orderly life, such as of a worker
that the operator does not know yet after its own restart. Called by coordinator and federation,
which count and log all of them; the coordinator hears of the keepers' as these follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from dlion_api.names import JobKey
from dlion_api.refusals import RefusalReason
from dlion_api.spec import Job
from dlion_operator.coordinator.events import Refuse
from dlion_operator.federation.events import RefusalReason as SiteRefusalReason
from dlion_operator.federation.events import Refuse as RefuseSite
from dlion_operator.store import ObjectName
from dlion_operator.worker_news import WorkerNews

AT_COORDINATOR = frozenset(
    {
        RefusalReason.BAD_TOKEN,
        RefusalReason.REPLAYED_TOKEN,
        RefusalReason.WRONG_RUN,
        RefusalReason.UNKNOWN_WORKER,
        RefusalReason.SPEC_DIFFERS,
        RefusalReason.OLD_INCARNATION,
        RefusalReason.MALFORMED,
        RefusalReason.TOO_MUCH,
    }
)
AT_FEDERATION = frozenset(
    {
        SiteRefusalReason.BAD_CERTIFICATE,
        SiteRefusalReason.WRONG_SITE,
        SiteRefusalReason.MALFORMED,
        SiteRefusalReason.TOO_MUCH,
    }
)


class Served(Protocol):
    """A run that is served."""

    @property
    def job(self) -> Job: ...
    @property
    def news(self) -> WorkerNews: ...


class RefusedCallers:
    """Tells the runs that are served of callers that were refused."""

    def __init__(
        self, served: Mapping[JobKey, Served], trigger: Callable[[ObjectName], None]
    ) -> None:
        """`served` changes as runs come and go."""
        self._served = served
        self._trigger = trigger

    def at_coordinator(self, run: str, refusal: Refuse) -> None:
        """By the coordinator, which the caller named that run; an earlier or later run of the same
        job concerns the one that is served."""
        if refusal.reason not in AT_COORDINATOR:
            return
        job = run.rpartition("#")[0]
        for key in self._served:
            if f"{key.namespace}/{key.name}" == job:
                # Pods of an earlier run may ask once more before they are gone.
                warning = refusal.reason is not RefusalReason.WRONG_RUN
                self._tell(key, f"coordinator: {refusal.reason}", refusal.message, warning=warning)

    def at_keeper(self, run: JobKey, reason: str, words: str) -> None:
        """By the site's keeper of that run."""
        if run in self._served:
            self._tell(run, f"keeper: {reason}", words, warning=True)

    def at_federation(self, refusal: RefuseSite) -> None:
        """By the federation: that concerns all runs of several sites."""
        if refusal.reason not in AT_FEDERATION:
            return
        for key, served in self._served.items():
            if len(served.job.spec.sites) > 1:
                self._tell(key, f"federation: {refusal.reason}", refusal.message, warning=True)

    def _tell(self, key: JobKey, kind: str, message: str, *, warning: bool) -> None:
        # Whoever was refused may have chosen the words, which people read on terminals.
        words = "".join(each if each.isprintable() else "?" for each in message)
        if self._served[key].news.refuse(kind, words, warning=warning):
            self._trigger(ObjectName(key.namespace, key.name))
