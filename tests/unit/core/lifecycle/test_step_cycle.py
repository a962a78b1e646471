"""Tests of the step cycle.

A worker begins no step while its policy waits for a peer. It finishes a step after the end of the
run, unless the awaited peers no longer answer or it does not train. A step abandoned at a barrier
does not count; elsewhere it does. A directive takes effect from the next step, its budgets before
the selection. The first batch is the same before and after the first directive. A gradient that is
not finite ends training with advice.

Left out: quorum (`test_quorum_gate.py`, `tests/property/test_quorum.py`); real loops
(`test_loop_cluster.py`).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from dlion_api.errors import DivergedError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import Directive, Peers, PhaseSeconds
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_core.lifecycle.event_dispatcher import EventDispatcher
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.lifecycle.step_cycle import (
    ComputeStep,
    EndRun,
    EndStep,
    StepCycle,
    StepDuration,
    StepPhase,
    WaitForEvents,
)
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.policies.interface import BudgetsChanged, LocalStepDone
from dlion_core.resource_control.resource_controller import ResourceController
from loop_cluster import synchronous_job

if TYPE_CHECKING:
    from dlion_core.policies.interface import Event

PEER = Rank(1)
SHARE = 96
"""Half of the default global batch."""


class Machine:
    """A policy that waits for the peers that the test names."""

    def __init__(self, log: list[Any]) -> None:
        self.awaited: frozenset[Rank] = frozenset()
        self.iteration = 0
        self._log = log

    def waiting_for(self) -> frozenset[Rank]:
        return self.awaited

    def next_iteration(self) -> int:
        return self.iteration + 1

    def handle(self, event: Event) -> list[Any]:
        if isinstance(event, LocalStepDone):
            self.iteration = event.iteration
        self._log.append(event)
        return []


class Worker:
    """A cycle of steps with links and a sidecar that the test moves by hand."""

    def __init__(
        self, *, workers: int = 2, has_barrier: bool = True, is_sensor: bool = False
    ) -> None:
        self.log: list[Any] = []
        self.directive: Directive | None = None
        self.progress, before = JobProgress(), JobProgress()
        self.machine = Machine(self.log)
        self.over: str | None = None
        self.gives_up = False
        note = self.log.append
        links = SimpleNamespace(
            latest_directive=lambda: self.directive, one_way_delays_s=dict,
            set_budgets=lambda directive: note(("budgets", directive.budget_bytes)),
            sendable_bytes=lambda: {PEER: 100}, set_iteration=lambda _: None,
        )  # fmt: skip
        undo = SimpleNamespace(
            begin_step=lambda: before.take(self.progress), end_step=lambda: note("end"),
            undo_step=lambda: self.progress.take(before),
        )  # fmt: skip
        nothing = lambda *_, **__: None  # noqa: E731
        job = synchronous_job(workers, 100, mode="synchronous" if has_barrier else "asynchronous")
        if is_sensor:
            exchange = replace(job.spec.exchange, topology="staged", policy="staged")
            job = replace(job, spec=replace(job.spec, exchange=exchange))
        parts = SimpleNamespace(
            job=job, rank=Rank(1 if is_sensor else 0), machine=self.machine,
            replica=SimpleNamespace(learning_rate=0.1),
            reporter=SimpleNamespace(
                rank=Rank(0), incarnation=1, now_s=float, event=nothing, directive=nothing,
                step=nothing,
            ),
        )  # fmt: skip
        self.job = job
        inbox = EventInbox(nothing, clock_s=float)
        instructions = InstructionExecutor(
            cast("Any", parts), self.progress, send=nothing, refuse=nothing
        )
        self.cycle = StepCycle(
            EventDispatcher(instructions, inbox), cast("Any", links), cast("Any", undo)
        )

    def next(self) -> object:
        return self.cycle.next(lambda: self.over, gives_up=lambda: self.gives_up)

    def compute(self, *, loss: float = 1.0) -> None:
        gradient_D, finite = np.ones(4, np.float32), loss < np.inf
        result = SimpleNamespace(loss=loss, gradient_D=gradient_D, finite=finite, features=None)
        self.cycle.step_computed(result, samples=8, trained_s=1.0)


def with_open_step(*, has_barrier: bool = True, is_sensor: bool = False) -> Worker:
    """Return a worker that waits for its peer within its first step."""
    worker = Worker(has_barrier=has_barrier, is_sensor=is_sensor)
    assert isinstance(worker.next(), ComputeStep)
    worker.machine.awaited = frozenset({PEER})
    worker.compute()
    assert worker.next() == WaitForEvents()
    return worker


def test_a_worker_that_does_not_train_waits_for_no_peer_once_the_run_is_over() -> None:
    sensor, other = with_open_step(is_sensor=True), with_open_step(has_barrier=False)
    for worker in (sensor, other):
        worker.over = "worker 0 has failed"
    assert sensor.next() == EndRun("worker 0 has failed")
    assert other.next() == WaitForEvents()


def test_no_step_begins_while_the_policy_waits_for_a_peer() -> None:
    worker = Worker()
    worker.machine.awaited = frozenset({PEER})
    assert worker.next() == WaitForEvents()
    worker.machine.awaited = frozenset()
    assert worker.next() == ComputeStep(1, SHARE)


def test_a_step_ends_once_no_peer_is_awaited_and_the_next_one_begins() -> None:
    worker = with_open_step()
    worker.machine.awaited = frozenset()
    assert worker.next() == EndStep()
    assert worker.log[-1] == "end"
    assert worker.next() == ComputeStep(2, SHARE)


def test_a_step_is_finished_although_the_run_is_over() -> None:
    worker = with_open_step()
    worker.over = "maxSteps 1 reached"
    assert worker.next() == WaitForEvents()
    worker.machine.awaited = frozenset()
    assert worker.next() == EndStep()
    assert worker.next() == EndRun("maxSteps 1 reached")


@pytest.mark.parametrize("has_barrier", [True, False])
def test_an_abandoned_step_counts_only_if_its_update_was_made(has_barrier: bool) -> None:
    worker = with_open_step(has_barrier=has_barrier)
    assert worker.progress.iteration == 1
    worker.over, worker.gives_up = "asked to stop", True
    assert worker.next() == EndRun("asked to stop")
    assert worker.progress.iteration == (0 if has_barrier else 1)
    assert worker.cycle.phase is StepPhase.IDLE


def test_a_directive_sets_the_next_batch_and_at_once_the_budgets() -> None:
    worker = Worker()
    assert worker.next() == ComputeStep(1, SHARE)
    worker.directive = Directive(1, 5, 40, {PEER: 1000}, {}, {}, "measured")
    worker.compute()
    assert worker.log[0] == ("budgets", {PEER: 1000})
    assert isinstance(worker.log[1], BudgetsChanged)
    assert worker.next() == EndStep()
    assert worker.next() == ComputeStep(2, 5)
    assert worker.cycle.global_batch_size() == 40


def test_the_same_directive_is_applied_once() -> None:
    worker = Worker()
    worker.directive = Directive(1, 5, 40, {PEER: 1000}, {}, {}, "measured")
    worker.next()
    worker.compute()
    assert worker.log.count(("budgets", {PEER: 1000})) == 1


def took(wall_s: float) -> StepDuration:
    return StepDuration(0.1, wall_s, wall_s - 0.1, 0.1, 0.0, PhaseSeconds())


@pytest.mark.parametrize(("has_barrier", "expected"), [(True, [0, 0, 5, 5, 5]), (False, [0] * 5)])
def test_in_lock_step_the_next_step_takes_as_long_as_the_shorter_of_the_last_two(
    has_barrier: bool, expected: list[float]
) -> None:
    worker = Worker(has_barrier=has_barrier)
    found = [worker.cycle.next_step_s]
    for wall_s in (5.0, 60.0, 5.0, 7.0):
        assert isinstance(worker.next(), ComputeStep)
        worker.compute()
        assert worker.next() == EndStep()
        worker.cycle.report_step(took(wall_s), training_set_samples=0, weights_hash="")
        found.append(worker.cycle.next_step_s)
    assert found == expected
    worker.next()
    assert worker.cycle.next_step_s == 0, "this step is finished, however long it takes"


def test_a_loss_that_is_not_finite_ends_training_with_advice() -> None:
    worker = Worker()
    worker.next()
    with pytest.raises(DivergedError, match=r"iteration 1 of worker 0.*learningRate"):
        worker.compute(loss=np.inf)


def test_the_first_batch_is_the_same_before_and_after_the_first_directive() -> None:
    """The remainder of 192 samples over five workers goes to the first two."""
    early, late = Worker(workers=5), Worker(workers=5)
    own = Member(late.job.workers()[0], 1, MemberState.READY, "")
    peers = Peers(Membership(1, late.job.key, 5, (own,)), 0)
    late.directive = ResourceController(late.job, Rank(0)).handle(peers, 0.0)
    assert late.directive is not None
    assert early.next() == late.next() == ComputeStep(1, 39)


def test_the_first_batch_of_a_resumed_worker_is_that_of_its_checkpoint() -> None:
    early, late = Worker(workers=5), Worker(workers=5)
    for worker in (early, late):
        worker.progress.iteration, worker.progress.global_batch_size = 49, 500
    own = Member(late.job.workers()[0], 1, MemberState.READY, "")
    peers = Peers(Membership(1, late.job.key, 5, (own,)), 0, iteration=49, global_batch_size=500)
    late.directive = ResourceController(late.job, Rank(0)).handle(peers, 0.0)
    assert late.directive is not None
    assert early.next() == late.next() == ComputeStep(1, 100)
