"""Tests of the instruction executor.

If a policy finds values that are not finite as it sends, the worker ends as diverged, with advice.
A policy is reminded when it asks for it.

Left out: the effect of each instruction; a loss or gradient that is not finite (tests/local).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dlion_api.errors import DivergedError
from dlion_api.names import Rank
from dlion_api.spec import load_job
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    Layout,
    LocalStepDone,
    MemberJoined,
    RemindAfter,
    ReminderDue,
)
from local_run import job_document
from policy_cluster import spec
from weighing_cluster import View

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlion_core.policies.interface import Flat

LAYOUT = Layout(("w",), (4,))
RATE = np.float32(1e38)


class Descent:
    """A replica whose steps are far too long."""

    def __init__(self) -> None:
        self.weights_D = np.ones(LAYOUT.size, np.float32)

    def apply_gradient(self, gradient_D: Flat, *, on_updated: Callable[[], None], **_: Any) -> None:
        with np.errstate(over="ignore"):
            self.weights_D -= RATE * gradient_D
        on_updated()

    def replace(self, weights_D: Flat) -> None:
        self.weights_D[:] = weights_D


def test_a_policy_is_reminded_once_at_its_deadline() -> None:
    now_s, heard, due = [5.0], [], []
    machine = SimpleNamespace(handle=lambda event: heard.append(event) or [])
    reporter = SimpleNamespace(now_s=lambda: now_s[0])
    parts: Any = SimpleNamespace(
        job=load_job(job_document(2)), machine=machine, replica=None, reporter=reporter
    )
    executor = InstructionExecutor(
        parts, JobProgress(), send=lambda *_: None, refuse=lambda *_: None, due=due.append
    )
    executor.carry_out([RemindAfter(60), RemindAfter(2)])
    for now_s[0], times in ((5.0, 0), (6.9, 0), (7.0, 1), (70.0, 1)):
        executor.remind()
        assert heard == [ReminderDue()] * times
    assert due == [60, 2]


@pytest.mark.parametrize(
    "policy",
    [
        "adaptive",
        "d2",
        "eventgrad",
        "fedat",
        "gaia",
        "halos",
        "hop",
        "localsgd",
        "quorum-diloco",
        "sparseloco",
    ],
)
def test_weights_that_overflow_end_the_worker_as_diverged(policy: str) -> None:
    replica = Descent()
    parameters = {} if policy in {"d2", "eventgrad", "gaia", "hop"} else {"localSteps": 1}
    job_spec = spec(exchange={"policy": policy, "parameters": parameters})
    view = View(replica.weights_D)
    machine = build(job_spec, Rank(1), LAYOUT, [Rank(0), Rank(1)], replica=view)
    reporter = Reporter(
        rank=Rank(1),
        incarnation=1,
        start_monotonic_s=0.0,
        clock_s=lambda: 0.0,
        send=lambda _records: None,
    )
    parts: Any = SimpleNamespace(
        job=load_job(job_document(2)), machine=machine, replica=replica, reporter=reporter
    )
    instructions = InstructionExecutor(
        parts,
        JobProgress(),
        send=lambda _peer, _message: None,
        refuse=lambda rejected, _iteration: pytest.fail(rejected.reason),
    )
    instructions.handle(MemberJoined(Rank(0)))
    gradient_D = np.full(LAYOUT.size, 1e3, np.float32)

    def steps() -> None:
        for iteration in (
            1,
            2,
        ):  # some policies send weights before their step, and find it at the next
            instructions.handle(LocalStepDone(iteration, gradient_D.copy(), 4, 1.0))

    with pytest.raises(DivergedError, match="learning rate"):
        steps()
