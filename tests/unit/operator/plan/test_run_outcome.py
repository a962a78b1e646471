"""Test when a run ends and how its status reports the end: the matrix of the operator's decisions.

A lack of knowledge after a restart ends no run. Removed workers do not count. A wrong, newer or
corrected manifest ends no run. Each end has its correct reason and progress. Parts of the status
that other clients write stay.

Left out: real API servers and pods (tests/cluster), and the reports of trainers
(tests/unit/worker/trainer).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.endings import EndReport
from dlion_api.names import Rank, SiteName
from dlion_api.status import TrainerStatus
from dlion_operator.kubernetes.client import Kind
from dlion_operator.plan.decisions import CloseRun, Create, Decision, Delete, OpenRun, StopRun
from dlion_operator.plan.observed import RejectedObject, RunView
from dlion_operator.plan.outcome.diagnosis import MAX_LISTED
from dlion_operator.plan.outcome.run_outcome import A_WORKER_FINISHED
from operator_world import STAGED, World, condition_statuses, dlion_job, ready_reason, stamp

MET = "maxSteps 100 reached"
HERE = SiteName("plant-a")


def running(groups: dict[str, int] | None = None, **spec: Any) -> World:
    """Return a run whose workers run and have not trained yet."""
    world = World(dlion_job(groups, **spec))
    world.look()
    world.make_jobs()
    world.look()
    return world


def training(groups: dict[str, int] | None = None, **spec: Any) -> World:
    world = running(groups, **spec)
    world.train()
    assert world.look().status["trainingStartTime"]  # type: ignore[index]
    world.advance(600)
    return world


def fails(world: World, index: int, code: int = 67) -> None:
    """Let the worker of group small fail permanently; the others continue."""
    world.jobs["small"]["status"]["failedIndexes"] = str(index)
    world.fail("small", index, code)


def degraded(**spec: Any) -> World:
    world = training({"small": 2}, **spec)
    fails(world, 1)
    world.train(ready=1)
    assert ready_reason(world.look())[0] == "PeersLost"
    return world


def ends(decision: Decision) -> list[str]:
    """Return the parts of a decision that end a run or delete its objects."""
    stops = [f"stop: {a.reason}" for a in decision.actions if isinstance(a, StopRun)]
    kinds = [f"delete {a.kind.name}" for a in decision.actions if isinstance(a, Delete)]
    closed = ["close"] if CloseRun() in decision.actions else []
    over = []
    if decision.status is not None:
        over = [t for t in ("Succeeded", "Failed") if condition_statuses(decision)[t] == "True"]
    return [*stops, *kinds, *closed, *over]


def scale(world: World, count: int) -> None:
    world.document["spec"]["sites"][0]["groups"][0]["workers"] = count
    world.document["metadata"]["generation"] += 1


# ---- the matrix: each event in each state of a run


def healthy() -> World:
    return training({"small": 2})


def suspended() -> World:
    world = training({"small": 2})
    world.document["spec"]["suspend"] = True
    world.look()
    world.jobs["small"]["spec"]["suspend"] = True
    world.pods = {k: v for k, v in world.pods.items() if k == "keeper"}
    world.run = None
    return world


def waiting() -> World:
    return running({"small": 2})


def ending() -> World:
    world = training({"small": 2})
    world.run = RunView(open_s=3600.0, ready={HERE: 2}, training=True, stop_reason=MET)
    world.look()
    return world


def restart(world: World) -> None:
    world.restart()


def scale_down(world: World) -> None:
    scale(world, 1)


def scale_up(world: World) -> None:
    scale(world, 3)


def newer_crd(world: World) -> None:
    world.document["spec"]["exchange"]["laterField"] = "clip"
    world.document["spec"]["later"] = {"a": 1}


def unreadable_manifest(world: World) -> None:
    world.document["spec"]["tls"]["mode"] = "OfALaterVersion"


def policy_denies(world: World) -> None:
    world.document["spec"]["podTemplate"] = {"spec": {"hostNetwork": True}}


def clock_ahead(world: World) -> None:
    """Set the controllers' clock two hours behind the API server's, with a deadline of one hour."""
    world.document["spec"]["activeDeadlineSeconds"] = 3600
    for job in world.jobs.values():
        job["status"]["startTime"] = "2026-01-31T10:00:00Z"


@pytest.mark.parametrize("state", [healthy, degraded, suspended, waiting, ending])
@pytest.mark.parametrize(
    "event",
    [restart, scale_down, scale_up, newer_crd, unreadable_manifest, policy_denies, clock_ahead],
)
def test_no_event_other_than_an_end_ends_a_run(state: Any, event: Any) -> None:
    world = state()
    event(world)
    for _ in range(3):  # at once, and after an operator has read all objects
        assert not [each for each in ends(world.look()) if each not in ALLOWED[state.__name__]]
        world.advance(10)


ALLOWED = {
    "healthy": (), "degraded": (), "waiting": (), "ending": (), "suspended": ("close",),
}  # fmt: skip
"""A suspended run whose pods have ended is not served."""


# ---- a restarted operator


def test_a_degraded_run_continues_when_the_operator_restarts() -> None:
    world = degraded()
    world.restart()
    assert ends(world.look()) == []
    world.run = RunView(open_s=0.5)  # no worker has called yet
    assert ends(world.look()) == []
    world.run = RunView(open_s=600.0, ready={HERE: 1}, training=True)
    decision = world.look()
    assert ends(decision) == []
    assert ready_reason(decision)[0] == "PeersLost"


def test_progress_in_a_status_without_a_start_time_means_training() -> None:
    """An operator of an earlier version wrote such a status."""
    world = degraded()
    del world.document["status"]["trainingStartTime"]
    world.document["status"]["trainerStatus"] = {"progressPercentage": 12}
    world.run = RunView(open_s=600.0)
    assert ends(world.look()) == []


def test_an_untrained_run_without_a_worker_fails_once_all_others_have_called() -> None:
    world = running({"small": 2})
    fails(world, 1)
    world.advance(600)
    world.run = RunView(open_s=1.0)
    assert ends(world.look()) == []
    world.run = RunView(open_s=60.0)
    decision = world.look()
    assert (condition_statuses(decision)["Failed"], ready_reason(decision)[0]) == (
        "True",
        "ProgramFailed",
    )


def test_a_deadline_that_passed_without_an_operator_leaves_workers_time_to_save() -> None:
    world = training({"small": 2}, activeDeadlineSeconds=600)
    world.advance(3600)
    world.restart()
    assert [type(a) for a in world.look().actions if isinstance(a, StopRun)] == [StopRun]
    world.run = RunView(open_s=59.0, ready={HERE: 2}, training=True)
    decision = world.look()
    assert condition_statuses(decision)["Failed"] == "False"
    assert [type(a) for a in decision.actions if isinstance(a, StopRun)] == [StopRun]
    world.run = RunView(open_s=60.0, ready={HERE: 2}, training=True)
    assert ready_reason(world.look())[0] == "DeadlineExceeded"


@pytest.mark.parametrize("open_s", [1.0, 600.0])
def test_the_next_operator_does_not_wait_for_workers_that_ended_meanwhile(open_s: float) -> None:
    """The other one uploads the model, takes no more steps, and may need minutes for it."""
    world = training({"small": 2})
    world.succeed("small", 0)
    world.jobs["small"]["status"]["completedIndexes"] = "0"
    world.restart()
    assert [a for a in world.look().actions if isinstance(a, StopRun)]
    world.run = RunView(open_s=open_s, ready={HERE: 1}, stop_reason=A_WORKER_FINISHED)
    world.look()
    ready = next(c for c in world.document["status"]["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "Training")


def test_the_start_of_training_is_kept_for_its_run_only() -> None:
    world = training()
    started = world.document["status"]["trainingStartTime"]
    world.restart()
    world.advance(600)
    world.run = RunView(open_s=600.0, ready={HERE: 2}, training=True)
    assert world.look().status["trainingStartTime"] == started  # type: ignore[index]
    world.end("small")
    world.look()
    world.document["spec"]["runId"] = "2"
    world.run = None
    decision = world.look()
    assert decision.status is not None
    assert "trainingStartTime" not in decision.status


# ---- scaling


def test_removing_a_failed_worker_ends_no_run() -> None:
    world = degraded()
    scale(world, 1)
    decision = world.look()
    assert ends(decision) == []
    assert ready_reason(decision)[0] == "Training"
    world.jobs["small"]["spec"] |= {"completions": 1, "parallelism": 1}
    world.jobs["small"]["status"] |= {
        "completedIndexes": "0",
        "conditions": [
            {"type": "Complete", "status": "True", "lastTransitionTime": stamp(world.now)}
        ],
    }
    world.succeed("small", 0, EndReport(MET, 100, (Rank(0),)))
    decision = world.look()
    assert ready_reason(decision) == ("Completed", MET)


def test_a_run_ends_once_all_its_wanted_workers_failed() -> None:
    world = degraded()
    world.jobs["small"]["status"]["failedIndexes"] = "0,1"
    assert ends(world.look()) == ["stop: small-0, small-1 failed for good, and no worker is left"]


def test_the_message_names_some_of_many_failed_workers() -> None:
    world = degraded()
    scale(world, 100)
    world.jobs["small"]["spec"] |= {"completions": 100, "parallelism": 100}
    world.jobs["small"]["status"]["failedIndexes"] = "0-99"
    (end,) = ends(world.look())
    assert end.startswith("stop: small-0, small-1, ")
    assert f" and {100 - MAX_LISTED} more failed for good, and no worker is left" in end
    assert len(end) < 200


# ---- the manifest


def test_a_field_of_a_newer_crd_is_named_and_ignored() -> None:
    world = training()
    newer_crd(world)
    decision = world.look()
    reason, message = ready_reason(decision)
    assert reason == "Training"
    assert "spec.later, spec.exchange.laterField" in message
    assert "upgrade the operator" in message
    assert any(isinstance(action, OpenRun) for action in decision.actions)


def test_a_new_job_with_a_field_of_a_newer_crd_starts() -> None:
    world = World(dlion_job())
    newer_crd(world)
    assert [a for a in world.look().actions if isinstance(a, Create)]


def test_the_status_of_an_unreadable_manifest_states_that_its_run_continues() -> None:
    world = training()
    unreadable_manifest(world)
    decision = world.look()
    assert ends(decision) == []
    reason, message = ready_reason(decision)
    assert reason == "InvalidSpec"
    assert message.startswith("run 1 continues; this operator cannot read the manifest")
    assert world.document["status"]["trainingStartTime"]


def test_an_unreadable_manifest_keeps_the_results_of_an_ended_run() -> None:
    world = training()
    world.end("small")
    world.look()
    before = dict(world.document["status"])
    unreadable_manifest(world)
    world.look()
    assert world.document["status"] == before


def test_an_unreadable_manifest_keeps_the_time_to_live_of_an_ended_run() -> None:
    world = training(ttlSecondsAfterFinished=3600)
    world.end("small")
    world.look()
    unreadable_manifest(world)
    world.advance(3599)
    decision = world.look()
    assert [type(action) for action in decision.actions] == [CloseRun]
    assert decision.requeue_after_s == pytest.approx(1)
    world.advance(1)
    kinds = {action.kind for action in world.look().actions if isinstance(action, Delete)}
    assert kinds == {
        Kind.JOB, Kind.CONFIG_MAP, Kind.DEPLOYMENT, Kind.SERVICE, Kind.NETWORK_POLICY
    }  # fmt: skip


@pytest.mark.parametrize("kept", ["3600", -1, True, None, [0], 10**30], ids=str)
def test_a_time_to_live_that_is_not_a_number_deletes_nothing(kept: object) -> None:
    world = training()
    world.end("small")
    world.look()
    unreadable_manifest(world)
    world.document["spec"]["ttlSecondsAfterFinished"] = kept
    world.advance(86400)
    assert [type(action) for action in world.look().actions] == [CloseRun]


def test_a_manifest_corrected_before_training_recreates_its_objects() -> None:
    world = running()
    world.run = RunView(open_s=600.0)
    world.document["spec"]["trainer"]["image"] = "trainer:2"
    decision = world.look()
    deleted = {action.kind for action in decision.actions if isinstance(action, Delete)}
    assert deleted == {
        Kind.JOB, Kind.CONFIG_MAP, Kind.DEPLOYMENT, Kind.SERVICE, Kind.NETWORK_POLICY
    }  # fmt: skip
    assert CloseRun() in decision.actions
    assert condition_statuses(decision)["Failed"] == "False"
    world.jobs.clear()
    world.pods.clear()
    decision = world.look()
    (job,) = [a.document for a in decision.actions if isinstance(a, Create)
              and a.document["kind"] == "Job"]  # fmt: skip
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    assert trainer["image"] == "trainer:2"


@pytest.mark.parametrize(
    "change",
    [{"suspend": False}, {"activeDeadlineSeconds": 60}, {"checkpoint": {"everySeconds": 9}}],
    ids=str,
)
def test_fields_that_act_on_a_running_job_recreate_nothing(change: dict[str, Any]) -> None:
    world = running()
    world.run = RunView(open_s=600.0)
    world.document["spec"] |= change
    assert ends(world.look()) == []


@pytest.mark.parametrize("knows", [True, False])
def test_a_manifest_changed_during_training_recreates_nothing(knows: bool) -> None:
    world = training()
    if not knows:
        world.restart()
    world.document["spec"]["podTemplate"] = {"metadata": {"labels": {"a": "b"}}}
    assert ends(world.look()) == []


def test_a_wrong_manifest_is_corrected_in_the_same_run() -> None:
    world = World(dlion_job(podTemplate={"spec": {"hostNetwork": True}}))
    assert ready_reason(world.look())[0] == "InvalidSpec"
    del world.document["spec"]["podTemplate"]
    decision = world.look()
    assert ready_reason(decision)[0] == "WorkersStarting"
    assert [a for a in decision.actions if isinstance(a, Create)]


def test_a_refused_job_of_one_group_stops_no_other() -> None:
    world = training({"small": 2, "large": 1})
    del world.jobs["large"]
    denied = RejectedObject(
        "422 ValidatingAdmissionPolicy 'p' with binding 'p' denied request: no", 422
    )
    decision = world.look(rejected=denied)
    assert ends(decision) == []
    assert condition_statuses(decision)["Ready"] == "True"
    assert denied.message in ready_reason(decision)[1]


# ---- how a run ended


def ended(world: World, *reports: EndReport | None, failed: str = "") -> Decision:
    world.end("small", failed=failed, exit_code=67)
    for index, report in enumerate(reports):
        if str(index) not in failed.split(","):
            world.succeed("small", index, report)
    return world.look()


def test_a_later_operator_reads_the_end_of_a_run_from_its_pods() -> None:
    world = training({"small": 2})
    world.restart()
    saved = EndReport(MET, 100, (Rank(0), Rank(1)))
    decision = ended(world, saved, EndReport(MET, 100))
    assert ready_reason(decision) == ("Completed", MET)
    assert decision.status is not None
    assert decision.status["trainerStatus"]["progressPercentage"] == 100
    assert (decision.status["readySites"], decision.status["readyWorkers"]) == ("1/1", "2/2")


@pytest.mark.parametrize("reason", [A_WORKER_FINISHED, "it was interrupted"])
def test_a_worker_that_returned_at_the_end_hides_no_stop_rule(reason: str) -> None:
    world = training({"small": 2})
    late = EndReport(reason, 99)
    assert ready_reason(ended(world, late, EndReport(MET, 100, (Rank(0), Rank(1)))))[1] == MET


def test_a_run_that_was_stopped_before_its_stop_rule_ended_early() -> None:
    world = training({"small": 2})
    world.run = RunView(
        open_s=3600.0,
        ready={HERE: 2},
        training=True,
        trainer_status=TrainerStatus(progress_percentage=12),
    )
    world.look()
    why = "it is over at plant-b: 1 sites are left (minSites 2)"
    decision = ended(world, EndReport(why, 12, (Rank(0), Rank(1))), EndReport(why, 12))
    assert (condition_statuses(decision)["Succeeded"], condition_statuses(decision)["Failed"]) == (
        "False",
        "True",
    )
    early = f"ended at iteration 12 (12 %), before its stop rule was met: {why}"
    assert ready_reason(decision) == ("EndedEarly", early)
    assert decision.status is not None
    assert decision.status["trainerStatus"]["progressPercentage"] == 12


def test_the_iteration_of_a_run_that_ended_early_is_that_of_the_decoder() -> None:
    """Sensors of topology `staged` make steps of their own."""
    world, why = training({"small": 2}, **STAGED), "it is over at plant-b"
    decision = ended(world, EndReport(why, 12, (Rank(0),)), EndReport(why, 40))
    assert ready_reason(decision)[1].startswith("ended at iteration 12")


def test_a_model_without_a_replica_that_was_not_reached_is_partial() -> None:
    world = training({"small": 3})
    saved = EndReport(MET, 100, (Rank(0), Rank(2)), missing=(Rank(1),))
    decision = ended(world, saved, EndReport(MET, 100), EndReport(MET, 100))
    lacks = "the model lacks plant-a/small-1: not reached at the end"
    assert ready_reason(decision) == ("Partial", f"{lacks}; {MET}")
    assert decision.status is not None
    assert decision.status["trainerStatus"]["progressPercentage"] == 100


def test_a_removed_replica_is_not_a_shortfall() -> None:
    world = training({"small": 2})
    scale(world, 1)
    world.jobs["small"]["spec"] |= {"completions": 1, "parallelism": 1}
    world.end("small")
    world.succeed("small", 0, EndReport(MET, 100, (Rank(0),), missing=(Rank(1),)))
    assert ready_reason(world.look()) == ("Completed", MET)


def test_the_success_of_a_removed_worker_does_not_count() -> None:
    world = training({"small": 2})
    scale(world, 1)
    decision = ended(world, None, EndReport(MET, 100, (Rank(0), Rank(1))), failed="0")
    assert ready_reason(decision)[0] == "ProgramFailed"
    assert condition_statuses(decision)["Failed"] == "True"


def test_an_unknown_end_claims_no_progress() -> None:
    world = training({"small": 2})
    world.document["status"]["trainerStatus"] = {"progressPercentage": 40}
    world.restart()
    decision = ended(world, None, None)
    assert ready_reason(decision) == ("Completed", "2 workers ended well")
    assert decision.status is not None
    assert decision.status["trainerStatus"] == {"progressPercentage": 40}


def test_a_finished_worker_is_not_an_early_end() -> None:
    """The operator's request to the other workers to end is not a reason of the run."""
    world = training({"small": 2})
    world.run = RunView(open_s=3600.0, training=True, stop_reason=A_WORKER_FINISHED)
    assert ready_reason(ended(world, None, None)) == ("Completed", "2 workers ended well")


@pytest.mark.parametrize("failed", ["1", ""])
def test_a_finished_job_shows_its_site(failed: str) -> None:
    """Its workers had left before the operator received the reason."""
    world = training({"small": 2})
    world.run = RunView(open_s=3600.0, training=True)
    world.look()
    decision = ended(world, EndReport(MET, 100), EndReport(MET, 100), failed=failed)
    assert decision.status is not None
    assert decision.status["readySites"] == "1/1"


# ---- parts of the status that others write


def test_conditions_of_other_controllers_stay() -> None:
    world = training()
    theirs = {"type": "example.com/Audited", "status": "True", "reason": "Yes"}
    world.document["status"]["conditions"].append(theirs)
    world.train(ready=1)
    world.look()
    assert theirs in world.document["status"]["conditions"]
    world.end("small")
    world.look()
    world.look()
    assert theirs in world.document["status"]["conditions"]


def test_status_fields_of_a_newer_operator_stay_while_their_run_lasts() -> None:
    world = training()
    world.document["status"]["later"] = {"a": 1}
    world.train(ready=1)
    assert world.look().status["later"] == {"a": 1}  # type: ignore[index]


def test_a_newer_crd_recreates_nothing_of_a_waiting_run() -> None:
    world = running()
    world.run = RunView(open_s=600.0)
    newer_crd(world)
    assert ends(world.look()) == []


@pytest.mark.parametrize("has_trained", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_sensors_end_if_the_only_training_worker_fails(index: int, *, has_trained: bool) -> None:
    world = (training if has_trained else running)(
        {"small": 3}, **STAGED, startDeadlineSeconds=3600
    )
    fails(world, index)
    done, why = ends(world.look()), "no other worker trains (topology staged)"
    if index == 1:
        assert done == []
    elif has_trained:
        assert done == [f"stop: small-0 failed for good, and {why}"]
    else:
        assert done == ["Failed"], "nothing to save"
