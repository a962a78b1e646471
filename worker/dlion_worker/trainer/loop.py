"""The training loop of one worker: directive, gradient, policies, arrivals.

Runs on the main thread and drives `lifecycle.step_cycle`. Only waiting for peers blocks. Training
errors, such as a loss that is not finite, raise; peers' faults do not.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Directive
from dlion_api.spec import Job
from dlion_core.lifecycle.catch_up import CatchUp, CatchUpOutcome
from dlion_core.lifecycle.event_dispatcher import EventDispatcher
from dlion_core.lifecycle.inbox import stop_message
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.step_cycle import (
    ComputeStep,
    EndRun,
    EndStep,
    Rejoin,
    StepCycle,
    StepDuration,
    StepPhase,
    WaitForEvents,
)
from dlion_core.lifecycle.stop_claims import StopDoubts
from dlion_core.lifecycle.stopping import JobProgress, own_stop, stop_reason
from dlion_core.links.events import Refused
from dlion_core.phase_clock import PhaseClock, measured_by
from dlion_core.policies.interface import RejectMessage
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_worker.trainer.awaited_peers import AwaitedPeers
from dlion_worker.trainer.background.peer_refusals import PeerRefusalReporter
from dlion_worker.trainer.background.quota_watch import QuotaWatch
from dlion_worker.trainer.background.sidecar_client import SidecarClient
from dlion_worker.trainer.step_clock import StepClock
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.training.checkpointing import Checkpointer
from dlion_worker.training.datasets import BatchStream
from dlion_worker.training.evaluation import weights_hash
from dlion_worker.training.programs.callbacks import TrainingCallbacks
from dlion_worker.training.replica import LocalReplica
from dlion_worker.transport import CountedLinks, PeerExchange

WAIT_SLICE_S = 0.2
"""How often a blocked loop checks for stop requests and lost peers."""
STOPPED_PEER_WAIT_S = 2.0
"""How long a peer that has stopped may still deliver outstanding messages."""
FINISH_ROUND_WITHIN_S = 2.0
"""How long a worker that the coordinator asks to stop continues to the end of its round of local
steps. All replicas are equal there, and one evaluation is that of all."""


@dataclass
class TrainerComponents:
    job: Job
    rank: Rank
    replica: LocalReplica
    stream: BatchStream
    machine: IterationGuard
    exchange: PeerExchange
    sidecar: SidecarClient
    reporter: Reporter
    inbox: WaitingInbox
    refusals: PeerRefusalReporter


@dataclass(frozen=True)
class _Links:
    """The exchange and the sidecar, as the steps use them."""

    exchange: PeerExchange
    sidecar: SidecarClient

    def latest_directive(self) -> Directive | None:
        return self.sidecar.latest_directive()

    def set_budgets(self, directive: Directive) -> None:
        self.exchange.set_budgets(directive.budget_bytes, directive.bandwidth_bytes_per_s)

    def sendable_bytes(self) -> Mapping[Rank, int]:
        return self.exchange.sendable_bytes()

    def one_way_delays_s(self) -> Mapping[Rank, float]:
        return self.exchange.one_way_delays_s()

    def set_iteration(self, iteration: int) -> None:
        self.exchange.set_iteration(iteration)


class TrainingLoop:
    """Trains until a stop condition is met; `run` returns the reason."""

    def __init__(
        self,
        parts: TrainerComponents,
        *,
        progress: JobProgress,
        checkpointer: Checkpointer,
        external_stop: Callable[[], str | None],
        interrupted: Callable[[], bool],
        after_step: Callable[[JobProgress], None],
        training_set_samples: Callable[[bool], int],
        callbacks: TrainingCallbacks,
    ) -> None:
        """`training_set_samples`: of all workers; 0 if unknown. Its argument: whether this worker
        has made a step."""
        self._callbacks, self._loss = callbacks, 0.0
        self._parts, self._links = parts, CountedLinks(parts.exchange.link_counters)
        self.progress = progress
        self._checkpointer = checkpointer
        self._external_stop = external_stop
        self._interrupted = interrupted
        self._after_step = after_step
        self._samples = training_set_samples
        self._instructions = InstructionExecutor(
            parts,
            progress,
            send=parts.exchange.send,
            refuse=lambda rejected, _: self._refuse(rejected),
            cpu_s=time.thread_time,
        )
        self._cycle = StepCycle(
            EventDispatcher(self._instructions, parts.inbox),
            _Links(parts.exchange, parts.sidecar),
            checkpointer,
        )
        self._phases = PhaseClock(time.monotonic)
        parts.inbox.doubt = StopDoubts(
            parts.job, parts.rank, progress,
            elapsed_s=parts.reporter.now_s,
            training_set_samples=self._training_set_samples,
            max_lead=parts.machine.max_lead,
            stops_itself=lambda: external_stop() is not None,
        )  # fmt: skip
        self._quota, self._awaited = QuotaWatch(), AwaitedPeers(parts.reporter)
        self._silent_s = 0.0  # for how long only stopped peers were awaited
        self._finish_round_by_s: float | None = None
        self._trained_before_s = progress.trained_s
        self._began_s = time.monotonic()
        self._clock = self._new_clock()

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> str | None:
        """Iterate until the run ends, and return the reason.

        None: the run continues without this worker, which must call `reset` and rejoin. It lost the
        quorum or could not catch up. A local step without an update is undone.
        """
        self._parts.exchange.set_iteration(self.progress.iteration)
        changes = self._quota.reporting_changes(self._parts.sidecar.send)
        with changes, measured_by(self._phases):
            reason = self._iterate() if self._begin() else self._over()
        if reason is not None and not self._interrupted():
            self._announce(reason)
        return reason

    def reset(self, machine: IterationGuard) -> None:
        """Prepare for another `run`, with a machine that has received no events yet."""
        self._cycle.reset(machine)
        self._checkpointer.reset(machine)

    @property
    def lacks_quorum(self) -> bool:
        """Whether too few sites are connected for this worker to continue."""
        return self._cycle.lacks_quorum

    def _begin(self) -> bool:
        """Catch up to the current iteration. Return False on failure."""
        parts = self._parts
        if not parts.inbox.peers_ahead:
            self._cycle.handle(parts.inbox.start(self.progress.iteration))
            return True
        catch_up = CatchUp(
            parts.inbox,
            dispatcher=self._cycle.dispatcher,
            send=parts.exchange.send,
            before_pass=self._before_pass,
            after_pass=self._checkpointer.end_step,
        )
        catch_up.begin()
        while (
            outcome := catch_up.advance()
        ) is CatchUpOutcome.IN_PROGRESS and self._over() is None:
            catch_up.take(parts.inbox.wait(WAIT_SLICE_S))
        if outcome is not CatchUpOutcome.CAUGHT_UP:
            self._checkpointer.undo_step()
        return outcome is CatchUpOutcome.CAUGHT_UP

    def _before_pass(self, iteration: int) -> None:
        self._checkpointer.begin_step()
        global_batch_size = self._cycle.global_batch_size()
        self.progress.advance(iteration, local_batch_size=0, global_batch_size=global_batch_size)
        self._parts.exchange.set_iteration(iteration)

    def _iterate(self) -> str | None:
        while True:
            match self._cycle.next(self._over_after_round, gives_up=self._gives_up):
                case EndRun(reason):
                    return reason
                case Rejoin():
                    return None
                case ComputeStep(batch_size=batch_size):
                    self._compute(batch_size)
                case EndStep():
                    self._report()
                    self._callbacks.step_ended(self._loss, self._cycle.local_batch_size)
                    self._after_step(self.progress)
                case WaitForEvents():
                    self._wait()

    def _compute_share(self) -> float:
        directive = self._parts.sidecar.latest_directive()
        return 1.0 if directive is None else directive.compute_share

    def _compute(self, batch_size: int) -> None:
        self._clock.rest(self._compute_share, until=lambda: self._over() is not None)
        parts = self._parts
        self._silent_s = 0.0
        self._callbacks.step_begins()
        self._clock = self._new_clock()
        self._awaited.step_begins()
        with self._clock.own():
            x_B, y_B = parts.stream.next(batch_size)
            result = parts.replica.step(x_B, y_B)
        self._clock.compute_s = time.monotonic() - self._clock.began_s
        self._loss = result.loss
        self._cycle.step_computed(result, samples=len(y_B), trained_s=self._trained_s())
        self._cycle.handle(parts.inbox.drain())

    def _wait(self) -> None:
        """Wait for the next events, and process them."""
        inbox, awaited = self._parts.inbox, self._parts.machine.waiting_for()
        began_s = time.monotonic()
        events = inbox.wait(WAIT_SLICE_S)
        waited_s = time.monotonic() - began_s
        if self._cycle.phase is StepPhase.OPEN:
            self._clock.waited_s += waited_s
            self._awaited.waited(awaited, waited_s, iteration=self.progress.iteration)
            is_over = inbox.stop_reason is not None
            is_silent = is_over and awaited <= inbox.stopped and not events
            self._silent_s = self._silent_s + waited_s if is_silent else 0.0
        self._cycle.handle(events)
        if self.lacks_quorum:
            self.report_links()  # observers must see a cut-off worker, too
            self._after_step(self.progress)  # a checkpoint may be due

    def _refuse(self, rejected: RejectMessage) -> None:
        """Report a rejected message. The exchange counts what breaks the protocol against its
        sender, and reports it (`PeerRefusalReporter.filtered`)."""
        peer, reason, kind = rejected.peer, rejected.reason, rejected.kind
        if rejected.is_violation:
            self._parts.exchange.record_violation(peer, reason, kind)
        else:
            self._parts.refusals.report([Refused(peer, reason, kind=kind)])

    def _gives_up(self) -> bool:
        """Whether the open step will get no more answers.

        That is so if a peer stopped before it, if all awaited peers have stopped and deliver
        nothing for a while, or if this worker must end: others may end too, and an update without
        them would differ.
        """
        self._over()  # this worker's own stop confirms those of peers
        stopped_at = self._parts.inbox.stop_iteration
        return (
            (stopped_at is not None and stopped_at < self.progress.iteration)
            or self._silent_s > STOPPED_PEER_WAIT_S
            or self._interrupted()
        )

    def _trained_s(self) -> float:
        return self._trained_before_s + time.monotonic() - self._began_s

    def _over(self) -> str | None:
        inbox = self._parts.inbox
        if inbox.stop_reason is None and (reason := self._external_stop() or self._own_limit()):
            inbox.confirm_stops()
            return inbox.stop_reason or reason
        return inbox.stop_reason

    def _own_limit(self) -> str | None:
        self.progress.trained_s = self._trained_s()
        stop = own_stop(self._parts.job.spec, self._parts.rank)
        samples, step_s = self._training_set_samples(), self._cycle.next_step_s
        return stop_reason(stop, self.progress, training_set_samples=samples, next_step_s=step_s)

    def _over_after_round(self) -> str | None:
        """As `_over`, but the coordinator's request waits for the end of a round that is near."""
        reason = self._over()
        if reason is None or self._own_limit() or not self._may_finish_round():
            return reason
        now_s = time.monotonic()
        if self._finish_round_by_s is None:
            self._finish_round_by_s = now_s + FINISH_ROUND_WITHIN_S
        return None if now_s < self._finish_round_by_s else reason

    def _may_finish_round(self) -> bool:
        """Whether this worker is within a round, and no peer and no signal has ended it."""
        is_ended = self._parts.inbox.stop_reason or self._interrupted() or self.lacks_quorum
        return self._parts.machine.is_mid_round and not is_ended

    def _training_set_samples(self) -> int:
        return self._samples(self._cycle.local_batch_size > 0)

    def _announce(self, reason: str) -> None:
        inbox = self._parts.inbox
        if last := self._parts.machine.round_at(inbox.stop_iteration):
            self._parts.replica.end_with(last)
        inbox.stop_message = stop_message(reason, (last or self.progress).iteration)
        for peer in sorted(inbox.linked):
            self._parts.exchange.send(peer, inbox.stop_message)

    # ---- reports -------------------------------------------------------------------------------

    def _report(self) -> None:
        parts, clock = self._parts, self._clock
        sent_s, received_s = parts.exchange.framing_s()
        took = StepDuration(
            compute_s=clock.compute_s,
            wall_s=time.monotonic() - clock.began_s,
            waited_s=clock.waited_s,
            cpu_s=time.process_time() - clock.began_cpu_s,
            exchange_cpu_s=self._exchange_cpu_s(),
            phases=replace(
                self._phases.read(),
                link_send_s=sent_s - clock.link_began_s[0],
                link_receive_s=received_s - clock.link_began_s[1],
            ),
        )
        clock.busy_s = took.wall_s - took.waited_s
        with clock.own():
            has_hash = parts.job.spec.trainer.hash_weights
            self._cycle.report_step(
                took,
                training_set_samples=self._training_set_samples(),
                weights_hash=weights_hash(parts.replica.model.weights_D) if has_hash else "",
                passes=parts.stream.passes,
                earlier_passes=parts.stream.earlier_passes,
                trained_s=round(self._trained_s(), 6),
            )
        parts.refusals.report(parts.inbox.take_refusals())
        self.report_links()
        self._report_to_sidecar(took)

    def report_links(self, *, now: bool = False) -> None:
        """Report link counters when due, or `now`: then to the sidecar, too, as no step follows."""
        read, directive = self._links.read, self._cycle.directive
        counted, iteration = lambda: read(is_last=now), self.progress.iteration
        self._parts.reporter.links(counted, directive, iteration, now=now)
        if now:
            self._parts.sidecar.send(*self._parts.exchange.take_deliveries())

    def _report_to_sidecar(self, took: StepDuration) -> None:
        """Send deliveries before the timing, which closes their iteration."""
        parts = self._parts
        parts.sidecar.send(*parts.exchange.take_deliveries())
        quota_changed = self._quota.changed()
        parts.sidecar.send(
            self._cycle.timing(
                took,
                compute_cpu_s=self._own_cpu_s(),
                exchanged_bytes=parts.exchange.wire_bytes() - self._clock.exchange_began_bytes,
                quota_changed=quota_changed,
            )
        )
        if (allowance := self._quota.allowance(now=quota_changed)) is not None:
            parts.sidecar.send(allowance)

    def _exchange_cpu_s(self) -> float:
        """CPU seconds spent on peers in this iteration.

        Counts gRPC, TLS, policies, codecs, wake-ups and link accounting.
        """
        clock = self._clock
        threads_s = self._parts.exchange.cpu_s() - clock.exchange_thread_began_s
        update_s = self._instructions.update_cpu_s - clock.update_began_cpu_s
        main_s = time.thread_time() - clock.began_thread_s
        return threads_s + main_s - clock.own_thread_s - update_s

    def _own_cpu_s(self) -> float:
        """CPU seconds that this iteration would have taken without peers."""
        return max(0.0, time.process_time() - self._clock.began_cpu_s - self._exchange_cpu_s())

    def _new_clock(self) -> StepClock:
        self._phases.restart()
        return StepClock(
            began_s=time.monotonic(),
            began_cpu_s=time.process_time(),
            exchange_thread_began_s=self._parts.exchange.cpu_s(),
            exchange_began_bytes=self._parts.exchange.wire_bytes(),
            update_began_cpu_s=self._instructions.update_cpu_s,
            began_thread_s=time.thread_time(),
            link_began_s=self._parts.exchange.framing_s(),
        )
