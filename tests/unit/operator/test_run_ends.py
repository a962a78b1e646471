"""Test what follows the end of a worker under the failure rules, and the end of a run with retries.

- For every end and action, supervisor, Kubernetes and operator agree on the consequence. The tests
  cover the order of rules and their groups.
- They cover which failed runs are retried, when, how often, and from which objects, at any restart
  of the operator.

The oracle for `podFailurePolicy` is a naive reading of its documentation.

Left out: a real API server (tests/cluster/test_failure_rules.py) and real processes
(tests/local/test_drained_workers.py).
"""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest

from dlion_api import cluster_names as names
from dlion_api.exit_codes import TRAINING_ENDED, ExitCode
from dlion_api.names import SiteName
from dlion_api.spec import load_job
from dlion_api.spec.failures import (
    ENDS,
    MAX_RULES,
    NAMED_CODES,
    FailureAction,
    WorkerEnd,
    end_of_exit,
)
from dlion_operator.children.worker_jobs import worker_job
from dlion_operator.kubernetes.client import Kind
from dlion_operator.plan.decisions import (
    CloseRun,
    Create,
    Decision,
    Delete,
    FinishRun,
    OpenRun,
    StopRun,
)
from dlion_operator.plan.observed import RunView
from operator_world import (
    SETTINGS,
    TRAINER,
    World,
    condition_statuses,
    dlion_job,
    ready_reason,
    stamp,
)

SIGKILL, SIGSEGV = 137, 139
CODES: dict[WorkerEnd, int | None] = {
    "Crashed": 1,
    "Killed": SIGKILL,
    "Unavailable": 69,
    "ProgramFailed": 67,
    "DataFailed": 66,
    "StorageFailed": 74,
    "Diverged": 75,
    "InvalidSpec": 65,
    "RestartsExceeded": 76,
    "InitializerFailed": None,
    "Disrupted": None,
}
"""An exit code of each end, or None if it is not that of a trainer."""
RESTARTED: set[WorkerEnd] = {"Crashed", "Killed", "Unavailable", "InitializerFailed"}
DATASET = {"url": "https://example.com/d.npz", "sha256": "0123456789abcdef" * 4}
POD_ACTIONS = {"Restart": "Count", "Ignore": "Ignore", "FailWorker": "FailIndex",
               "FailRun": "FailIndex"}  # fmt: skip


def rule(end: str, action: str, *groups: str) -> dict[str, Any]:
    return {"onEnds": [end], "action": action, "groups": list(groups)}


def pod_rules(*rules: dict[str, Any], group: str = "small") -> list[dict[str, Any]]:
    """Return the podFailurePolicy of the group's Job, whose pods download a data set and a
    model.
    """
    trainer = {
        **TRAINER,
        "dataset": {"path": "d.npz", "format": "npz"},
        "startFrom": "m.keras",
        "initializer": {"dataset": DATASET, "model": DATASET},
    }
    job = load_job(dlion_job({group: 2, "other": 1}, failureRules=list(rules), trainer=trainer))
    made = next(each for each in job.spec.sites[0].groups if each.name == group)
    document = worker_job(job, made, SETTINGS, {"uid": "u-1", "name": "digits"})
    return list(document["spec"]["podFailurePolicy"]["rules"])


def kubernetes_action(
    rules: list[dict[str, Any]],
    code: int | None,
    *,
    disrupted: bool = False,
    container: str = "trainer",
) -> str:
    """Return what Kubernetes does with a failed pod whose container ended with that code.

    Source: the documentation of podFailurePolicy. The first matching rule counts; without one the
    pod is counted. Exit code 0 never matches.
    """
    for each in rules:
        if "onPodConditions" in each and disrupted:
            return str(each["action"])
        wanted = each.get("onExitCodes")
        if wanted is None or not code:
            continue
        if wanted["containerName"] != container:
            continue
        assert wanted["values"] == sorted(set(wanted["values"]))
        assert 0 < len(wanted["values"]) <= 255
        assert wanted["operator"] == "NotIn" or 0 not in wanted["values"]
        if (code in wanted["values"]) == (wanted["operator"] == "In"):
            return str(each["action"])
    return "Count"


def kubernetes_action_for(rules: list[dict[str, Any]], end: WorkerEnd) -> str:
    if end == "InitializerFailed":
        return kubernetes_action(rules, ExitCode.UNAVAILABLE, container=names.MODEL_INITIALIZER)
    return kubernetes_action(rules, CODES[end] or SIGKILL, disrupted=end == "Disrupted")


@pytest.mark.parametrize("container", [names.DATASET_INITIALIZER, names.MODEL_INITIALIZER])
def test_a_rule_for_downloads_applies_to_every_exit_code(container: str) -> None:
    for action in get_args(FailureAction):
        rules = pod_rules(rule("InitializerFailed", action), rule("DataFailed", "FailRun"))
        for code in (1, 65, 66, 69, 74, SIGKILL):
            assert kubernetes_action(rules, code, container=container) == POD_ACTIONS[action]
        assert kubernetes_action(rules, ExitCode.INTERRUPTED, container=container) == "Ignore"
        assert kubernetes_action(rules, ExitCode.DATA) == "FailIndex"
    elsewhere = pod_rules(rule("InitializerFailed", "Ignore", "other"))
    for rules in (pod_rules(), elsewhere, pod_rules(rule("DataFailed", "Ignore"))):
        assert kubernetes_action(rules, ExitCode.DATA, container=container) == "FailIndex"
        assert kubernetes_action(rules, ExitCode.UNAVAILABLE, container=container) == "Count"


def test_every_end_has_a_row() -> None:
    assert set(ENDS) == set(get_args(WorkerEnd)) == set(CODES)


def test_every_exit_code_belongs_to_at_most_one_end() -> None:
    ends = {code: end_of_exit(code) for code in range(256)}
    assert {ends[code] for code in (0, 2, 73, 77, 79, 80, 124, 130)} == {None}
    assert {end: ends[code] for end, code in CODES.items() if code} == {
        end: end for end, code in CODES.items() if code
    }
    others = set(ends) - set(NAMED_CODES)
    assert {ends[code] for code in others} == {"Crashed"}
    assert {1, 3, SIGSEGV, 143, 255, TRAINING_ENDED} <= others


@pytest.mark.parametrize("end", CODES)
def test_the_defaults_apply_without_rules(end: WorkerEnd) -> None:
    """Crashes are counted, ends by Kubernetes are not, and all other ends are final."""
    disrupted = end == "Disrupted"
    expected = "Count" if end in RESTARTED else "Ignore" if disrupted else "FailIndex"
    assert kubernetes_action_for(pod_rules(), end) == expected
    assert POD_ACTIONS[ENDS[end].action] == expected
    assert kubernetes_action(pod_rules(), ExitCode.INTERRUPTED) == "Ignore"
    for fatal in (2, 73, 77, 79, 80, 124):
        assert kubernetes_action(pod_rules(), fatal) == "FailIndex"


@pytest.mark.parametrize(
    ("end", "action"),
    [
        (end, action)
        for end in CODES
        for action in get_args(FailureAction)
        if end != "RestartsExceeded" or action.startswith("Fail")  # the manifest refuses the others
    ],
)
def test_kubernetes_gets_the_rule_for_each_end(end: WorkerEnd, action: str) -> None:
    rules = pod_rules(rule(end, action))
    assert kubernetes_action_for(rules, end) == POD_ACTIONS[action]
    for other in CODES:
        if other != end:
            assert kubernetes_action_for(rules, other) == POD_ACTIONS[ENDS[other].action], other
    # An end on request is never counted, whatever the rules are.
    assert kubernetes_action(rules, ExitCode.INTERRUPTED) == "Ignore"


def test_a_pod_that_kubernetes_ends_is_disrupted_with_any_exit_code() -> None:
    """A drain whose grace period has expired kills the trainer."""
    rules = pod_rules(rule("Killed", "FailRun"))
    assert kubernetes_action(rules, SIGKILL, disrupted=True) == "Ignore"
    assert kubernetes_action(rules, SIGKILL) == "FailIndex"


def test_the_first_rule_applies_and_only_to_its_groups() -> None:
    given = [
        rule("Killed", "FailRun", "other"),
        rule("Killed", "Ignore"),
        rule("Killed", "Restart"),
    ]
    assert kubernetes_action(pod_rules(*given), SIGKILL) == "Ignore"
    assert kubernetes_action(pod_rules(*given, group="other"), SIGKILL) == "FailIndex"


def test_crashes_and_other_ends_may_share_a_rule() -> None:
    together = {"onEnds": ["Crashed", "ProgramFailed", "Disrupted"], "action": "Ignore"}
    rules = pod_rules(together)
    assert [kubernetes_action(rules, code) for code in (1, 3, SIGSEGV, 67)] == ["Ignore"] * 4
    assert kubernetes_action(rules, SIGKILL) == "Count"
    assert kubernetes_action(rules, 66) == "FailIndex"


def test_the_maximum_of_rules_is_within_the_limit_of_kubernetes() -> None:
    every = {"onEnds": list(CODES), "action": "FailWorker"}
    assert len(pod_rules(*[every] * MAX_RULES)) <= 20


# ---- the run -------------------------------------------------------------------------------------


def training(groups: dict[str, int] | None = None, **spec: object) -> World:
    world = World(dlion_job(groups or {"small": 3}, **spec))
    apply_decision(world, world.look())
    world.train()
    assert condition_statuses(world.look())["Ready"] == "True"
    return world


def apply_decision(world: World, decision: Decision) -> None:
    """Apply a decision as operator and Kubernetes do: delete and create Jobs with their pods."""
    for action in decision.actions:
        if isinstance(action, Delete) and action.kind is Kind.JOB:
            gone = [g for g, j in world.jobs.items() if j["metadata"]["name"] == action.name]
            for group in gone:
                assert world.jobs.pop(group)["metadata"]["uid"] == action.uid
                world.pods = {n: p for n, p in world.pods.items() if not n.startswith(group)}
        if isinstance(action, CloseRun):
            world.run = None
        if isinstance(action, OpenRun) and world.run is None:
            world.run = RunView(open_s=0.0)
        if isinstance(action, Create) and action.document["kind"] == "Job":
            made = copy.deepcopy(dict(action.document))
            group = made["metadata"]["labels"][names.GROUP_LABEL]
            assert group not in world.jobs
            made["metadata"] |= {
                "uid": f"job-{group}-{stamp(world.now)}", "creationTimestamp": stamp(world.now)
            }  # fmt: skip
            made["status"] = {"startTime": stamp(world.now)}
            world.jobs[group] = made
            for index in range(made["spec"]["completions"]):
                world.pods[f"{group}-{index}"] = world._pod(made, index)


def fail_for_good(world: World, group: str, index: int, end: WorkerEnd) -> None:
    """End a worker's last pod in this way and fail its index."""
    if end == "InitializerFailed":
        world.fail_download(group, index, ExitCode.UNAVAILABLE)
    else:
        world.fail(group, index, CODES[end] or ExitCode.INTERRUPTED)
    if end == "Disrupted":
        world.pods[f"{group}-{index}"]["status"]["conditions"] = [
            {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        ]
    world.jobs[group]["status"]["failedIndexes"] = str(index)


def stops(decision: Decision) -> list[str]:
    return [action.reason for action in decision.actions if isinstance(action, StopRun)]


@pytest.mark.parametrize("action", ["FailWorker", "FailRun"])
@pytest.mark.parametrize("end", CODES)
def test_a_permanently_failed_worker_ends_the_run_only_by_a_rule(
    end: WorkerEnd, action: str
) -> None:
    world = training(failureRules=[rule(end, action)])
    fail_for_good(world, "small", 2, end)
    decision = world.look()
    cause = f"failureRules[0] is FailRun for {end}"
    if action == "FailWorker":
        assert stops(decision) == []
        return
    assert stops(decision) == [f"small-2 failed for good, and {cause}"]
    assert condition_statuses(decision)["Failed"] == "False", "the others save their state first"
    world.end("small", failed="2", exit_code=CODES[end] or 1)
    fail_for_good(world, "small", 2, end)
    reason, message = ready_reason(world.look())
    assert (reason, message.partition("; ")[0]) == ("FailedByRule", cause)


@pytest.mark.parametrize("end", sorted(RESTARTED))
def test_a_worker_without_restarts_left_has_exceeded_them(end: WorkerEnd) -> None:
    """Its last pod shows how it ended that time."""
    world = training(failureRules=[rule("RestartsExceeded", "FailRun"), rule(end, "Restart")])
    fail_for_good(world, "small", 0, end)
    assert stops(world.look()) == [
        "small-0 failed for good, and failureRules[0] is FailRun for RestartsExceeded"
    ]


def test_an_interrupted_download_is_not_a_failed_one() -> None:
    world = training(failureRules=[rule("InitializerFailed", "FailRun")])
    world.fail_download("small", 0, ExitCode.INTERRUPTED)
    world.jobs["small"]["status"]["failedIndexes"] = "0"
    assert stops(world.look()) == []


def test_a_pod_that_a_node_refuses_uses_restarts() -> None:
    world = training(failureRules=[rule("RestartsExceeded", "FailRun")])
    world.pods["small-0"]["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
    world.jobs["small"]["status"]["failedIndexes"] = "0"
    assert len(stops(world.look())) == 1


def test_the_last_pod_of_a_worker_shows_how_it_failed() -> None:
    world = training(failureRules=[rule("ProgramFailed", "FailRun")])
    fail_for_good(world, "small", 0, "Diverged")
    earlier = copy.deepcopy(world.pods["small-0"])
    earlier["metadata"] |= {"uid": "earlier", "creationTimestamp": "2026-01-31T11:00:00Z"}
    earlier["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] = 67
    world.pods["small-0-earlier"] = earlier
    assert stops(world.look()) == []


def test_a_rule_of_another_group_and_a_removed_worker_end_no_run() -> None:
    world = training({"small": 3, "large": 1}, failureRules=[rule("Killed", "FailRun", "large")])
    fail_for_good(world, "small", 2, "Killed")
    assert stops(world.look()) == []
    fail_for_good(world, "large", 0, "Killed")
    assert len(stops(world.look())) == 1
    world = training(failureRules=[rule("Killed", "FailRun")])
    fail_for_good(world, "small", 2, "Killed")
    world.document["spec"]["sites"][0]["groups"][0]["workers"] = 2
    assert stops(world.look()) == []


def test_a_rule_fails_a_run_before_its_workers_train() -> None:
    world = World(dlion_job({"small": 2}, startDeadlineSeconds=60, maxRetries=3,
                            failureRules=[rule("DataFailed", "FailRun")]))  # fmt: skip
    apply_decision(world, world.look())
    fail_for_good(world, "small", 1, "DataFailed")
    assert ready_reason(world.look())[0] == "FailedByRule"


# ---- retries -------------------------------------------------------------------------------------


def failed_run(exit_code: int = SIGKILL, **spec: object) -> World:
    """Return a run that trained and whose workers all failed."""
    world = training({"small": 2}, **spec)
    world.advance(100)
    world.end("small", failed="0,1", exit_code=exit_code)
    return world


def attempt(decision: Decision) -> dict[str, Any]:
    assert decision.status is not None
    return dict(decision.status["attempt"])


def deleted(decision: Decision) -> list[tuple[Kind, str]]:
    return [(each.kind, each.name) for each in decision.actions if isinstance(each, Delete)]


def test_a_failed_run_starts_again_after_a_delay() -> None:
    world = failed_run(maxRetries=2)
    started = world.document["status"]["trainingStartTime"]
    decision = world.look()
    assert not [a for a in decision.actions if isinstance(a, FinishRun)], "the keeper continues"
    assert condition_statuses(decision) | {
        "Failed": "False",
        "Reconciling": "True",
    } == condition_statuses(decision)
    reason, message = ready_reason(decision)
    assert reason == "Retrying"
    assert message.startswith("attempt 2 of 3 begins at 2026-01-31T12:01:50Z; attempt 1 failed: ")
    assert [(e.reason, e.type) for e in decision.events] == [("Retrying", "Warning")]
    found = attempt(decision)
    assert (found["number"], found["startTime"]) == (2, "2026-01-31T12:01:50Z")
    assert found["lastFailure"].startswith("RestartsExceeded: small-0, small-1 failed for good")

    world.advance(5)
    decision = world.look()
    assert deleted(decision) == [], "the failed pods stay for their logs"
    assert decision.requeue_after_s == pytest.approx(5)
    assert decision.events == ()
    world.advance(5)
    decision = world.look()
    job = world.jobs["small"]["metadata"]["name"]
    kinds = {Kind.JOB: job, Kind.CONFIG_MAP: names.run_name(load_job(world.document).key)}
    assert dict(deleted(decision)) == kinds, "not the keeper with the checkpoints"
    apply_decision(world, decision)
    apply_decision(world, world.look())
    made = world.jobs["small"]["metadata"]
    assert (made["name"], made["annotations"][names.ATTEMPT_ANNOTATION]) == (job, "2")
    decision = world.look()
    assert ready_reason(decision)[0] == "WorkersStarting"
    assert attempt(decision)["number"] == 2
    assert world.document["status"]["trainingStartTime"] == started, "the manifest stays fixed"
    world.advance(30)
    world.train()
    decision = world.look()
    assert ready_reason(decision)[0] == "Training"
    assert decision.status is not None
    assert decision.status["trainingStartTime"] == "2026-01-31T12:02:20Z"
    world.end("small")
    assert condition_statuses(world.look())["Succeeded"] == "True"


def test_record_numbers_continue_from_the_first_attempt() -> None:
    world = failed_run(maxRetries=1)
    next_try(world)
    world.advance(7)
    opened = [a for a in world.look().actions if isinstance(a, OpenRun)]
    assert [each.age_s for each in opened] == [pytest.approx(117)]


def next_try(world: World, *, after_s: float = 10) -> None:
    """Advance from the end of an attempt to the start of the next one."""
    assert ready_reason(world.look())[0] == "Retrying"
    world.advance(after_s)
    apply_decision(world, world.look())
    apply_decision(world, world.look())


def test_the_last_attempt_ends_the_run_and_each_waits_longer() -> None:
    world = failed_run(maxRetries=7)
    for wait_s in (10, 20, 40, 80, 160, 320, 600):
        next_try(world, after_s=wait_s - 1)
        assert ready_reason(world.look())[0] == "Retrying"
        world.advance(1)
        apply_decision(world, world.look())
        apply_decision(world, world.look())
        world.train()
        world.look()
        world.end("small", failed="0,1", exit_code=SIGKILL)
    decision = world.look()
    reason, message = ready_reason(decision)
    assert (reason, condition_statuses(decision)["Failed"]) == ("RestartsExceeded", "True")
    assert message.endswith("this was attempt 8")
    assert [a for a in decision.actions if isinstance(a, FinishRun)]
    world.advance(3600)
    assert condition_statuses(world.look())["Failed"] == "True"


@pytest.mark.parametrize(
    ("exit_code", "is_retried"),
    [(1, True), (SIGKILL, True), (SIGSEGV, True), (69, True), (74, True), (76, True),
     (65, False), (66, False), (67, False), (75, False), (2, False), (77, False)],
)  # fmt: skip
def test_permanent_errors_are_not_retried(exit_code: int, is_retried: bool) -> None:
    decision = failed_run(exit_code, maxRetries=5).look()
    assert (ready_reason(decision)[0] == "Retrying") == is_retried
    assert (condition_statuses(decision)["Failed"] == "True") != is_retried


def test_without_retries_a_run_fails_as_before() -> None:
    decision = failed_run().look()
    assert condition_statuses(decision)["Failed"] == "True"
    assert decision.status is not None
    assert "attempt" not in decision.status


def test_a_run_that_a_rule_ends_is_not_retried() -> None:
    world = failed_run(maxRetries=5, failureRules=[rule("RestartsExceeded", "FailRun")])
    assert ready_reason(world.look())[0] == "FailedByRule"


def test_neither_a_deadline_nor_a_partial_model_is_retried() -> None:
    world = training(maxRetries=5)
    world.end("small", failed="1", exit_code=SIGKILL)
    assert ready_reason(world.look())[0] == "Partial"
    world = training(maxRetries=5, activeDeadlineSeconds=60)
    world.advance(70)
    world.end("small", failed="0,1,2", exit_code=SIGKILL)
    assert ready_reason(world.look())[0] == "DeadlineExceeded"


def test_one_failure_is_retried_under_the_policy_fail() -> None:
    world = training(maxRetries=1, failurePolicy="Fail")
    fail_for_good(world, "small", 2, "Killed")
    assert len(stops(world.look())) == 1
    world.end("small", failed="2", exit_code=SIGKILL)
    assert ready_reason(world.look())[0] == "Retrying"


def test_a_worker_that_fails_before_a_later_attempt_trains_does_not_block_it() -> None:
    """The others would wait for it without end, although earlier attempts trained."""
    world = training({"small": 2}, maxRetries=1)
    world.end("small", failed="0,1", exit_code=SIGKILL)
    next_try(world)
    world.run = RunView(open_s=60.0, ready={SiteName("plant-a"): 1})
    world.advance(60)
    fail_for_good(world, "small", 1, "Killed")
    decision = world.look()
    assert condition_statuses(decision)["Failed"] == "True"
    assert "this was attempt 2" in ready_reason(decision)[1]


@pytest.mark.parametrize("groups", [1, 2])
def test_an_operator_that_is_killed_at_any_point_continues_the_attempt(groups: int) -> None:
    """Another operator looks after each single change of the world."""
    sizes = {"small": 2, "large": 1} if groups == 2 else {"small": 2}
    world = training(sizes, maxRetries=1)
    for group, count in sizes.items():
        world.end(group, failed=",".join(map(str, range(count))), exit_code=SIGKILL)
    world.restart()
    world.look()
    world.advance(10)
    for _ in range(20):
        world.restart()
        decision = world.look()
        changes = [a for a in decision.actions if isinstance(a, Delete | Create)]
        changes = [a for a in changes if is_change(world, a)]
        if not changes:
            break
        apply_decision(world, Decision((changes[0],)))
        world.advance(1)
    assert {job["metadata"]["annotations"].get(names.ATTEMPT_ANNOTATION)
            for job in world.jobs.values()} == {"2"}  # fmt: skip
    assert set(world.jobs) == set(sizes)
    world.train()
    assert ready_reason(world.look())[0] == "Training"


def is_change(world: World, action: Delete | Create) -> bool:
    if isinstance(action, Create):
        return bool(action.document["kind"] == "Job")
    return action.kind is Kind.JOB


def test_a_lost_status_does_not_mix_attempts() -> None:
    """A user may delete the status: the Jobs hold the attempt."""
    world = training({"small": 2, "large": 1}, maxRetries=5)
    for group, failed in (("small", "0,1"), ("large", "0")):
        world.end(group, failed=failed, exit_code=SIGKILL)
    next_try(world)
    older = world.jobs["large"]["metadata"]["annotations"]
    del older[names.ATTEMPT_ANNOTATION]
    world.document["status"] = {"observedGeneration": -1}
    decision = world.look()
    assert (Kind.JOB, world.jobs["large"]["metadata"]["name"]) in deleted(decision)
    assert (Kind.JOB, world.jobs["small"]["metadata"]["name"]) not in deleted(decision)
    assert attempt(decision)["number"] == 2


def test_a_suspended_job_waits_with_its_next_attempt() -> None:
    world = failed_run(maxRetries=1)
    world.look()
    world.document["spec"]["suspend"] = True
    world.advance(100)
    decision = world.look()
    assert ready_reason(decision)[0] == "Suspended"
    assert deleted(decision) == []
    assert attempt(decision)["number"] == 2
    world.document["spec"]["suspend"] = False
    assert (Kind.JOB, world.jobs["small"]["metadata"]["name"]) in deleted(world.look())


def test_another_run_begins_with_its_first_attempt() -> None:
    world = failed_run(maxRetries=1)
    next_try(world)
    world.train()
    world.look()
    world.end("small", failed="0,1", exit_code=SIGKILL)
    assert condition_statuses(world.look())["Failed"] == "True"
    world.document["spec"]["runId"] = "2"
    decision = world.look()
    assert decision.status is not None
    assert "attempt" not in decision.status
    (made,) = [a for a in decision.actions
               if isinstance(a, Create) and a.document["kind"] == "Job"]  # fmt: skip
    assert names.ATTEMPT_ANNOTATION not in made.document["metadata"]["annotations"]


def test_a_waiting_run_fails_immediately_once_no_retry_is_allowed() -> None:
    """Only then may runId change."""
    world = failed_run(maxRetries=3)
    assert ready_reason(world.look())[0] == "Retrying"
    world.document["spec"]["maxRetries"] = 0
    decision = world.look()
    reason, message = ready_reason(decision)
    assert (reason, condition_statuses(decision)["Failed"]) == ("RestartsExceeded", "True")
    assert message.endswith("attempt 2 does not begin: maxRetries is 0")
    assert [a for a in decision.actions if isinstance(a, FinishRun)]


def test_a_started_attempt_is_not_cancelled() -> None:
    world = training({"small": 2, "large": 1}, maxRetries=1)
    for group, failed in (("small", "0,1"), ("large", "0")):
        world.end(group, failed=failed, exit_code=SIGKILL)
    world.look()
    world.advance(10)
    del world.jobs["small"]  # the first of two deletions
    world.document["spec"]["maxRetries"] = 0
    decision = world.look()
    assert [name for kind, name in deleted(decision) if kind is Kind.JOB] == [
        world.jobs["large"]["metadata"]["name"]
    ]
    assert condition_statuses(decision)["Failed"] == "False"


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_manifest_may_be_corrected_at_a_later_attempt_if_none_has_trained(
    has_trained: bool,
) -> None:
    """Otherwise the keeper has checkpoints of the earlier manifest."""
    world = training({"small": 2}, maxRetries=1) if has_trained else World(
        dlion_job({"small": 2}, maxRetries=1)
    )  # fmt: skip
    if not has_trained:
        apply_decision(world, world.look())
    world.end("small", failed="0,1", exit_code=SIGKILL)
    next_try(world)
    world.advance(60)
    world.run = RunView(open_s=60.0)
    world.document["spec"]["podTemplate"] = {"metadata": {"labels": {"a": "b"}}}
    kinds = {kind for kind, _ in deleted(world.look())}
    assert (Kind.DEPLOYMENT in kinds) == (Kind.JOB in kinds) == (not has_trained)
    apply_decision(world, world.look())
    apply_decision(world, world.look())
    (job,) = world.jobs.values()
    assert job["metadata"]["annotations"][names.ATTEMPT_ANNOTATION] == "2"


def test_more_retries_may_be_allowed_while_a_run_lasts() -> None:
    world = failed_run(maxRetries=1)
    next_try(world)
    world.document["spec"]["maxRetries"] = 2
    world.train()
    world.look()
    assert set(world.jobs) == {"small"}, "nothing is created again for it"
    world.end("small", failed="0,1", exit_code=SIGKILL)
    assert ready_reason(world.look())[1].startswith("attempt 3 of 3")
