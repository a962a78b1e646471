"""The end of the run for one worker: final state, averaged model, departure.

All have finished the iteration at which a worker met a stop condition. The lowest live rank of each
site, its *lead*, averages the weights of all reachable workers. It saves the better of the average
and the best replica. The others stay until the leads that they see have saved; the next rank
replaces a lost lead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_core.lifecycle.inbox import StopKind, stop_message
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.links.events import StateRequest
from dlion_core.policies.interface import Message
from dlion_worker.trainer.start_up_times import process_age_s
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.training.site_model import (
    CollectedReplica,
    choose_model,
    ranks_in_saved_model,
    save_site_model,
    site_leads,
)
from dlion_worker.training.snapshot import TrainingState, unpack
from dlion_worker.transport.peer_exchange import PeerExchange

_LOG = logging.getLogger(__name__)

SLICE_S = 0.1
LEAVE_SLICE_S = 0.05
LEAVE_WITHIN_S = 0.5
"""A worker that was asked to end waits no longer than this for slow links."""


class Shutdown:
    """The end of the run for one worker."""

    def __init__(
        self,
        *,
        job: Job,
        rank: Rank,
        exchange: PeerExchange,
        inbox: WaitingInbox,
        reporter: Reporter,
        accuracy_of: Callable[[TrainingState], float],
        save: Callable[[Path, TrainingState], None],
        interrupted: Callable[[], bool],
        missing: Callable[[set[Rank]], set[Rank]],
        on_saved: Callable[[Path], None] = lambda _folder: None,
    ) -> None:
        """`missing(linked)`: unlinked workers that must be awaited. `on_saved(folder)`: called with
        the folder of the site's model; returns when it is stored safely."""
        self._on_saved = on_saved
        self._missing = missing
        self._job = job
        self._rank = rank
        self._exchange = exchange
        self._inbox = inbox
        self._reporter = reporter
        self._accuracy_of = accuracy_of
        self._save = save
        self._interrupted = interrupted
        self._since_s = time.time() - process_age_s()
        """A model file older than this belongs to an earlier run in the same folder."""

    def run(
        self, own: CollectedReplica, *, results_dir: Path, stop_reason: str
    ) -> tuple[Rank, ...]:
        """Take part in the end of the run until this worker is no longer needed.

        Returns the ranks in the model that it saved; empty: it saved none. A worker that has saved
        leaves last, so that the others learn of it.
        """
        inbox, ranks_in_saved_model = self._inbox, tuple[Rank, ...]()
        while not self._interrupted():
            missing = self._missing(inbox.linked)
            alive = {*inbox.linked, *missing, self._rank}
            leads = site_leads(self._job, alive, saved_by=inbox.saved)
            if ranks_in_saved_model:
                if inbox.linked <= inbox.saved:
                    break
            elif self._rank in leads:
                if inbox.linked <= inbox.stopped and not missing:
                    replicas = self._gather(own)
                    if not self._save_model(replicas, results_dir, stop_reason):
                        break
                    self._broadcast(stop_message(stop_reason, own.iteration, StopKind.SAVED))
                    ranks_in_saved_model = tuple(replica.rank for replica in replicas)
                    continue
            elif not leads:
                break
            inbox.wait(SLICE_S)
        return ranks_in_saved_model

    def _broadcast(self, message: Message) -> None:
        self._inbox.stop_message = message
        for peer in sorted(self._inbox.linked):
            self._exchange.send(peer, message)

    def _gather(self, own: CollectedReplica) -> list[CollectedReplica]:
        replicas = [own]
        for peer in sorted(self._inbox.linked):
            try:
                snapshot = self._exchange.pull_state(peer, StateRequest(weights_only=True))
                state = unpack(bytes(snapshot.payload), own.state, weights_only=True)
            except (UnavailableError, ContractError) as error:
                self._reporter.event(
                    EventReason.REPLICA_MISSING, f"worker {peer}: {error}", warning=True
                )
                continue
            replicas.append(CollectedReplica(peer, state, snapshot.samples, snapshot.iteration))
        self._report_unlinked()
        return sorted(replicas, key=lambda replica: replica.rank)

    def _report_unlinked(self) -> None:
        here = {*self._inbox.linked, self._rank}
        if unlinked := sorted({worker.rank for worker in self._job.workers()} - here):
            message = f"worker{'s' * (len(unlinked) > 1)} {', '.join(map(str, unlinked))}: no link"
            self._reporter.event(EventReason.REPLICA_MISSING, message, warning=True)

    def _save_model(
        self, replicas: list[CollectedReplica], results_dir: Path, stop_reason: str
    ) -> bool:
        """Save the site's model. Return False if the saved one holds more replicas.

        That happens if others of the site ended before this worker became its lead.
        """
        site = self._job.worker(self._rank).site
        if len(replicas) < len(ranks_in_saved_model(results_dir, site, since_s=self._since_s)):
            message = f"worker {self._rank}: the site's saved model has more replicas and is kept"
            self._reporter.event(EventReason.REPLICA_MISSING, message, warning=True)
            return False
        about, state = choose_model(
            self._job, replicas, accuracy_of=self._accuracy_of, stop_reason=stop_reason
        )
        folder = save_site_model(about, state, save=self._save, results_dir=results_dir, site=site)
        self._reporter.event(
            EventReason.MODEL_SAVED,
            str(about),
            iteration=max(replica.iteration for replica in replicas),
        )
        self._on_saved(folder)
        return True


def announce_departure(
    exchange: PeerExchange, inbox: WaitingInbox, reason: str, iteration: int
) -> None:
    """Announce to all peers that this worker was asked to end, and let the message drain."""
    for peer in sorted(inbox.linked):
        exchange.send(peer, stop_message(reason, iteration, StopKind.LEAVING))
    end_s = time.monotonic() + LEAVE_WITHIN_S
    is_quiet = False
    while not is_quiet and time.monotonic() < end_s:
        time.sleep(LEAVE_SLICE_S)  # the exchange sends in its own thread
        is_quiet = not any(
            state.connected and (state.queued_bytes or state.unacknowledged_bytes)
            for state in exchange.link_counters().values()
        )
