"""Report refused callers as events on the jobs that they concern.

Coordinator and federation count and log every refusal, including the keepers', which these report
when they follow. This module selects the ones worth an event (docs/conditions.md): not those of
normal operation, such as of a worker that a restarted operator does not know yet.
"""

from collections.abc import Callable, Mapping

from dlion_api.names import JobKey
from dlion_api.protocol.refusals import RefusalReason
from dlion_operator.coordinator.events import CallRefusedError
from dlion_operator.federation.refusals import FederationRefusalReason, StreamRefusedError
from dlion_operator.kubernetes.store import ObjectName
from dlion_operator.served_runs.site_run_state import SiteRunState

NORMAL_AT_COORDINATOR = (
    RefusalReason.FINISHED, RefusalReason.NOT_JOINED, RefusalReason.NO_AUTHORITY
)  # fmt: skip
NORMAL_AT_FEDERATION = (FederationRefusalReason.REPLACED, FederationRefusalReason.SILENT)


class RefusedCallers:
    """Adds events about refused callers to the runs that this site serves."""

    def __init__(
        self, served: Mapping[JobKey, SiteRunState], trigger: Callable[[ObjectName], None]
    ) -> None:
        """`served` is a live mapping of the served runs."""
        self._served = served
        self._trigger = trigger

    def at_coordinator(self, run: str, refusal: CallRefusedError) -> None:
        """Report a refusal by the coordinator. `run` is the run that the caller named.

        A caller of another run of the same job concerns the served one.
        """
        if refusal.reason in NORMAL_AT_COORDINATOR:
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
        if run in self._served:
            self._record(run, f"keeper: {reason}", message, warning=True)

    def at_federation(self, refusal: StreamRefusedError) -> None:
        """Report a refusal by the federation, which concerns all runs with several sites."""
        if refusal.reason in NORMAL_AT_FEDERATION:
            return
        for key, served in self._served.items():
            if len(served.job.spec.sites) > 1:
                self._record(key, f"federation: {refusal.reason}", refusal.message, warning=True)

    def _record(self, key: JobKey, kind: str, message: str, *, warning: bool) -> None:
        # The message may contain the caller's input, and is shown on terminals.
        text = "".join(each if each.isprintable() else "?" for each in message)
        if self._served[key].events.refuse(kind, text, warning=warning):
            self._trigger(ObjectName(key.namespace, key.name))
