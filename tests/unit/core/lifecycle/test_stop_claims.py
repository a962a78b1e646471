"""Tests of stop claims: a peer ends the run only if this worker, other peers or a whole site
confirm it.

A stop at step 5 of 1,000 by one of three peers does not end the run. After ten seconds its sender
counts as gone and is named, whatever name signs the message. A stop rule that this worker is close
to is believed at once. So is a stop of most peers, and a deadline of all linked workers of a site.
A worker that is ahead is believed by its steps, as far as the policy lets it be ahead. A reason is
signed by its sender.

Left out: the trainer's request, and a stop by this worker's own coordinator (tests/local).
"""

from __future__ import annotations

import pytest

from dlion_api.endings import stop_rule_met
from dlion_api.names import Rank
from dlion_api.protocol.refusals import PeerRefusal
from dlion_api.spec import load_job
from dlion_core.lifecycle.inbox import EventInbox, StopKind, stop_message
from dlion_core.lifecycle.stop_claims import CONFIRM_WITHIN_S, StopDoubts
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import LinkDown, LinkUp
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    Event,
    Layout,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
)
from dlion_core.policies.weights.round_planner import MAX_LOCAL_STEPS
from local_run import job_document

A, B, C = Rank(1), Rank(2), Rank(3)
"""Worker 0 and A are of site a, B and C of site b."""
DEADLINE = "the run took longer than activeDeadlineSeconds (5 s)"
MAX_STEPS = stop_rule_met("maxSteps", 1000)


class Inbox:
    """Worker 0 of four, training, with links to all."""

    def __init__(
        self,
        iteration: int = 5,
        *,
        linked: tuple[Rank, ...] = (A, B, C),
        max_lead: int | None = None,
    ) -> None:
        document = job_document({"a": 2, "b": 2})
        document["spec"]["trainer"]["stop"] = {
            "maxSteps": 1000, "maxSeconds": 600, "maxEpochs": 10, "targetAccuracy": 0.9,
        }  # fmt: skip
        self.now_s = self.elapsed_s = 0.0
        self.progress = JobProgress(iteration=iteration, job_samples=iteration * 192)
        self.inbox = EventInbox(lambda *_: None, clock_s=lambda: self.now_s)
        self.inbox.doubt = StopDoubts(
            load_job(document),
            Rank(0),
            self.progress,
            elapsed_s=lambda: self.elapsed_s,
            training_set_samples=lambda: 1920,
            max_lead=max_lead,
        )
        self.inbox.start(0)
        for rank in linked:
            self.inbox.put(LinkUp(rank, 1, 0))
        self.inbox.drain()

    def stop(self, sender: Rank, reason: str, iteration: int = 1000) -> list[Event]:
        self.inbox.put(MessageArrived(sender, stop_message(reason, iteration)))
        return self.inbox.drain()

    def later(self, seconds: float) -> list[Event]:
        self.now_s += seconds
        return self.inbox.drain()


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (MAX_STEPS, "this worker has reached 5 of 1,000"),
        (stop_rule_met("maxSeconds", 600), "this worker has reached 0 of 600"),
        (stop_rule_met("maxEpochs", 10), "this worker has reached 960 of 19,200"),
        (stop_rule_met("targetAccuracy", 0.9), "it is not confirmed"),
        ("worker 0: all is done", "it is not confirmed"),
    ],
)
def test_an_unconfirmed_stop_of_one_peer_does_not_end_the_run(reason: str, words: str) -> None:
    inbox = Inbox()
    assert inbox.stop(B, reason) == []
    assert inbox.later(CONFIRM_WITHIN_S - 0.1) == []
    assert inbox.later(0.1) == [MemberLeft(B)], "it has ended, and is not awaited"
    assert inbox.inbox.stop_reason is inbox.inbox.stop_iteration is None
    (refused,) = inbox.inbox.take_refusals()
    assert (refused.peer, refused.kind) == (B, PeerRefusal.IMPLAUSIBLE)
    assert words in refused.reason
    step = MessageArrived(B, Message(MessageKind.PROGRESS, 6, 4))
    inbox.inbox.put(step)
    assert inbox.inbox.drain() == [], "it has ended"
    inbox.inbox.put(LinkDown(B, 1, "gone"))
    assert inbox.inbox.drain() == [], "known already"
    inbox.inbox.put(LinkUp(B, 2, 6))
    inbox.inbox.put(step)
    assert inbox.inbox.drain()[-1] == step, "another process of it takes part again"


@pytest.mark.parametrize(
    ("iteration", "elapsed_s", "reason"),
    [
        (999, 0, MAX_STEPS),
        (5, 590, stop_rule_met("maxSeconds", 600)),
        (90, 0, stop_rule_met("maxEpochs", 10)),
    ],
)
def test_a_stop_rule_that_this_worker_is_close_to_is_believed_at_once(
    iteration: int, elapsed_s: float, reason: str
) -> None:
    inbox = Inbox(iteration)
    inbox.elapsed_s = elapsed_s
    assert inbox.stop(B, reason) == []
    assert inbox.inbox.stop_reason == f"worker 2: {reason}"
    assert inbox.inbox.stop_iteration == 1000


def test_a_stop_of_most_peers_is_believed() -> None:
    inbox = Inbox()
    inbox.stop(A, "worker 2: targetAccuracy 0.9 reached")
    assert inbox.inbox.stop_reason is None
    inbox.stop(B, "targetAccuracy 0.9 reached")
    assert inbox.inbox.stop_reason == "worker 1: targetAccuracy 0.9 reached"
    inbox.later(CONFIRM_WITHIN_S)
    assert inbox.inbox.take_refusals() == []


def test_a_single_peer_is_not_a_majority() -> None:
    inbox = Inbox(linked=(B,))
    inbox.stop(B, MAX_STEPS)
    assert inbox.later(CONFIRM_WITHIN_S) == [MemberLeft(B)]


def test_a_worker_of_this_site_does_not_confirm_a_stop_by_their_coordinator() -> None:
    inbox = Inbox(linked=(A,))
    inbox.stop(A, DEADLINE)
    assert inbox.inbox.stop_reason is None


def test_a_deadline_is_believed_from_all_workers_of_another_site() -> None:
    inbox = Inbox()
    inbox.stop(B, DEADLINE)
    assert inbox.inbox.stop_reason is None
    inbox.stop(C, DEADLINE)
    assert inbox.inbox.stop_reason == f"worker 2: {DEADLINE}"


def test_a_worker_that_is_ahead_is_believed_by_its_steps() -> None:
    inbox = Inbox()
    for iteration in range(1, 251):
        inbox.inbox.put(MessageArrived(B, Message(MessageKind.PROGRESS, iteration, 4)))
    inbox.stop(B, MAX_STEPS)
    assert inbox.inbox.stop_reason == f"worker 2: {MAX_STEPS}"


def test_a_reason_has_the_name_of_its_sender_or_of_a_peer_that_claims_it() -> None:
    """Only the link proves a name."""
    for first, expected in ((False, "worker 2: "), (True, "worker 1: ")):
        inbox = Inbox(iteration=1000)
        if first:
            inbox.inbox.put(MessageArrived(A, stop_message("SIGTERM", 3, StopKind.LEAVING)))
            inbox.stop(A, "not a rule")
        inbox.stop(B, f"worker 1: {MAX_STEPS}")
        assert inbox.inbox.stop_reason is not None
        assert inbox.inbox.stop_reason.startswith(expected)


def heard(inbox: Inbox, sender: Rank, *iterations: int) -> None:
    for iteration in iterations:
        inbox.inbox.put(MessageArrived(sender, Message(MessageKind.PROGRESS, iteration, 4)))
    inbox.inbox.drain()


@pytest.mark.parametrize("rule", [MAX_STEPS, stop_rule_met("maxEpochs", 10)])
def test_a_worker_that_is_ahead_is_believed_by_messages_of_all_its_links(rule: str) -> None:
    """Without a barrier a worker counts its own iterations only."""
    inbox = Inbox(30, linked=(B,))  # 30 % of maxEpochs
    heard(inbox, B, *range(1, 40))
    inbox.inbox.put(LinkDown(B, 1, "broken"))
    inbox.inbox.put(LinkUp(B, 2, 39))
    heard(inbox, B, *range(40, 101), *range(110, 900, 10))  # superseded messages count too
    assert inbox.stop(B, rule) == []
    assert inbox.inbox.stop_reason == f"worker 2: {rule}"


@pytest.mark.parametrize("rule", [MAX_STEPS, stop_rule_met("maxEpochs", 10)])
def test_a_faster_worker_is_believed_after_a_resume(rule: str) -> None:
    """It resumes from iteration 900 of its own checkpoint, this worker from 360."""
    inbox = Inbox(360, linked=(B,))
    inbox.progress.job_samples = 360 * 19  # of 19,200
    heard(inbox, B, *range(901, 1001))
    inbox.progress.advance(400, local_batch_size=4, global_batch_size=19)
    assert inbox.stop(B, rule) == []
    assert inbox.inbox.stop_reason == f"worker 2: {rule}"


@pytest.mark.parametrize("rule", [MAX_STEPS, stop_rule_met("maxEpochs", 10)])
@pytest.mark.parametrize("resumed_at", [0, 200])
def test_steps_beyond_those_of_a_worker_that_is_waited_for_prove_nothing(
    resumed_at: int, rule: str
) -> None:
    """Each of a few forged messages claims 16 steps. No peer can have made them at a barrier."""
    inbox = Inbox(resumed_at, linked=(B, C), max_lead=1)
    inbox.progress.job_samples = resumed_at * 19  # of 19,200
    for _ in range(5):
        inbox.progress.advance(
            inbox.progress.iteration + 1, local_batch_size=4, global_batch_size=19
        )
    heard(inbox, B, *range(resumed_at + 1, 1000, 16))
    assert inbox.stop(B, rule) == []
    assert inbox.later(CONFIRM_WITHIN_S) == [MemberLeft(B)]
    assert inbox.inbox.stop_reason is None


@pytest.mark.parametrize(
    ("policy", "mode", "max_lead"),
    [
        ("adaptive", "asynchronous", MAX_LOCAL_STEPS + 1),
        ("full", "synchronous", 1),
        ("full", "bounded", 4),
        ("full", "backup", None),
        ("full", "asynchronous", None),
        ("ako", "synchronous", 1),
        ("adpsgd", "synchronous", None),
    ],
)
def test_a_lead_is_limited_where_each_peer_waits_for_this_worker(
    policy: str, mode: str, max_lead: int | None
) -> None:
    document = job_document({"a": 2, "b": 2})
    document["spec"]["exchange"] = {"policy": policy}
    document["spec"]["synchronization"] = {"mode": mode, "maxStaleness": 3, "backupWorkers": 1}
    layout = Layout(("kernel",), (40,))
    guard = build(load_job(document).spec, Rank(0), layout, [Rank(0), A, B, C])
    assert guard.max_lead == max_lead


def test_one_message_does_not_prove_all_steps_before_it() -> None:
    inbox = Inbox(5, linked=(B,))
    heard(inbox, B, 1, 1000, 1000, 1000)
    assert inbox.stop(B, MAX_STEPS) == []
    assert inbox.inbox.stop_reason is None


def test_a_later_stop_by_the_own_coordinator_confirms_a_claim() -> None:
    """A step of more than ten seconds lies between the two."""
    inbox = Inbox(linked=(B,))
    is_asked = False
    inbox.inbox.doubt = StopDoubts(
        load_job(job_document({"a": 2, "b": 2})),
        Rank(0),
        inbox.progress,
        elapsed_s=lambda: 0.0,
        training_set_samples=lambda: 1920,
        stops_itself=lambda: is_asked,
    )
    assert inbox.stop(B, "targetAccuracy 0.9 reached") == []
    is_asked = True
    assert inbox.later(CONFIRM_WITHIN_S + 5) == []
    assert inbox.inbox.stop_reason == "worker 2: targetAccuracy 0.9 reached"


def test_a_worker_that_has_stopped_believes_every_stop() -> None:
    inbox = Inbox(linked=(B,))
    inbox.inbox.stop_message = stop_message("targetAccuracy 0.9 reached", 5)
    assert inbox.stop(B, "targetAccuracy 0.9 reached") == inbox.later(CONFIRM_WITHIN_S) == []
    assert inbox.inbox.take_refusals() == []
