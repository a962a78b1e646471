"""Report refused callers as events on the jobs that they concern.

Coordinator and federation count and log every refusal, including the keepers', which these report
when they follow. This module selects the ones worth an event (docs/conditions.md): not those of
normal operation, such as of a worker that a restarted operator does not know yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from dlion_api.names import JobKey
from dlion_api.protocol.refusals import RefusalReason
from dlion_api.spec import Job
from dlion_operator.coordinator.events import CallRefusedError
from dlion_operator.federation.refusals import FederationRefusalReason, StreamRefusedError
from dlion_operator.kubernetes.store import ObjectName
from dlion_operator.served_runs.worker_events import WorkerEvents

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
        FederationRefusalReason.BAD_CERTIFICATE,
        FederationRefusalReason.WRONG_SITE,
        FederationRefusalReason.MALFORMED,
        FederationRefusalReason.TOO_MUCH,
    }
)


class ReportableRun(Protocol):
    """A run that can receive events."""

    @property
    def job(self) -> Job: ...
    @property
    def events(self) -> WorkerEvents: ...


class RefusedCallers:
    """Adds events about refused callers to the runs that this site serves."""

    def __init__(
        self, served: Mapping[JobKey, ReportableRun], trigger: Callable[[ObjectName], None]
    ) -> None:
        """`served` is a live mapping of the served runs."""
        self._served = served
        self._trigger = trigger

    def at_coordinator(self, run: str, refusal: CallRefusedError) -> None:
        """Report a refusal by the coordinator. `run` is the run that the caller named.

        A caller of another run of the same job concerns the served one.
        """
        if refusal.reason not in AT_COORDINATOR:
            return
        job = run.rpartition("#")[0]
        for key in self._served:
            if f"{key.namespace}/{key.name}" == job:
                # Pods of an earlier run may still call before they are gone.
                warning = refusal.reason is not RefusalReason.WRONG_RUN
                self._record(
                    key, f"coordinator: {refusal.reason}", refusal.message, warning=warning
                )

    def at_keeper(self, run: JobKey, reason: str, message: str) -> None:
        """Report a refusal by the site's keeper of that run."""
        if run in self._served:
            self._record(run, f"keeper: {reason}", message, warning=True)

    def at_federation(self, refusal: StreamRefusedError) -> None:
        """Report a refusal by the federation, which concerns all runs with several sites."""
        if refusal.reason not in AT_FEDERATION:
            return
        for key, served in self._served.items():
            if len(served.job.spec.sites) > 1:
                self._record(key, f"federation: {refusal.reason}", refusal.message, warning=True)

    def _record(self, key: JobKey, kind: str, message: str, *, warning: bool) -> None:
        # The message may contain the caller's input, and is shown on terminals.
        text = "".join(each if each.isprintable() else "?" for each in message)
        if self._served[key].events.refuse(kind, text, warning=warning):
            self._trigger(ObjectName(key.namespace, key.name))
