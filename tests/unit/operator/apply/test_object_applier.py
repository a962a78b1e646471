"""How a decision reaches an API server, against one that is in memory.

Proves: what is there already is not sent again, also after a restart; a change is; pods are told of
an operator that is elsewhere or has another authority; what is refused
ends in the status; a Job is tried by a dry run before anything is made; somebody else's object of
the same name is left alone; what exposes workers keeps nothing from the rest, is told of where it
cannot be made, and is asked for again seldom; telemetry is written seldom and a condition at once.
The server here keeps objects and counts requests; that a real one takes them is shown in
tests/cluster.
"""

from __future__ import annotations

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
    """Of the job's status."""
    found: list[dict[str, Any]] = site.status()["conditions"]
    return found


def test_all_is_made_once_and_the_status_is_written_once() -> None:
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


def test_an_operator_that_starts_anew_sends_nothing() -> None:
    first = Site(dlion_job())
    first.look()
    second = Site(cluster=first.cluster)
    second.look()
    assert second.cluster.requests == [], "what is watched is known without a request"
    second.time_s = 700.0
    second.look()
    assert {verb for verb, kind in second.cluster.requests if kind != "Event"} <= {"patch"}


def test_what_is_watched_is_not_looked_up_before_it_is_made() -> None:
    """But for what is applied: that could take over another's object."""
    site = Site(dlion_job())
    site.look()
    gets = [kind for verb, kind in site.cluster.requests if verb == "get"]
    assert gets == ["SERVICE", "SERVICE"]


@pytest.mark.parametrize("error", [None, RequestRefusedError("403 exceeded quota", 403)])
@pytest.mark.parametrize("kind", [Kind.JOB, Kind.DEPLOYMENT, Kind.CONFIG_MAP])
def test_an_object_that_the_watches_cannot_see_is_found(
    kind: Kind, error: RequestRefusedError | None
) -> None:
    """It has lost our label; that a quota is full says nothing of what is there already."""
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
def test_what_somebody_deleted_is_made_anew_at_the_next_look(kind: Kind, how: str) -> None:
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


def elsewhere(first: Site) -> Site:
    """Beside the same API server, an operator of another namespace with another authority."""
    address = "dlion-operator.dlion.svc:7443"
    moved = replace(SETTINGS, coordinator=replace(SETTINGS.coordinator, address=address))
    second = Site(cluster=first.cluster, settings=moved)
    second.runs.known_by = "ANOTHER PEM"
    return second


def config_map_of(site: Site) -> Document:
    """The run's."""
    (found,) = (each for (kind, _), each in site.cluster.objects.items() if kind is Kind.CONFIG_MAP)
    return found


def test_pods_that_start_anew_find_the_operator_of_now_with_the_manifest_of_then() -> None:
    first = Site(dlion_job())
    first.look()
    config = json.loads(config_map_of(first)["data"]["pod.json"])
    config["job_document"]["spec"]["of an earlier release"] = True
    config_map_of(first)["data"]["pod.json"] = json.dumps(config)
    second = elsewhere(first)
    second.look()
    assert second.cluster.writes() == [("patch", "CONFIG_MAP")]
    after = config_map_of(second)["data"]
    config["coordinator_address"] = "dlion-operator.dlion.svc:7443"
    assert (json.loads(after["pod.json"]), after["ca.pem"]) == (config, "ANOTHER PEM")
    elsewhere(first).look()
    assert second.cluster.writes() == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "not JSON", '{"coordinator_address": "then", "edited": NaN}', "[" * 99_999],
    ids=["empty", "list", "nothing", "no JSON", "NaN", "deep"],
)
def test_a_configuration_that_cannot_be_read_is_left_as_it_is(text: str) -> None:
    first = Site(dlion_job())
    first.look()
    config_map_of(first)["data"]["pod.json"] = text
    elsewhere(first).look()
    assert config_map_of(first)["data"] == {"pod.json": text, "ca.pem": "ANOTHER PEM"}


def test_a_job_is_tried_before_anything_is_made() -> None:
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


def test_a_quota_that_is_full_is_tried_again() -> None:
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
    labelled["metadata"]["labels"] = {"owner": "somebody"}  # no change of its generation
    site.change(labelled)
    site.look()
    assert ("create", "Job") in site.cluster.writes()


@pytest.mark.parametrize("kind", [Kind.CONFIG_MAP, Kind.SERVICE, Kind.DEPLOYMENT])
def test_no_job_is_made_while_what_its_pods_would_wait_for_is_refused(kind: Kind) -> None:
    """They would be started to wait, and hold their places on the nodes; once a run has its Jobs,
    the same refusal is an event and nothing more."""
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
def test_what_cannot_be_made_as_it_is_asked_for_ends_no_run(kind: Kind) -> None:
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
def test_an_object_of_somebody_else_is_left_alone_and_said_so(kind: Kind) -> None:
    site = Site(dlion_job())
    site.look()
    (name, theirs) = next((n, d) for (k, n), d in site.cluster.objects.items() if k is kind)
    theirs["metadata"]["ownerReferences"][0]["uid"] = "somebody-else"
    before = copy.deepcopy(theirs)
    again = Site(cluster=site.cluster)
    again.look()
    assert site.cluster.objects[kind, name] == before
    if kind is Kind.JOB:
        said = {c["type"]: c["message"] for c in site.status()["conditions"]}
        assert "has another owner" in said["Stalled"]
    else:
        assert ("create", "Event") in again.cluster.requests


def test_an_object_that_is_being_deleted_is_waited_for() -> None:
    site = Site(dlion_job())
    site.look()
    service = next(d for (k, _), d in site.cluster.objects.items() if k is Kind.SERVICE)
    service["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    with pytest.raises(ConflictError, match="is being deleted"):
        Site(cluster=site.cluster).look()


def test_what_is_refused_of_a_runs_upkeep_ends_no_run_that_trains() -> None:
    site = Site(dlion_job())
    site.look()
    site.runs.seen = RunView(open_s=99.0, ready={SiteName("plant-a"): 2}, training=True)
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


def test_a_delete_that_failed_is_tried_again() -> None:
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


def test_a_job_of_the_same_name_that_is_made_anew_inherits_nothing() -> None:
    site = Site(dlion_job())
    site.look()
    anew = dlion_job()
    anew["metadata"]["uid"] = "u-2"
    for key in list(site.cluster.objects):
        del site.cluster.objects[key]
    site.change(anew)
    closed: list[str] = []
    site.runs.close = lambda namespace, name: closed.append(name)  # type: ignore[method-assign]
    site.look()
    assert closed == ["digits"]


def test_an_api_server_that_does_not_answer_is_asked_again() -> None:
    site = Site(dlion_job())

    def refuse(verb: str, _document: Document) -> None:
        if verb == "apply":
            raise ServerError("503")

    site.cluster.refuse = refuse
    with pytest.raises(DLionError):
        site.look()
    site.cluster.refuse = lambda _verb, _document: None
    site.look()
    assert len(site.cluster.writes()) == 5  # the ConfigMap was made before


def test_what_goes_on_failing_is_said_in_the_status_and_taken_back() -> None:
    site = Site(dlion_job())

    def refuse(verb: str, _document: Document) -> None:
        if verb == "apply":
            raise ServerError("apply Service digits: 500: failed calling webhook")

    site.cluster.refuse = refuse
    for second, told in ((0.0, False), (59.0, False), (60.0, True)):
        site.time_s = second
        with pytest.raises(ServerError):
            site.look()
        assert (site.status().get("state") == "Pending") == told
    conditions = {each["type"]: each for each in site.status()["conditions"]}
    assert (conditions["Ready"]["reason"], conditions["Stalled"]["status"]) == (
        "UpkeepFailing", "True"
    )  # fmt: skip
    assert "500: failed calling webhook; retrying" in conditions["Ready"]["message"]
    site.runs.seen = RunView(open_s=99.0, ready={SiteName("plant-a"): 2}, training=True)
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


def test_telemetry_is_written_seldom_and_conditions_at_once() -> None:
    site = Site(dlion_job())
    site.look()

    def trains(percentage: int, ready: int) -> None:
        said = TrainerStatus(
            progress_percentage=percentage, metrics=(Metric(name="loss", value="1"),)
        )
        site.runs.seen = RunView(
            open_s=99.0,
            ready={"plant-a": ready},
            training=True,
            trainer_status=said,  # type: ignore[dict-item]
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


def test_the_time_alone_is_no_progress() -> None:
    site = Site(dlion_job())
    site.look()

    def trains(loss: str, second: int) -> None:
        said = TrainerStatus(
            metrics=(Metric(name="loss", value=loss),),
            last_updated_time=f"2026-01-31T12:00:{second:02}Z",
        )
        ready: Any = {"plant-a": 2}
        site.runs.seen = RunView(open_s=99.0, ready=ready, training=True, trainer_status=said)
        site.time_s += 20.0
        site.look()

    trains("1", 0)
    assert site.cluster.writes() == [("patch", "status")]
    trains("1", 20)
    assert site.cluster.writes() == []
    assert site.status()["trainerStatus"]["lastUpdatedTime"] == "2026-01-31T12:00:00Z"
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
        said = TrainerStatus(progress_percentage=percentage)
        ready: Any = {"plant-a": 2}
        site.runs.seen = RunView(open_s=99.0, ready=ready, training=True, trainer_status=said)
        site.time_s += after_s
        site.look()
        return site.cluster.writes() == [("patch", "status")]

    assert wrote(10, 0.0), "a condition is written at once"
    assert not wrote(11, 29.0)
    assert wrote(12, 1.0)


def test_progress_that_waits_counts_no_other_jobs() -> None:
    """Passes are more with each job, and writes are not: all would take the square of the jobs."""
    site = Site(dlion_job())
    site.look()

    def progress(percentage: int) -> RunView:
        said, ready = TrainerStatus(progress_percentage=percentage), {SiteName("plant-a"): 2}
        return RunView(open_s=99.0, ready=ready, training=True, trainer_status=said)

    site.runs.seen = progress(10)
    site.look()
    site._reconciler._states[ObjectName("default", "other")] = cast("ReconcileState", None)
    site.runs.seen = progress(11)
    site.look()
    assert site.cluster.writes() == []
    site.time_s += 10.0
    with pytest.raises(AttributeError):
        site.look()


def test_a_job_that_is_gone_is_served_no_more() -> None:
    site = Site(dlion_job())
    site.look()
    site.store.remove(Kind.DLION_JOB, site.cluster.objects[Kind.DLION_JOB, "digits"])
    assert site.look() is None
    assert site.runs.open_runs == []
    assert site.cluster.requests == []


def test_a_change_of_reason_is_an_event_and_its_loss_is_no_error() -> None:
    site = Site(dlion_job())

    def refuse(_verb: str, document: Document) -> None:
        if document.get("kind") == "Event":
            raise ServerError("503")

    site.cluster.refuse = refuse
    site.look()
    posted = [r for r in site.cluster.requests if r[1] == "Event"]
    assert len(posted) == 3  # keeper and workers created, and starting
    assert site.status()["state"] == "Pending"


def test_what_workers_tell_is_posted_with_its_count() -> None:
    site = Site(dlion_job())
    site.look()
    site.runs.pending_events = (
        JobEvent("CheckpointSaved", "plant-a/small-0: iteration 7", count=3),
    )
    site.look()
    events = [each for (kind, _), each in site.cluster.objects.items() if kind is Kind.EVENT]
    told = [(e["message"], e["count"]) for e in events if e["reason"] == "CheckpointSaved"]
    assert told == [("plant-a/small-0: iteration 7", 3)]


def test_a_job_that_is_not_served_shows_how_its_other_sites_are() -> None:
    groups = [{"name": "small", "workers": 2}]
    sites = [{"name": name, "groups": groups} for name in ("plant-a", "plant-b")]
    site, other = Site(dlion_job(sites=sites, suspend=True)), SiteName("plant-b")
    there = RemoteView(is_reachable=True, heartbeat_age_s=1.0, has_run=True, workers=2)
    site.runs.others = RunView(open_s=0.0, ready={other: 2}, remote={other: there})
    site.look()
    assert site.runs.asked == ["plant-a", "plant-b"]
    assert [each["state"] for each in site.status()["sites"]] == ["Starting", "Ready"]
    site.runs.seen, site.time_s = RunView(open_s=9.0), 99.0  # what is served speaks for itself
    site.look()
    assert [each["state"] for each in site.status()["sites"]] == ["Starting", "Unreachable"]


@pytest.mark.parametrize("sites", [None, "plant-a", {"plant-a": 1}, ["plant-a"], [{"name": 7}]])
def test_sites_may_be_wrong_in_any_way(sites: Any) -> None:
    document = dlion_job()
    document["spec"]["sites"] = sites
    site = Site(document)
    site.look()
    assert ready(site)[0] == "InvalidSpec"


# ---- what leads other sites to workers -----------------------------------------------------------

GATE = Gateway(
    address="plant-a.example:443", parent=GatewayListenerSettings(name="edge", namespace="gateways")
)


def exposed(exposure: str, workers: int = 3) -> Site:
    """Of so many workers here, which have joined, and one at another site."""
    sites = [
        {"name": name, "groups": [{"name": "small", "workers": count}]}
        for name, count in (("plant-a", workers), ("plant-b", 1))
    ]
    document = dlion_job(sites=sites, network={"exposure": exposure})
    site = Site(document, settings=replace(SETTINGS, gateway=GATE))
    site.runs.seen = RunView(open_s=99.0, ready={SiteName("plant-a"): workers})
    return site


def ready(site: Site) -> tuple[str, str]:
    (found,) = [c for c in site.status()["conditions"] if c["type"] == "Ready"]
    return found["reason"], found["message"]


def of_workers(site: Site) -> list[str]:
    """Indexes of the workers whose Services are there."""
    services = [name for kind, name in site.cluster.objects if kind is Kind.SERVICE]
    return sorted(name.rpartition("-")[2] for name in services if "-small-" in name)


def is_of_worker(document: Document, index: int) -> bool:
    name = str(document.get("metadata", {}).get("name"))
    of_group = document.get("kind") == "Service" and "-small-" in name
    return of_group and name.endswith(f"-{index}")


def test_a_service_that_cannot_be_made_keeps_nothing_from_the_rest() -> None:
    site = exposed("NodePort")

    def refuse(verb: str, document: Document) -> None:
        if verb == "apply" and is_of_worker(document, 0):
            raise ServerError("500 failed to allocate a nodePort: range is full")

    site.cluster.refuse = refuse
    site.look()
    site.start_pods()
    assert of_workers(site) == ["1", "2"]
    reason, message = ready(site)
    assert reason == "NotExposed"
    assert "small-0: unreachable from other sites: 500 failed to allocate a nodePort" in message
    assert "small-1" not in message
    fewer = copy.deepcopy(site.cluster.objects[Kind.DLION_JOB, "digits"])
    fewer["spec"]["sites"][0]["groups"][0]["workers"] = 2
    site.change(fewer)
    site.runs.seen = RunView(open_s=99.0, ready={SiteName("plant-a"): 2})
    site.look()
    assert ("patch", "JOB") in site.cluster.writes()
    assert ("apply", "Service") not in site.cluster.requests
    site.time_s, site.cluster.refuse = 60.0, lambda _verb, _document: None
    site.look()
    assert ("apply", "Service") in site.cluster.requests
    assert ready(site)[0] == "WaitingForPeers"


def test_a_service_of_an_earlier_job_that_goes_slowly_is_waited_for_alone() -> None:
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
    assert of_workers(site) == ["0", "1", "2"]
    reason, message = ready(site)
    assert reason == "NotExposed"
    assert "small-1: unreachable from other sites: Service" in message
    assert "is being deleted" in message
    del site.cluster.objects[key]
    site.time_s = 10.0
    site.look()
    assert of_workers(site) == ["0", "1", "2"]
    assert ready(site)[0] == "WaitingForPeers"


def test_what_is_refused_is_told_once_and_asked_for_once_a_minute() -> None:
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
    assert site.runs.addresses == {}, "nobody is told of what leads nowhere"
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


def test_a_route_that_was_there_and_cannot_be_looked_at_is_told_on() -> None:
    site = exposed("Gateway")
    site.look()
    site.start_pods()
    site.look()

    def refuse(verb: str, document: Document) -> None:
        if verb == "get" and document.get("kind") == "TLS_ROUTE":
            raise ServerError("503")

    site.cluster.refuse, site.time_s = refuse, 601.0
    site.look()
    assert site.cluster.requests.count(("get", "TLS_ROUTE")) == 3, "the rest waits"
    site.look()
    assert ready(site)[0] == "WaitingForPeers"
    assert len(site.runs.addresses or {}) == 3


def test_the_secret_that_a_job_names_is_read_and_nothing_made_before_it_is_there() -> None:
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


def test_of_a_job_on_its_way_out_no_secret_is_read() -> None:
    document = dlion_job(tls={"mode": "Secret", "secretName": "plant-ca"})
    document["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    site = Site(document)
    site.look()
    assert site.cluster.requests == []


def test_bundles_are_kept_on_the_jobs_and_told_to_an_operator_that_starts_anew() -> None:
    bundles = {SiteName("plant-a"): GivenAuthority().own_pem}
    document = dlion_job(tls={"mode": "Secret", "secretName": "plant-ca"})
    site = Site(document)
    given = GivenAuthority(begins=datetime(2026, 1, 1, tzinfo=UTC))
    site.cluster.objects[Kind.SECRET, "plant-ca"] = given.secret()
    site.look()
    assert site.runs.kept_bundles == {}
    site.runs.seen = RunView(open_s=1.0, bundles=bundles)
    site.look()
    assert ("patch", "JOB") in site.cluster.writes()
    site.look()
    assert site.cluster.writes() == []
    again = Site(cluster=site.cluster)
    again.look()
    assert again.runs.kept_bundles == bundles


def on_a_silent_node(site: Site) -> list[Document]:
    """All pods are to go, and their node says nothing more of them."""
    pods = [copy.deepcopy(pod) for pod in site.store.all(Kind.POD)]
    for pod in pods:
        pod["metadata"] |= {
            "deletionTimestamp": "2026-01-31T11:00:00Z",  # by a clock an hour behind ours
            "deletionGracePeriodSeconds": 30,
            "resourceVersion": "1000",
        }
        states = [{"name": "trainer", "state": {"running": {}}}]
        pod["status"] = {"phase": "Running", "conditions": [], "containerStatuses": states}
        site.store.put(Kind.POD, pod)
    return pods


def test_the_grace_of_a_pod_is_counted_by_what_this_operator_has_seen() -> None:
    site = Site(dlion_job({"small": 2}))
    site.look()
    site.start_pods()
    site.look()
    on_a_silent_node(site)
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
    on_a_silent_node(site)
    if is_there:  # its deletion waits for what belongs to it
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


def test_pods_that_bear_our_label_and_are_not_ours_are_left_alone() -> None:
    site = Site(dlion_job({"small": 1}))
    site.look()
    site.start_pods()
    for pod in on_a_silent_node(site):
        pod["metadata"] |= {"ownerReferences": [], "resourceVersion": "1001"}
        site.store.put(Kind.POD, pod)
    site.store.remove(Kind.DLION_JOB, site.cluster.objects[Kind.DLION_JOB, "digits"])
    assert site.look() is None


def test_for_how_long_a_keeper_does_not_serve_is_counted_by_what_this_operator_has_seen() -> None:
    site = Site(dlion_job({"small": 1}))
    site.look()
    site.start_pods()
    (pod,) = [p for p in site.store.all(Kind.POD) if "keeper" in p["metadata"]["name"]]
    since = "2026-01-31T11:00:00Z"  # by clocks of others, an hour ago
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
    status = {"phase": "Running", "conditions": [unready]}
    metadata = pod["metadata"] | {"resourceVersion": "1000", "creationTimestamp": since}
    site.store.put(Kind.POD, {**pod, "metadata": metadata, "status": status})
    site.runs.seen = RunView(open_s=0.0)
    for time_s, reason in ((0.0, "WorkersStarting"), (59.0, "WorkersStarting")):
        site.time_s = time_s
        site.look()
        assert ready(site)[0] == reason
    site.time_s = 60.0
    site.look()
    assert ready(site)[0] == "ContainerBroken"


def test_why_a_keeper_gets_no_pod_is_read_off_its_deployment() -> None:
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
    site.runs.seen = RunView(open_s=99.0)
    site.look()
    assert ready(site)[0] == "WorkersStarting"
    site.time_s = 60.0
    site.look()
    reason, words = ready(site)
    assert reason == "PodsRefused"
    assert words.startswith(f"Deployment {name} creates no pod for the keeper: {message}; see `kub")


def reasons(site: Site) -> list[str]:
    """Of all events, in order."""
    return [
        each["reason"] for (kind, _), each in site.cluster.objects.items() if kind is Kind.EVENT
    ]


def no_answer_for_events(_verb: str, document: Document) -> None:
    if document.get("kind") == "Event":
        raise ServerError("503 not now")


def test_an_event_that_the_api_server_has_no_answer_for_is_posted_later() -> None:
    site = Site(dlion_job())
    site.cluster.refuse = no_answer_for_events
    assert site.look() == pytest.approx(10.0)
    assert site.look() == pytest.approx(10.0)
    assert reasons(site) == []
    site.cluster.refuse = lambda _verb, _document: None
    site.look()
    told = reasons(site)
    assert "WorkersStarting" in told
    site.look()
    assert reasons(site) == told


def test_words_that_change_are_no_news_of_what_is_refused() -> None:
    """An admission webhook names each request by another number."""
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
    assert reasons(site).count("Refused") == 2, "one of each Service"


def test_a_pod_that_a_finalizer_keeps_is_deleted_once() -> None:
    site = Site(dlion_job({"small": 2}))
    site.look()
    site.start_pods()
    on_a_silent_node(site)
    for site.time_s in (0.0, 91.0):
        site.look()
    assert site.cluster.requests.count(("delete", "POD")) == 3
    for pod in site.store.all(Kind.POD):  # as the API server has it then
        pod = copy.deepcopy(pod)
        pod["metadata"] |= {"deletionGracePeriodSeconds": 0, "resourceVersion": "1001"}
        site.store.put(Kind.POD, pod)
    site.time_s = 200.0
    site.look()
    assert ("delete", "POD") not in site.cluster.requests
