"""The end of the run for one worker: final state, averaged model, departure.

All have finished the iteration at which a worker met a stop condition. The lowest live rank of each
site, its *lead*, averages the weights of all reachable workers. It saves the better of the average
and the best replica. The others stay until the leads that they see have saved; the next rank
replaces a lost lead.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_core.lifecycle.inbox import StopKind, stop_message
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.links.events import StateRequest
from dlion_core.policies.claims.samples import max_run_samples
from dlion_core.policies.interface import Message
from dlion_worker.trainer.process_times import ProcessPhase, process_age_s
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.training.evaluation import replica_hash
from dlion_worker.training.site_model import (
    CollectedReplica,
    SavedModel,
    choose_model,
    ranks_in_saved_model,
    save_site_model,
    site_leads,
)
from dlion_worker.training.snapshot import TrainingState, unpack
from dlion_worker.transport.peer_exchange import PeerExchange

_LOG = logging.getLogger(__name__)

MAX_PULLS = 4
"""Replicas that a lead pulls at once."""

SLICE_S = 0.1
LEAVE_SLICE_S = 0.05
LEAVE_WITHIN_S = 0.5
"""A worker that was asked to end waits no longer than this for slow links."""


@dataclass(frozen=True, kw_only=True)
class Shutdown:
    job: Job
    rank: Rank
    exchange: PeerExchange
    inbox: WaitingInbox
    reporter: Reporter
    accuracy_of: Callable[[TrainingState], float]
    save: Callable[[Path, TrainingState], None]
    interrupted: Callable[[], bool]
    missing: Callable[[set[Rank]], set[Rank]]
    """Given the linked workers: the unlinked ones that must be awaited."""
    enter: Callable[[ProcessPhase], None]
    """Begins a phase of the process."""
    on_saved: Callable[[SavedModel], None]
    """Gets the site's model; returns when it is stored safely."""

    def run(
        self, own: CollectedReplica, *, results_dir: Path, stop_reason: str
    ) -> tuple[Rank, ...]:
        """Take part in the end of the run until this worker is no longer needed.

        Returns the ranks in the model that it saved; empty: it saved none. A worker that has saved
        leaves last, so that the others learn of it.
        """
        inbox, ranks_in_saved_model = self.inbox, tuple[Rank, ...]()
        while not self.interrupted():
            missing = self.missing(inbox.linked)
            alive = {*inbox.linked, *missing, self.rank}
            leads = site_leads(self.job, alive, saved_by=inbox.saved)
            if ranks_in_saved_model:
                if inbox.linked <= inbox.saved:
                    break
            elif self.rank in leads:
                if inbox.linked <= inbox.stopped and not missing:
                    replicas = self._gather(own)
                    if not self._save_model(replicas, results_dir, stop_reason):
                        break
                    self._broadcast(stop_message(stop_reason, own.iteration, StopKind.SAVED))
                    ranks_in_saved_model = tuple(replica.rank for replica in replicas)
                    continue
            elif not leads:
                break
            self.enter(ProcessPhase.FINAL_WAIT)
            inbox.wait(SLICE_S)
        return ranks_in_saved_model

    def _broadcast(self, message: Message) -> None:
        self.inbox.stop_message = message
        for peer in sorted(self.inbox.linked):
            self.exchange.send(peer, message)

    def _gather(self, own: CollectedReplica) -> list[CollectedReplica]:
        """Pull the replicas of linked peers, several at once: one peer's uplink seldom fills this
        worker's downlink. Those that are equal to its own are not sent."""
        self.enter(ProcessPhase.GATHER)
        peers = sorted(self.inbox.linked)
        own_hash = replica_hash(own.state.weights_D, own.state.model_state_S)
        wanted = StateRequest(weights_only=True, unless_hash=own_hash)
        threads = ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="replicas")
        try:
            pulled = list(threads.map(lambda peer: self._pull(peer, wanted, own), peers))
        finally:  # a signal does not wait for slow peers: closing the exchange ends their pulls
            threads.shutdown(wait=False, cancel_futures=True)
        self._report_unlinked()
        replicas = [own, *(replica for replica in pulled if replica is not None)]
        return sorted(replicas, key=lambda replica: replica.rank)

    def _pull(
        self, peer: Rank, wanted: StateRequest, own: CollectedReplica
    ) -> CollectedReplica | None:
        state = own.state
        try:
            snapshot = self.exchange.pull_state(peer, wanted)
            if not snapshot.is_equal:
                state = unpack(bytes(snapshot.payload), own.state, weights_only=True)
        except (UnavailableError, ContractError) as error:
            message = f"worker {peer}: {error}"
            self.reporter.event(EventReason.REPLICA_MISSING, message, warning=True)
            return None
        samples = self._counted_samples(peer, snapshot.samples, own.iteration)
        return CollectedReplica(peer, state, samples, snapshot.iteration)

    def _counted_samples(self, peer: Rank, claimed: int, iteration: int) -> int:
        """The samples by which a peer's replica counts: at most every sample of this run."""
        if not self.job.spec.exchange.trains(self.rank):
            return claimed  # a single replica counts, whatever its samples
        most = max_run_samples(self.job.spec, iteration)
        if claimed > most:
            message = (
                f"worker {peer} claims {claimed:,} samples; counted as {most:,}, all that were"
            )
            self.reporter.event(
                EventReason.MESSAGE_REFUSED, message, iteration=iteration, warning=True
            )
        return min(claimed, most)

    def _report_unlinked(self) -> None:
        here = {*self.inbox.linked, self.rank}
        if unlinked := sorted({worker.rank for worker in self.job.workers()} - here):
            message = f"worker{'s' * (len(unlinked) > 1)} {', '.join(map(str, unlinked))}: no link"
            self.reporter.event(EventReason.REPLICA_MISSING, message, warning=True)

    def _save_model(
        self, replicas: list[CollectedReplica], results_dir: Path, stop_reason: str
    ) -> bool:
        """Save the site's model. Return False if no replica was trained, or the saved model holds
        more replicas: others of the site ended before this worker became its lead.
        """
        site = self.job.worker(self.rank).site
        since_s = time.time() - process_age_s()  # an older file is of an earlier run
        if len(replicas) < len(ranks_in_saved_model(results_dir, site, since_s=since_s)):
            message = f"worker {self.rank}: the site's saved model has more replicas and is kept"
            self.reporter.event(EventReason.REPLICA_MISSING, message, warning=True)
            return False
        self.enter(ProcessPhase.EVALUATE)
        try:
            about, state = choose_model(
                self.job, replicas, accuracy_of=self.accuracy_of, stop_reason=stop_reason
            )
        except UnavailableError as error:
            self.reporter.event(EventReason.REPLICA_MISSING, str(error), warning=True)
            return False
        self.enter(ProcessPhase.SAVE)
        folder = save_site_model(about, state, save=self.save, results_dir=results_dir, site=site)
        self.reporter.event(
            EventReason.MODEL_SAVED,
            str(about),
            iteration=max(replica.iteration for replica in replicas),
        )
        self.on_saved(SavedModel(folder, about, tuple(replicas)))
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
