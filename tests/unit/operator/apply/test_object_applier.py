"""Test how the operator applies a decision to an API server in memory.

- Objects that exist already are not sent again, also after a restart. A change is sent.
- Pods get the address and the authority of an operator that has moved.
- A refusal appears in the status. A Job passes a dry run before anything is created.
- An object of the same name with another owner stays.
- A failed Service or route delays nothing else; it is reported and rarely retried.
- Telemetry is written rarely, a condition immediately.

The server keeps objects and counts requests. Left out: a real API server (tests/cluster).
"""

from __future__ import annotations

import contextlib
import copy
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import pytest

from dlion_api.errors import DLionError
from dlion_api.names import JobKey, SiteName
from dlion_api.status import Metric, TrainerStatus
from dlion_operator.kubernetes.client import (
    ConflictError,
    Document,
    Kind,
    RequestRefusedError,
    ServerError,
)
from dlion_operator.kubernetes.store import ObjectName
from dlion_operator.model.settings import Gateway, GatewayListenerSettings
from dlion_operator.plan.decisions import JobEvent
from dlion_operator.plan.observed import RemoteView, RunView
from given_authorities import GivenAuthority
from operator_in_memory import Site
from operator_world import SETTINGS, dlion_job

if TYPE_CHECKING:
    from dlion_operator.controller.reconcile_state import ReconcileState


def conditions(site: Site) -> list[dict[str, Any]]:
    """Return the conditions of the job's status."""
    found: list[dict[str, Any]] = site.status()["conditions"]
    return found


def test_objects_are_created_once_and_the_status_is_written_once() -> None:
    site = Site(dlion_job({"small": 2, "large": 1}))
    site.look()
    assert site.cluster.writes() == [
        ("create", "ConfigMap"),
        ("apply", "Service"),
        ("apply", "Service"),
        ("create", "Deployment"),
        ("create", "Job"),
        ("create", "Job"),
        ("patch", "status"),
    ]
    site.look()
    assert site.cluster.writes() == []
    assert site.runs.open_runs == [JobKey("default", "digits", "1")]


def test_a_restarted_operator_sends_nothing() -> None:
    first = Site(dlion_job())
    first.look()
    second = Site(cluster=first.cluster)
    second.look()
    assert second.cluster.requests == [], "the watches know the objects without a request"
    second.time_s = 700.0
    second.look()
    assert {verb for verb, kind in second.cluster.requests if kind != "Event"} <= {"patch"}


def test_a_watched_object_is_not_read_before_it_is_created() -> None:
    """Except objects that are applied: apply could take over an object of another owner."""
    site = Site(dlion_job())
    site.look()
    gets = [kind for verb, kind in site.cluster.requests if verb == "get"]
    assert gets == ["SERVICE", "SERVICE"]


@pytest.mark.parametrize("error", [None, RequestRefusedError("403 exceeded quota", 403)])
@pytest.mark.parametrize("kind", [Kind.JOB, Kind.DEPLOYMENT, Kind.CONFIG_MAP])
def test_an_object_that_the_watches_cannot_see_is_found(
    kind: Kind, error: RequestRefusedError | None
) -> None:
    """The object has lost our label. A full quota does not show whether the object exists."""
    first = Site(dlion_job())
    first.look()
    (name, made) = next((n, d) for (k, n), d in first.cluster.objects.items() if k is kind)
    labels = made["metadata"].pop("labels")
    second = Site(cluster=first.cluster)
    second.store.remove(kind, made)

    def refuse(verb: str, document: Document) -> None:
        is_made = verb in ("create", "dry run") and document["kind"] == made["kind"]
        if error is not None and is_made:
            raise error

    second.cluster.refuse = refuse
    with pytest.raises(ConflictError, match="lost its labels"):
        second.look()
    assert second.cluster.objects[kind, name]["metadata"]["labels"] == labels
    second.look()
    assert ("create", made["kind"]) not in second.cluster.writes()


@pytest.mark.parametrize(
    ("kind", "how"),
    [(Kind.CONFIG_MAP, "create"), (Kind.DEPLOYMENT, "create"), (Kind.SERVICE, "apply")],
)
def test_a_deleted_object_is_created_again_at_the_next_look(kind: Kind, how: str) -> None:
    site = Site(dlion_job())
    site.look()
    site.look()
    name, lost = next((n, d) for (k, n), d in site.cluster.objects.items() if k is kind)
    site.lose(kind, name)
    site.look()
    assert site.cluster.writes() == [(how, lost["kind"])]
    assert reasons(site).count("KeeperCreated") == (2 if kind is Kind.DEPLOYMENT else 1)
    site.look()
    assert site.cluster.writes() == []


def moved_operator(first: Site) -> Site:
    """Return an operator of another namespace and authority at the same API server."""
    address = "dlion-operator.dlion.svc:7443"
    moved = replace(SETTINGS, coordinator=replace(SETTINGS.coordinator, address=address))
    second = Site(cluster=first.cluster, settings=moved)
    second.runs.known_by = "ANOTHER PEM"
    return second


def config_map_of(site: Site) -> Document:
    """Return the ConfigMap of the run."""
    (found,) = (each for (kind, _), each in site.cluster.objects.items() if kind is Kind.CONFIG_MAP)
    return found


def test_restarted_pods_find_the_present_operator_and_the_earlier_manifest() -> None:
    first = Site(dlion_job())
    first.look()
    config = json.loads(config_map_of(first)["data"]["pod.json"])
    config["job_document"]["spec"]["of an earlier release"] = True
    config_map_of(first)["data"]["pod.json"] = json.dumps(config)
    second = moved_operator(first)
    second.look()
    assert second.cluster.writes() == [("patch", "CONFIG_MAP")]
    after = config_map_of(second)["data"]
    config["coordinator_address"] = "dlion-operator.dlion.svc:7443"
    assert (json.loads(after["pod.json"]), after["ca.pem"]) == (config, "ANOTHER PEM")
    moved_operator(first).look()
    assert second.cluster.writes() == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "not JSON", '{"coordinator_address": "then", "edited": NaN}', "[" * 99_999],
    ids=["empty", "list", "nothing", "no JSON", "NaN", "deep"],
)
def test_an_unreadable_configuration_is_not_changed(text: str) -> None:
    first = Site(dlion_job())
    first.look()
    config_map_of(first)["data"]["pod.json"] = text
    moved_operator(first).look()
    assert config_map_of(first)["data"] == {"pod.json": text, "ca.pem": "ANOTHER PEM"}


def test_a_job_passes_a_dry_run_before_anything_is_created() -> None:
    site = Site(dlion_job())

    def refuse(verb: str, _document: Document) -> None:
        if verb == "dry run":
            raise RequestRefusedError("422 tolerations: Invalid value", 422)

    site.cluster.refuse = refuse
    site.look()
    assert site.cluster.writes() == [("patch", "status")]
    found = {c["type"]: (c["status"], c["message"]) for c in site.status()["conditions"]}
    assert found["Stalled"] == ("True", "422 tolerations: Invalid value")
    assert found["Failed"][0] == "False"


def test_a_full_quota_is_retried() -> None:
    site = Site(dlion_job())

    def refuse(verb: str, document: Document) -> None:
        if verb in ("create", "dry run") and document.get("kind") == "Job":
            raise RequestRefusedError("403 exceeded quota", 403)

    site.cluster.refuse = refuse
    tried_s = []
    for time_s in range(0, 2000, 10):
        site.time_s = float(time_s)
        assert site.look() is not None
        if ("dry run", "Job") in site.cluster.requests:
            tried_s.append(time_s)
    assert tried_s == [0, 10, 30, 70, 150, 310, 630, 1230, 1830]
    assert site.status()["state"] == "Pending"
    site.cluster.refuse = lambda _verb, _document: None
    site.look()
    assert ("create", "Job") not in site.cluster.writes()
    (labelled,) = [d for (k, _), d in site.cluster.objects.items() if k is Kind.DLION_JOB]
    labelled["metadata"]["labels"] = {"owner": "someone"}  # does not change its generation
    site.change(labelled)
    site.look()
    assert ("create", "Job") in site.cluster.writes()


@pytest.mark.parametrize("kind", [Kind.CONFIG_MAP, Kind.SERVICE, Kind.DEPLOYMENT])
def test_no_job_is_created_while_an_object_that_its_pods_need_is_refused(kind: Kind) -> None:
    """Its pods would wait and hold their places on the nodes.

    Once a run has its Jobs, the same refusal is only an event.
    """
    site = Site(dlion_job())

    def refuse(verb: str, document: Document) -> None:
        if verb in ("create", "apply") and Kind.of(document) is kind:
            raise RequestRefusedError("403 exceeded quota: small", 403)

    site.cluster.refuse = refuse
    assert site.look() == pytest.approx(10.0)
    assert ("create", "Job") not in site.cluster.writes()
    stalled = {c["type"]: (c["status"], c["reason"], c["message"]) for c in conditions(site)}
    assert stalled["Stalled"] == ("True", "Forbidden", "403 exceeded quota: small")
    site.cluster.refuse = lambda _verb, _document: None
    site.time_s += 10.0
    site.look()
    assert ("create", "Job") in site.cluster.writes()
    site.look()
    assert "Stalled" not in {c["type"] for c in conditions(site) if c["status"] == "True"}
    for name in [n for k, n in site.cluster.objects if k is kind]:
        site.lose(kind, name)
    site.cluster.refuse = refuse
    site.time_s = 700.0
    site.look()
    assert "Refused" in reasons(site)
    assert "Forbidden" not in {c["reason"] for c in conditions(site)}


@pytest.mark.parametrize("kind", [Kind.CONFIG_MAP, Kind.SERVICE, Kind.DEPLOYMENT])
def test_an_object_that_cannot_be_created_does_not_end_the_run(kind: Kind) -> None:
    site = Site(dlion_job())

    def refuse(verb: str, document: Document) -> None:
        if verb in ("create", "apply") and Kind.of(document) is kind:
            raise RequestRefusedError("422 metadata.name: Invalid value", 422)

    site.cluster.refuse = refuse
    site.look()
    assert ("create", "Job") not in site.cluster.writes()
    found = {c["type"]: (c["status"], c["reason"]) for c in conditions(site)}
    assert found["Stalled"] == ("True", "InvalidSpec")
    assert found["Failed"][0] == "False"


@pytest.mark.parametrize("kind", [Kind.JOB, Kind.SERVICE, Kind.DEPLOYMENT, Kind.CONFIG_MAP])
def test_an_object_of_another_owner_is_kept_and_reported(kind: Kind) -> None:
    site = Site(dlion_job())
    site.look()
    (name, theirs) = next((n, d) for (k, n), d in site.cluster.objects.items() if k is kind)
    theirs["metadata"]["ownerReferences"][0]["uid"] = "another-owner"
    before = copy.deepcopy(theirs)
    again = Site(cluster=site.cluster)
    again.look()
    assert site.cluster.objects[kind, name] == before
    if kind is Kind.JOB:
        messages = {c["type"]: c["message"] for c in site.status()["conditions"]}
        assert "has another owner" in messages["Stalled"]
    else:
        assert ("create", "Event") in again.cluster.requests


def test_an_object_that_is_being_deleted_is_waited_for() -> None:
    site = Site(dlion_job())
    site.look()
    service = next(d for (k, _), d in site.cluster.objects.items() if k is Kind.SERVICE)
    service["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    with pytest.raises(ConflictError, match="is being deleted"):
        Site(cluster=site.cluster).look()


def test_a_refused_update_does_not_end_a_run_that_trains() -> None:
    site = Site(dlion_job())
    site.look()
    site.runs.current_view = RunView(open_s=99.0, ready={SiteName("plant-a"): 2}, training=True)
    site.look()

    def refuse(verb: str, document: Document) -> None:
        if verb == "patch" and document.get("kind") == "JOB":
            raise RequestRefusedError("422 not while it is admitted", 422)

    site.cluster.refuse = refuse
    shrunk = copy.deepcopy(site.cluster.objects[Kind.DLION_JOB, "digits"])
    shrunk["spec"]["sites"][0]["groups"][0]["workers"] = 1
    site.change(shrunk)
    site.look()
    site.look()
    assert site.status()["state"] in ("Training", "Degraded")


def test_a_failed_deletion_is_retried() -> None:
    site = Site(dlion_job())
    site.look()
    ended = copy.deepcopy(site.cluster.objects[Kind.DLION_JOB, "digits"])
    ended["spec"]["runId"] = "2"
    site.change(ended)

    def refuse(verb: str, document: Document) -> None:
        if verb == "delete" and document.get("kind") == "DEPLOYMENT":
            raise ServerError("500")

    site.cluster.refuse = refuse
    with pytest.raises(ServerError):
        site.look()
    site.cluster.refuse = lambda _verb, _document: None
    site.look()
    keepers = [name for kind, name in site.cluster.objects if kind is Kind.DEPLOYMENT]
    assert len(keepers) == 1


def test_a_new_job_of_the_same_name_inherits_nothing() -> None:
    site = Site(dlion_job())
    site.look()
    second = dlion_job()
    second["metadata"]["uid"] = "u-2"
    for key in list(site.cluster.objects):
        del site.cluster.objects[key]
    site.change(second)
    closed: list[str] = []
    site.runs.close = lambda namespace, name: closed.append(name)  # type: ignore[method-assign]
    site.look()
    assert closed == ["digits"]


def test_an_api_server_that_does_not_answer_is_retried() -> None:
    site = Site(dlion_job())

    def refuse(verb: str, _document: Document) -> None:
        if verb == "apply":
            raise ServerError("503")

    site.cluster.refuse = refuse
    with pytest.raises(DLionError):
        site.look()
    site.cluster.refuse = lambda _verb, _document: None
    site.look()
    assert len(site.cluster.writes()) == 5  # the ConfigMap exists already


@pytest.mark.parametrize("error", [ServerError("503"), RequestRefusedError("403 no", 403)])
def test_events_of_a_look_that_fails_later_are_not_lost(error: DLionError) -> None:
    """Also of one that is refused: no later look finds anything to report."""
    site = Site(dlion_job({"small": 2, "large": 1}))
    failures = [None, error]  # of the first Job and of the second

    def refuse(verb: str, document: Document) -> None:
        is_job = verb == "create" and document["kind"] == "Job"
        if is_job and failures and (failure := failures.pop(0)):
            raise failure

    site.cluster.refuse = refuse
    with contextlib.suppress(ServerError):
        site.look()
    site.time_s = 100.0
    site.look()
    events = [each for (kind, _), each in site.cluster.objects.items() if kind is Kind.EVENT]
    made = [each["message"] for each in events if each["reason"].endswith("Created")]
    assert [message.split()[0] for message in made] == ["Deployment", "Job", "Job"]


def test_a_persistent_failure_appears_in_the_status_until_it_ends() -> None:
    site = Site(dlion_job())

    def refuse(verb: str, _document: Document) -> None:
        if verb == "apply":
            raise ServerError("apply Service digits: 500: failed calling webhook")

    site.cluster.refuse = refuse
    for second, is_reported in ((0.0, False), (59.0, False), (60.0, True)):
        site.time_s = second
        with pytest.raises(ServerError):
            site.look()
        assert (site.status().get("state") == "Pending") == is_reported
    conditions = {each["type"]: each for each in site.status()["conditions"]}
    assert (conditions["Ready"]["reason"], conditions["Stalled"]["status"]) == (
        "UpkeepFailing", "True"
    )  # fmt: skip
    assert "500: failed calling webhook; retrying" in conditions["Ready"]["message"]
    site.runs.current_view = RunView(open_s=99.0, ready={SiteName("plant-a"): 2}, training=True)
    with pytest.raises(ServerError):
        site.look()
    conditions = {each["type"]: each for each in site.status()["conditions"]}
    assert (conditions["Ready"]["status"], conditions["Ready"]["reason"]) == ("True", "Training")
    assert "failed calling webhook" in conditions["Ready"]["message"]
    site.cluster.refuse = lambda _verb, _document: None
    site.time_s += 10.0
    site.look()
    conditions = {each["type"]: each for each in site.status()["conditions"]}
    assert conditions["Ready"]["message"] == "2 workers train"


def test_telemetry_is_written_rarely_and_conditions_immediately() -> None:
    site = Site(dlion_job())
    site.look()

    def trains(percentage: int, ready: int) -> None:
        trainer_status = TrainerStatus(
            progress_percentage=percentage, metrics=(Metric(name="loss", value="1"),)
        )
        site.runs.current_view = RunView(
            open_s=99.0,
            ready={"plant-a": ready},
            training=True,
            trainer_status=trainer_status,  # type: ignore[dict-item]
        )

    trains(10, 2)
    site.look()
    assert site.cluster.writes() == [("patch", "status")]
    trains(11, 2)
    site.time_s += 1.0
    again_s = site.look()
    assert site.cluster.writes() == []
    assert again_s == pytest.approx(9.0)
    site.time_s += 9.0
    site.look()
    assert site.cluster.writes() == [("patch", "status")]
    trains(11, 1)
    site.look()
    assert site.cluster.writes() == [("patch", "status")]
    assert site.status()["state"] == "Degraded"


def test_time_alone_is_not_progress() -> None:
    site = Site(dlion_job())
    site.look()

    def trains(loss: str, second: int) -> None:
        trainer_status = TrainerStatus(
            metrics=(Metric(name="loss", value=loss),),
            last_updated_time=f"2026-01-31T12:00:{second:02}Z",
        )
        ready: Any = {"plant-a": 2}
        site.runs.current_view = RunView(
            open_s=99.0, ready=ready, training=True, trainer_status=trainer_status
        )
        site.time_s += 20.0
        site.look()

    trains("1", 0)
    assert site.cluster.writes() == [("patch", "status")]
    trains("1", 20)
    assert site.cluster.writes() == []
    assert site.status()["trainerStatus"]["lastUpdatedTime"] == "2026-01-31T12:00:00Z"
    assert set(site.status()["trainerStatus"]) == {"metrics", "lastUpdatedTime"}, (
        "a CRD of an earlier release prunes unknown fields: one that is always set is always news"
    )
    trains("0.9", 40)
    assert site.cluster.writes() == [("patch", "status")]
    assert site.status()["trainerStatus"]["lastUpdatedTime"] == "2026-01-31T12:00:40Z"


def test_with_many_jobs_telemetry_of_each_is_written_less_often() -> None:
    site = Site(dlion_job())
    site.look()
    (state,) = site._reconciler._states.values()
    others = {ObjectName("default", f"job-{number}"): state for number in range(299)}
    site._reconciler._states |= others

    def wrote(percentage: int, after_s: float) -> bool:
        trainer_status = TrainerStatus(progress_percentage=percentage)
        ready: Any = {"plant-a": 2}
        site.runs.current_view = RunView(
            open_s=99.0, ready=ready, training=True, trainer_status=trainer_status
        )
        site.time_s += after_s
        site.look()
        return site.cluster.writes() == [("patch", "status")]

    assert wrote(10, 0.0), "a condition is written immediately"
    assert not wrote(11, 29.0)
    assert wrote(12, 1.0)


def test_delayed_progress_does_not_count_the_other_jobs() -> None:
    """Passes grow with the number of jobs, writes do not: a count per pass would be quadratic."""
    site = Site(dlion_job())
    site.look()

    def progress(percentage: int) -> RunView:
        trainer_status, ready = (
            TrainerStatus(progress_percentage=percentage),
            {SiteName("plant-a"): 2},
        )
        return RunView(open_s=99.0, ready=ready, training=True, trainer_status=trainer_status)

    site.runs.current_view = progress(10)
    site.look()
    site._reconciler._states[ObjectName("default", "other")] = cast("ReconcileState", None)
    site.runs.current_view = progress(11)
    site.look()
    assert site.cluster.writes() == []
    site.time_s += 10.0
    with pytest.raises(AttributeError):
        site.look()


def test_a_deleted_job_is_no_longer_served() -> None:
    site = Site(dlion_job())
    site.look()
    site.store.remove(Kind.DLION_JOB, site.cluster.objects[Kind.DLION_JOB, "digits"])
    assert site.look() is None
    assert site.runs.open_runs == []
    assert site.cluster.requests == []


def test_a_change_of_reason_is_an_event_and_losing_it_is_not_an_error() -> None:
    site = Site(dlion_job())

    def refuse(_verb: str, document: Document) -> None:
        if document.get("kind") == "Event":
            raise ServerError("503")

    site.cluster.refuse = refuse
    site.look()
    posted = [r for r in site.cluster.requests if r[1] == "Event"]
    assert len(posted) == 3  # keeper and workers created, and starting
    assert site.status()["state"] == "Pending"


def test_reports_of_workers_are_posted_with_their_count() -> None:
    site = Site(dlion_job())
    site.look()
    site.runs.pending_events = (
        JobEvent("CheckpointSaved", "plant-a/small-0: iteration 7", count=3),
    )
    site.look()
    events = [each for (kind, _), each in site.cluster.objects.items() if kind is Kind.EVENT]
    posted = [(e["message"], e["count"]) for e in events if e["reason"] == "CheckpointSaved"]
    assert posted == [("plant-a/small-0: iteration 7", 3)]


def test_a_job_that_is_not_served_shows_the_states_of_its_other_sites() -> None:
    groups = [{"name": "small", "workers": 2}]
    sites = [{"name": name, "groups": groups} for name in ("plant-a", "plant-b")]
    site, other = Site(dlion_job(sites=sites, suspend=True)), SiteName("plant-b")
    there = RemoteView(is_reachable=True, heartbeat_age_s=1.0, has_run=True, workers=2)
    site.runs.others = RunView(open_s=0.0, ready={other: 2}, remote={other: there})
    site.look()
    assert site.runs.asked == ["plant-a", "plant-b"]
    assert [each["state"] for each in site.status()["sites"]] == ["Starting", "Ready"]
    site.runs.current_view, site.time_s = (
        RunView(open_s=9.0),
        99.0,
    )  # a served run reports its own sites
    site.look()
    assert [each["state"] for each in site.status()["sites"]] == ["Starting", "Unreachable"]


@pytest.mark.parametrize("sites", [None, "plant-a", {"plant-a": 1}, ["plant-a"], [{"name": 7}]])
def test_any_malformed_sites_are_an_invalid_spec(sites: Any) -> None:
    document = dlion_job()
    document["spec"]["sites"] = sites
    site = Site(document)
    site.look()
    assert ready(site)[0] == "InvalidSpec"


# ---- Services and routes for other sites ---------------------------------------------------------

GATE = Gateway(
    address="plant-a.example:443", parent=GatewayListenerSettings(name="edge", namespace="gateways")
)


def exposed(exposure: str, workers: int = 3) -> Site:
    """Return a job with this many joined workers here and one worker at another site."""
    sites = [
        {"name": name, "groups": [{"name": "small", "workers": count}]}
        for name, count in (("plant-a", workers), ("plant-b", 1))
    ]
    document = dlion_job(sites=sites, network={"exposure": exposure})
    site = Site(document, settings=replace(SETTINGS, gateway=GATE))
    site.runs.current_view = RunView(open_s=99.0, ready={SiteName("plant-a"): workers})
    return site


def ready(site: Site) -> tuple[str, str]:
    (found,) = [c for c in site.status()["conditions"] if c["type"] == "Ready"]
    return found["reason"], found["message"]


def exposed_indexes(site: Site) -> list[str]:
    """Return the indexes of the workers that have a Service."""
    services = [name for kind, name in site.cluster.objects if kind is Kind.SERVICE]
    return sorted(name.rpartition("-")[2] for name in services if "-small-" in name)


def is_of_worker(document: Document, index: int) -> bool:
    name = str(document.get("metadata", {}).get("name"))
    of_group = document.get("kind") == "Service" and "-small-" in name
    return of_group and name.endswith(f"-{index}")


def test_a_service_that_cannot_be_created_does_not_stop_the_others() -> None:
    site = exposed("NodePort")

    def refuse(verb: str, document: Document) -> None:
        if verb == "apply" and is_of_worker(document, 0):
            raise ServerError("500 failed to allocate a nodePort: range is full")

    site.cluster.refuse = refuse
    site.look()
    site.start_pods()
    assert exposed_indexes(site) == ["1", "2"]
    reason, message = ready(site)
    assert reason == "NotExposed"
    assert "small-0: unreachable from other sites: 500 failed to allocate a nodePort" in message
    assert "small-1" not in message
    fewer = copy.deepcopy(site.cluster.objects[Kind.DLION_JOB, "digits"])
    fewer["spec"]["sites"][0]["groups"][0]["workers"] = 2
    site.change(fewer)
    site.runs.current_view = RunView(open_s=99.0, ready={SiteName("plant-a"): 2})
    site.look()
    assert ("patch", "JOB") in site.cluster.writes()
    assert ("apply", "Service") not in site.cluster.requests
    site.time_s, site.cluster.refuse = 60.0, lambda _verb, _document: None
    site.look()
    assert ("apply", "Service") in site.cluster.requests
    assert ready(site)[0] == "WaitingForPeers"


def test_a_slowly_deleted_service_of_an_earlier_job_delays_only_itself() -> None:
    site = exposed("NodePort")
    site.look()
    key, earlier = next(
        (key, each) for key, each in site.cluster.objects.items() if is_of_worker(each, 1)
    )
    earlier["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    earlier["metadata"]["ownerReferences"][0]["uid"] = "u-0"
    site = exposed("NodePort")
    site.cluster.objects[key] = earlier
    site.look()
    assert exposed_indexes(site) == ["0", "1", "2"]
    reason, message = ready(site)
    assert reason == "NotExposed"
    assert "small-1: unreachable from other sites: Service" in message
    assert "is being deleted" in message
    del site.cluster.objects[key]
    site.time_s = 10.0
    site.look()
    assert exposed_indexes(site) == ["0", "1", "2"]
    assert ready(site)[0] == "WaitingForPeers"


def test_a_refusal_is_reported_once_and_retried_once_a_minute() -> None:
    site = exposed("Gateway")

    def refuse(_verb: str, document: Document) -> None:
        if document.get("kind") == "TLSRoute":
            raise RequestRefusedError(f"404 {document['metadata']['name']}: no such kind", 404)

    site.cluster.refuse = refuse
    site.look()  # the routes need the Services
    site.start_pods()
    site.time_s = 10.0
    site.look()
    assert site.cluster.requests.count(("apply", "TLSRoute")) == 6
    reason, message = ready(site)
    assert reason == "NotExposed"
    assert "no such kind; retrying" in message
    for site.time_s in (11.0, 40.0, 69.0):
        site.look()
        assert ("apply", "TLSRoute") not in site.cluster.requests
    assert site.runs.addresses == {}, "an address without a route is not published"
    site.time_s = 70.0
    site.look()
    assert site.cluster.requests.count(("apply", "TLSRoute")) == 6
    events = [each for (kind, _), each in site.cluster.objects.items() if kind is Kind.EVENT]
    assert [each["reason"] for each in events].count("Refused") == 1
    site.time_s, site.cluster.refuse = 130.0, lambda _verb, _document: None
    site.look()
    site.look()
    assert ready(site)[0] == "WaitingForPeers"
    assert len(site.runs.addresses or {}) == 3


def test_a_route_that_can_no_longer_be_read_stays_published() -> None:
    site = exposed("Gateway")
    site.look()
    site.start_pods()
    site.look()

    def refuse(verb: str, document: Document) -> None:
        if verb == "get" and document.get("kind") == "TLS_ROUTE":
            raise ServerError("503")

    site.cluster.refuse, site.time_s = refuse, 601.0
    site.look()
    assert site.cluster.requests.count(("get", "TLS_ROUTE")) == 3, "the other objects wait"
    site.look()
    assert ready(site)[0] == "WaitingForPeers"
    assert len(site.runs.addresses or {}) == 3


def test_nothing_is_created_before_the_named_secret_exists() -> None:
    site = Site(dlion_job(tls={"mode": "Secret", "secretName": "plant-ca"}))
    site.look()
    assert site.cluster.requests[0] == ("get", "SECRET")
    assert site.cluster.writes() == [("patch", "status")]
    assert site.runs.open_runs == [JobKey("default", "digits", "1")]
    given = GivenAuthority(begins=datetime(2026, 1, 1, tzinfo=UTC))
    site.cluster.objects[Kind.SECRET, "plant-ca"] = given.secret()
    site.time_s = 10.0
    site.look()
    assert ("create", "Job") in site.cluster.writes()
    assert site.runs.authority is not None
    assert site.runs.authority.issuer is not None


def test_no_secret_is_read_for_a_job_in_deletion() -> None:
    document = dlion_job(tls={"mode": "Secret", "secretName": "plant-ca"})
    document["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    site = Site(document)
    site.look()
    assert site.cluster.requests == []


def test_a_restarted_operator_reads_the_bundles_that_the_jobs_keep() -> None:
    bundles = {SiteName("plant-a"): GivenAuthority().own_pem}
    document = dlion_job(tls={"mode": "Secret", "secretName": "plant-ca"})
    site = Site(document)
    given = GivenAuthority(begins=datetime(2026, 1, 1, tzinfo=UTC))
    site.cluster.objects[Kind.SECRET, "plant-ca"] = given.secret()
    site.look()
    assert site.runs.kept_bundles == {}
    site.runs.current_view = RunView(open_s=1.0, bundles=bundles)
    site.look()
    assert ("patch", "JOB") in site.cluster.writes()
    site.look()
    assert site.cluster.writes() == []
    again = Site(cluster=site.cluster)
    again.look()
    assert again.runs.kept_bundles == bundles


def delete_pods_on_silent_node(site: Site) -> list[Document]:
    """Mark all pods as deleted on a node that reports nothing more."""
    pods = [copy.deepcopy(pod) for pod in site.store.all(Kind.POD)]
    for pod in pods:
        pod["metadata"] |= {
            "deletionTimestamp": "2026-01-31T11:00:00Z",  # of a clock an hour behind ours
            "deletionGracePeriodSeconds": 30,
            "resourceVersion": "1000",
        }
        states = [{"name": "trainer", "state": {"running": {}}}]
        pod["status"] = {"phase": "Running", "conditions": [], "containerStatuses": states}
        site.store.put(Kind.POD, pod)
    return pods


def test_the_grace_period_of_a_pod_starts_when_this_operator_observes_it() -> None:
    site = Site(dlion_job({"small": 2}))
    site.look()
    site.start_pods()
    site.look()
    delete_pods_on_silent_node(site)
    site.look()
    site.time_s = 90.0
    site.look()
    assert ("delete", "POD") not in site.cluster.requests
    site.time_s = 91.0
    site.look()
    assert site.cluster.requests.count(("delete", "POD")) == 3


@pytest.mark.parametrize("is_there", [False, True])
def test_pods_of_a_job_that_is_deleted_are_released_too(*, is_there: bool) -> None:
    site = Site(dlion_job({"small": 2}))
    site.look()
    site.start_pods()
    delete_pods_on_silent_node(site)
    if is_there:  # its deletion waits for its children
        document = copy.deepcopy(site.cluster.objects[Kind.DLION_JOB, "digits"])
        document["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
        site.change(document)
    else:
        site.store.remove(Kind.DLION_JOB, site.cluster.objects[Kind.DLION_JOB, "digits"])
        for job in site.store.all(Kind.JOB):
            site.store.remove(Kind.JOB, job)
    assert site.look() == pytest.approx(10.0)
    assert site.cluster.writes() == []
    site.time_s = 91.0
    site.look()
    assert site.cluster.writes().count(("delete", "POD")) == 3
    for pod in site.store.all(Kind.POD):
        site.store.remove(Kind.POD, pod)
    assert site.look() is None


def test_pods_with_our_label_and_another_owner_are_kept() -> None:
    site = Site(dlion_job({"small": 1}))
    site.look()
    site.start_pods()
    for pod in delete_pods_on_silent_node(site):
        pod["metadata"] |= {"ownerReferences": [], "resourceVersion": "1001"}
        site.store.put(Kind.POD, pod)
    site.store.remove(Kind.DLION_JOB, site.cluster.objects[Kind.DLION_JOB, "digits"])
    assert site.look() is None


def test_the_downtime_of_a_keeper_starts_when_this_operator_observes_it() -> None:
    site = Site(dlion_job({"small": 1}))
    site.look()
    site.start_pods()
    (pod,) = [p for p in site.store.all(Kind.POD) if "keeper" in p["metadata"]["name"]]
    since = "2026-01-31T11:00:00Z"  # of other clocks, an hour ago
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
    status = {"phase": "Running", "conditions": [unready]}
    metadata = pod["metadata"] | {"resourceVersion": "1000", "creationTimestamp": since}
    site.store.put(Kind.POD, {**pod, "metadata": metadata, "status": status})
    site.runs.current_view = RunView(open_s=0.0)
    for time_s, reason in ((0.0, "WorkersStarting"), (59.0, "WorkersStarting")):
        site.time_s = time_s
        site.look()
        assert ready(site)[0] == reason
    site.time_s = 60.0
    site.look()
    assert ready(site)[0] == "ContainerBroken"


def test_the_reason_for_a_missing_keeper_pod_comes_from_its_deployment() -> None:
    site = Site(dlion_job({"small": 1}))
    site.look()
    site.start_pods()
    (pod,) = [p for p in site.store.all(Kind.POD) if "keeper" in p["metadata"]["name"]]
    site.store.remove(Kind.POD, pod)
    ((kind, name),) = [key for key in site.cluster.objects if key[0] is Kind.DEPLOYMENT]
    message = 'pods "k" is forbidden: exceeded quota: small'
    refused = {"type": "ReplicaFailure", "status": "True", "message": message}
    deployment = {**site.cluster.objects[kind, name], "status": {"conditions": [refused]}}
    site.store.put(kind, site.cluster._keep(deployment))
    site.runs.current_view = RunView(open_s=99.0)
    site.look()
    assert ready(site)[0] == "WorkersStarting"
    site.time_s = 60.0
    site.look()
    reason, words = ready(site)
    assert reason == "PodsRefused"
    assert words.startswith(f"Deployment {name} creates no pod for the keeper: {message}; see `kub")


def reasons(site: Site) -> list[str]:
    """Return the reasons of all events, in order."""
    return [
        each["reason"] for (kind, _), each in site.cluster.objects.items() if kind is Kind.EVENT
    ]


def no_answer_for_events(_verb: str, document: Document) -> None:
    if document.get("kind") == "Event":
        raise ServerError("503 not now")


def test_an_unanswered_event_is_posted_later() -> None:
    site = Site(dlion_job())
    site.cluster.refuse = no_answer_for_events
    assert site.look() == pytest.approx(10.0)
    assert site.look() == pytest.approx(10.0)
    assert reasons(site) == []
    site.cluster.refuse = lambda _verb, _document: None
    site.look()
    posted = reasons(site)
    assert "WorkersStarting" in posted
    site.look()
    assert reasons(site) == posted


def test_a_refusal_with_a_changed_message_is_not_reported_again() -> None:
    """An admission webhook gives each request another number."""
    site = Site(dlion_job())
    numbers = iter(range(100))

    def refuse(verb: str, document: Document) -> None:
        if verb == "apply" and document.get("kind") == "Service":
            raise RequestRefusedError(f"403 denied: request {next(numbers)}", 403)

    site.look()
    for name in [n for k, n in site.cluster.objects if k is Kind.SERVICE]:
        site.lose(Kind.SERVICE, name)
    site.cluster.refuse = refuse
    for site.time_s in (700.0, 800.0, 900.0):
        site.look()
    assert reasons(site).count("Refused") == 2, "one for each Service"


def test_a_pod_with_a_finalizer_is_deleted_once() -> None:
    site = Site(dlion_job({"small": 2}))
    site.look()
    site.start_pods()
    delete_pods_on_silent_node(site)
    for site.time_s in (0.0, 91.0):
        site.look()
    assert site.cluster.requests.count(("delete", "POD")) == 3
    for pod in site.store.all(Kind.POD):  # the state that the API server then has
        pod = copy.deepcopy(pod)
        pod["metadata"] |= {"deletionGracePeriodSeconds": 0, "resourceVersion": "1001"}
        site.store.put(Kind.POD, pod)
    site.time_s = 200.0
    site.look()
    assert ("delete", "POD") not in site.cluster.requests
