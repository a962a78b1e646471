"""Test `dlion describe`, `events` and `wait` with scripted servers.

- `describe` shows problems first, then the output of `get NAME`, pods and events, of one or several
  contexts. Without rights to pods or events it shows the rest and names the missing right. JSON
  contains all of it.
- `events` shows events of the job, its pods, Jobs, keeper and claim, over several pages, and of no
  other job. A watch repeats none.
- `wait` accepts kubectl's conditions and its own words, with their exit codes, and refuses
  conditions that no job has.

Left out: which problem has which message (test_pod_findings.py, test_job_findings.py).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.cluster_names import group_job_name, keeper_claim_name, keeper_name
from dlion_api.exit_codes import ExitCode
from dlion_api.names import JobKey
from dlion_cli.__main__ import main
from dlion_cli.views.job_status import JobStatus
from manifest_table import changed, smallest
from scripted_servers import Server, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from scripted_servers import Answer

KEY = JobKey("ml", "digits", "1")
JOB_NAME = group_job_name(KEY, "small")
NONE: Answer = (200, '{"items": []}')
MAY_NOT: Answer = (
    403,
    json.dumps({"message": 'User "jane" cannot list resource "pods" in API group "" in the '
                           'namespace "ml"'}),
)  # fmt: skip
NOT_THERE: Answer = (404, json.dumps({"details": {"kind": "dlionjobs", "name": "digits"}}))


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds")


def condition(type_: str, reason: str, status: str = "True", **more: Any) -> dict[str, Any]:
    return {"type": type_, "status": status, "reason": reason, "message": "", **more}


def job(*conditions: dict[str, Any], version: int = 1, generation: int = 1, **status: Any
        ) -> dict[str, Any]:  # fmt: skip
    made = changed(smallest(), {"spec.runId": "1"})
    made["metadata"] = {
        "name": "digits", "namespace": "ml", "uid": "u", "resourceVersion": str(version),
        "generation": generation, "creationTimestamp": ago(900), "managedFields": [{}],
    }  # fmt: skip
    given = {"observedGeneration": 1, "runId": "1", "state": "Training", "conditions":
             list(conditions), **status}  # fmt: skip
    return made | {"status": given}


def pod(index: int, **status: Any) -> dict[str, Any]:
    labels = {
        "dlion.dev/run-id": "1", "dlion.dev/group": "small", "dlion.dev/site": "plant-a",
        "app.kubernetes.io/component": "worker",
        "batch.kubernetes.io/job-completion-index": f"{index}",
    }  # fmt: skip
    metadata = {"name": f"{JOB_NAME}-{index}-x2x7k", "creationTimestamp": ago(400 * 86_400 + 3600),
                "labels": labels, "managedFields": [{}]}  # fmt: skip
    return {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": status}


def event(kind: str, name: str, reason: str, *, type_: str = "Normal", seconds: float = 60,
          version: int = 1, count: int = 1) -> dict[str, Any]:  # fmt: skip
    return {
        "metadata": {"uid": f"{name}{reason}", "resourceVersion": f"{version}"},
        "involvedObject": {"kind": kind, "name": name}, "reason": reason, "type": type_,
        "message": f"m-{reason}", "lastTimestamp": ago(seconds), "count": count,
    }  # fmt: skip


def listed(*items: dict[str, Any], **metadata: str) -> Answer:
    return 200, json.dumps({"items": items, "metadata": {"resourceVersion": "7", **metadata}})


CRASHED = pod(
    0, phase="Running", containerStatuses=[{
        "name": "trainer", "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 67, "message": "ValueError: no"}},
    }],
)  # fmt: skip
RUNNING = pod(1, phase="Running")
TRAINS = condition("Ready", "Training")
OTHERS = [
    event("Pod", "other-small-aaaaaa-0-x", "Unrelated"),
    event("DLionJob", "digits-2", "Unrelated"),
    event("Job", group_job_name(JobKey("ml", "digits", "2"), "small"), "Unrelated"),
    event("Node", "n1", "Unrelated"),
]
OURS = [
    event("DLionJob", "digits", "WorkersCreated", seconds=500),
    event("Job", JOB_NAME, "SuccessfulCreate", seconds=400),
    event("Pod", f"{JOB_NAME}-0-x2x7k", "BackOff", type_="Warning", seconds=300, count=4),
    event("ReplicaSet", f"{keeper_name(KEY)}-6d4f", "SuccessfulCreate", seconds=200),
    event("PersistentVolumeClaim", keeper_claim_name(KEY), "Provisioning", seconds=100),
]


def server(document: dict[str, Any], **more: Any) -> Server:
    answers = {"digits": (200, json.dumps(document)), "pods": listed(RUNNING, CRASHED),
               "events": listed(*OTHERS, *reversed(OURS))}  # fmt: skip
    return Server(answers | more)


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a file with a context for each given server."""
    with ExitStack() as stack:
        yield lambda **servers: stack.enter_context(served(tmp_path / "kubeconfig", servers))


def test_describe_shows_problems_first_then_everything(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=server(job(TRAINS)))
    assert main(["describe", "digits", "--kubeconfig", file]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "PROBLEMS"
    assert lines[1].startswith(f"error  pod/{JOB_NAME}-0-x2x7k: container trainer ended 3 times")
    assert "67 (PROGRAM): ValueError: no" in lines[1]
    assert lines[3].strip() == "dlion logs digits --group small --worker 0 -n ml"
    order = [out.index(word) for word in ("PROBLEMS", "STATE", "CONDITION", "POD  ", "LAST SEEN")]
    assert order == sorted(order)
    (first,) = [line.split() for line in lines if line.startswith(f"{JOB_NAME}-0")]
    assert first[1:6] == ["small-0", "0", "n1", "CrashLoopBackOff", "3"]
    (second,) = [line.split() for line in lines if line.startswith(f"{JOB_NAME}-1")]
    # Rank 1 is the first worker of the other group.
    assert second[1:7] == ["small-1", "2", "n1", "Running", "0", "400d"]
    assert "Unrelated" not in out


def test_describe_of_several_contexts(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = server(job(TRAINS), pods=listed(RUNNING))
    file = kubeconfig(a=quiet, b=Server({"digits": NOT_THERE}), c=server(job(TRAINS)))
    command = ["describe", "digits", "--contexts", "a,b,c", "--kubeconfig", file]
    assert main(command) == ExitCode.UNAVAILABLE
    captured = capsys.readouterr()
    assert [line for line in captured.out.splitlines() if line.startswith("CONTEXT")] == [
        "CONTEXT a", "CONTEXT c",
    ]  # fmt: skip
    assert captured.out.count("none found") == 1
    assert "context b: there is no DLionJob 'digits'" in captured.err
    assert main([*command, "-o", "json"]) == ExitCode.UNAVAILABLE
    first, second, third = json.loads(capsys.readouterr().out)
    assert (first["context"], first["error"], first["problems"]) == ("a", None, [])
    assert "no DLionJob" in second["error"]
    assert third["problems"][0]["reason"] == "CrashLoopBackOff"


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ((200, '{"status": {"clusterName": "edge-1"}}'), "its copy is in cluster edge-1"),
        ((200, '{"status": {}}'), "no copy of the job"),
        (NOT_THERE, "without the Workload: "),
        ((404, "404 page not found"), "kueue.x-k8s.io/v1beta2/namespaces/ml/workloads"),
    ],
)
def test_describe_names_the_cluster_of_a_dispatched_job(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    workload: Answer,
    expected: str,
) -> None:
    document = job(TRAINS)
    document["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "edge"}
    answers = {"pods": listed(), "digits-dispatch": workload}
    file = kubeconfig(a=server(document, **answers))
    assert main(["describe", "digits", "--kubeconfig", file]) == 0
    assert expected in " ".join(capsys.readouterr().out.split())


def test_sent_bytes_of_a_running_job_are_shown_by_site_and_kind(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dlion_cli.commands.cluster.describe.INTERVAL_S", 0.01)
    sent = "".join(
        f'dlion_link_sent_bytes_total{{peer_site="plant-b",peer="{peer}",kind="{kind}"}} {count}\n'
        for peer, kind, count in (("b-0", "gradient", 500), ("b-1", "gradient", 250),
                                  ("b-0", "state", 250))
    )  # fmt: skip
    scripted = server(job(TRAINS), pods=listed(RUNNING), metrics=(200, sent))
    assert main(["describe", "digits", "--kubeconfig", kubeconfig(a=scripted)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("LINKS")
    assert lines[at + 1].split()[:2] == ["LINKS", "TO"]
    assert lines[at + 2].split() == ["plant-b", "—", "—", "0", "—", "—", "—"]
    heading = "Bytes on links since the sidecars started"
    assert lines[at + 3] == f"{heading}: 1 kB: sent 750 B (gradient 750 B), state 250 B"
    budget = 'dlion_link_budget_bytes{peer_site="plant-b"} 1000\n'  # nothing is counted yet
    scripted = server(job(TRAINS), pods=listed(RUNNING), metrics=(200, budget))
    assert main(["describe", "digits", "--kubeconfig", kubeconfig(b=scripted)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("LINKS") + 2].split() == ["plant-b", "1", "kB", *5 * ["—"]]
    assert not any(heading in line for line in lines)


def test_wide_has_the_load_of_each_worker_and_all_columns_on_any_terminal(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dlion_cli.commands.cluster.describe.INTERVAL_S", 0.01)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    scripted = server(job(TRAINS), pods=listed(RUNNING), metrics=(200, "dlion_x 1\n"))
    command = ["describe", "digits", "--kubeconfig", kubeconfig(a=scripted)]
    for more, is_wide in ([], False), (["-o", "wide"], True):
        assert main([*command, *more]) == 0
        lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
        assert ("LOAD" in lines) == is_wide
        assert any(line.startswith("POD") and "NODE" in line for line in lines) == is_wide
        assert any(line.split()[-1:] == ["WHY"] for line in lines) == is_wide
        assert any("GROUP" in line for line in lines) == is_wide
        assert (max(map(len, lines)) > 80) == is_wide


def test_describe_as_json(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=server(job(TRAINS)))
    assert main(["describe", "digits", "-o", "json", "--kubeconfig", file]) == 0
    described = json.loads(capsys.readouterr().out)
    names = {"job", "pods", "events", "load", "problems", "culprit", "notes", "summary"}
    assert set(described) == names
    assert described["load"] is None
    assert described["culprit"] is None
    assert described["summary"] is None, "the run has not ended"
    assert [each["reason"] for each in described["events"]] == [each["reason"] for each in OURS]
    (problem,) = described["problems"]
    assert problem == {
        "severity": "error", "reason": "CrashLoopBackOff", "object": f"pod/{JOB_NAME}-0-x2x7k",
        "message": "container trainer ended 3 times with 67 (PROGRAM): ValueError: no",
        "advice": "The program raised an error or broke its protocol: see the traceback",
        "command": "dlion logs digits --group small --worker 0 -n ml",
    }  # fmt: skip
    assert not any(
        "managedFields" in each["metadata"] for each in [described["job"], *described["pods"]]
    )


def training(figures: dict[str, str], **more: Any) -> dict[str, Any]:
    metrics = [{"name": name, "value": value} for name, value in figures.items()]
    return job(TRAINS, trainerStatus={"metrics": metrics, **more})


WAITING = {
    "computeFraction": "0.2", "waitFraction": "0.7", "selectFraction": "0.04",
    "encodeFraction": "0.03", "sendFraction": "0.0", "decodeFraction": "0.01",
    "applyFraction": "0.01", "otherFraction": "0.01", "waitedForRank": "1",
    "waitedForFraction": "0.9", "loss": "0.5",
}  # fmt: skip


def test_the_parts_of_the_step_time_have_advice(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=server(training(WAITING)))
    assert main(["describe", "digits", "--kubeconfig", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("TIME")
    assert lines[at + 1].startswith(
        "computing 20.0 %, waiting 70.0 %, exchange 9.0 % (select 4.0 %"
    )
    assert lines[at + 1].endswith("other 1.0 %")
    assert lines[at + 2].startswith("70 % of the time waits, mostly for plant-")
    assert lines[at + 3].startswith("→ ")
    (figures,) = [line for line in lines if line.startswith("ETA ")]
    assert "loss 0.5" in figures
    assert "Fraction" not in figures
    assert main(["describe", "digits", "-o", "json", "--kubeconfig", file]) == 0
    assert json.loads(capsys.readouterr().out)["culprit"]["kind"] == "Waiting"


def test_the_slowest_link_of_an_awaited_site_is_named_with_how_to_measure_it(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    waits = training({**WAITING, "waitedForRank": "0"})
    site = waits["spec"]["sites"][0]["name"]
    rates = (("b", "48.9"), ("c", "20"), ("d", ""), ("e", "nan"), ("f", "-3"))
    pairs = [{"pair": f"{site} to {to}", "megabitsPerSecond": rate} for to, rate in rates]
    waits["status"]["links"] = {"pairs": [*pairs, {"pair": "b to c", "megabitsPerSecond": "1"}]}
    assert main(["describe", "digits", "--kubeconfig", kubeconfig(a=server(waits))]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"-0; slowest link of its site: {site} → c (20 Mbit/s)" in printed
    assert "measure the links (dlion preflight FILE --contexts A,B --bandwidth)" in printed


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"computeFraction": "0.9"},
        {"computeFraction": "much", "waitFraction": "0.1"},
        {"computeFraction": "nan", "waitFraction": "-1"},
        {"computeFraction": "1e400", "waitFraction": "1e400"},
    ],
    ids=str,
)
def test_unknown_figures_hide_only_the_times(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str], figures: dict[str, str]
) -> None:
    file = kubeconfig(a=server(training(figures)))
    assert main(["describe", "digits", "--kubeconfig", file]) == 0
    assert "TIME" not in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("trainer_status", "target", "eta"),
    [
        ({"estimatedRemainingSeconds": 90}, False, "1:30"),
        ({"estimatedRemainingSeconds": 90}, True, "≤ 1:30"),
        ({}, True, "—"),
        ({"metrics": [{"name": "secondsToTarget", "value": "40 to 200"}]}, True, "0:40 to 3:20"),
        ({"metrics": [{"name": "secondsToTarget", "value": "soon"}]}, True, "—"),
        ({"metrics": [{"name": "secondsToTarget", "value": "9" * 400}]}, True, "—"),
    ],
    ids=str,
)
def test_the_remaining_time_is_a_range_if_an_accuracy_ends_the_run(
    trainer_status: dict[str, Any], target: bool, eta: str
) -> None:
    document = job(TRAINS, trainerStatus=trainer_status)
    document["spec"]["trainer"]["stop"] = {"targetAccuracy": 0.9} if target else {"maxSteps": 9}
    assert JobStatus(document).eta() == eta


@pytest.mark.parametrize("what", ["pods", "events"])
def test_without_a_right_describe_shows_the_rest(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str], what: str
) -> None:
    file = kubeconfig(a=server(job(TRAINS), **{what: MAY_NOT}))
    command = ["describe", "digits", "--kubeconfig", file]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"without {what}: user 'jane' may not list pods in namespace ml (403)" in out
    assert "STATE" in out
    assert ("LAST SEEN" in out) == (what == "pods")
    assert main([*command, "-o", "json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described[what] is None
    assert len(described["notes"]) == 1


def test_describe_of_a_job_without_an_operator(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    new = job(observedGeneration=-1, state="")
    file = kubeconfig(a=server(new, pods=NONE, events=NONE))
    assert main(["describe", "digits", "--kubeconfig", file]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("error  dlionjob/digits: no operator has observed")
    assert "Run 1 has no pods at this site." in out


# ---- events --------------------------------------------------------------------------------------


def test_events_of_the_job_and_of_its_objects(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=server(job()))
    command = ["events", "digits", "--kubeconfig", file]
    assert main(command) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["LAST", "SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"]
    assert [row.split()[2] for row in rows] == [each["reason"] for each in OURS]
    assert rows[2].split()[1:] == [
        "Warning", "BackOff", f"pod/{JOB_NAME}-0-x2x7k", "m-BackOff", "(x4)"
    ]  # fmt: skip
    assert main([*command, "--types", "warning"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main([*command, "--types", "Normal,Warning", "-o", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(OURS)
    assert main([*command, "--types", "Bad"]) == ExitCode.USAGE
    assert "'bad': allowed: Normal, Warning" in capsys.readouterr().err


def test_events_are_read_in_pages(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    pages = iter([listed(*OTHERS, **{"continue": "p2"}), listed(OURS[0], **{"continue": "p3"}),
                  listed(OURS[1])])  # fmt: skip
    file = kubeconfig(a=server(job(), events=lambda: next(pages)))
    assert main(["events", "digits", "--kubeconfig", file]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_events_of_an_earlier_job_of_that_name_are_left_out(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The time of an event is by the clock of its reporter, and its creation by the API server's,
    as is that of the job. An operator may report an earlier job's event after the new job began."""
    events = [event("DLionJob", "digits", reason, type_="Warning", seconds=1000)
              for reason in ("DataSkipped", "DataUnavailable", "DataSkipped")]  # fmt: skip
    for each, age_s, uid in zip(events, (1000, 800, 700), ("u", "u", "before"), strict=True):
        each["metadata"]["creationTimestamp"] = ago(age_s)
        each["involvedObject"]["uid"] = uid
    file = kubeconfig(a=server(job(TRAINS), pods=NONE, events=listed(*events)))
    assert main(["describe", "digits", "-o", "json", "--kubeconfig", file]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [each["reason"] for each in described["events"]] == ["DataUnavailable"]
    assert [each["reason"] for each in described["problems"]] == ["DataUnavailable"]
    assert main(["events", "digits", "-o", "json", "--kubeconfig", file]) == 0
    assert json.loads(capsys.readouterr().out) == described["events"]


def test_get_leaves_out_events_of_an_earlier_job_of_that_name(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    events = [event("DLionJob", "digits", reason) for reason in ("Earlier", "Present")]
    for each, uid in zip(events, ("before", "u"), strict=True):
        each["involvedObject"]["uid"] = uid
    file = kubeconfig(a=server(job(), events=listed(*events)))
    assert main(["get", "digits", "--kubeconfig", file]) == 0
    printed = capsys.readouterr().out
    assert ("Present" in printed, "Earlier" in printed) == (True, False)


def test_events_of_the_job_are_found_behind_many_others(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    pages = iter([*([listed(OTHERS[0], **{"continue": "p"})] * 30), listed(*OURS)])
    file = kubeconfig(a=server(job(), events=lambda: next(pages)))
    assert main(["events", "digits", "--kubeconfig", file]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(OURS)


def test_too_many_events_to_find_those_of_the_job_are_an_error(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A server may never end. Part of the events would look like all."""
    endless = listed(*OURS, **{"continue": "p"})
    file = kubeconfig(a=server(job(), pods=NONE, events=endless))
    assert main(["describe", "digits", "--kubeconfig", file]) == 0
    assert "without events: namespace ml has more than 100,000" in capsys.readouterr().out
    command = ["events", "digits", "--kubeconfig", file]
    assert main(command) == ExitCode.DATA
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "namespace ml has more than 100,000 events" in captured.err


def test_a_watch_ends_where_the_events_have_become_too_many(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each further request would read as many."""
    answers = iter([listed(*OURS)])
    endless = listed(*OURS, **{"continue": "p"})
    growing = server(job(), events=lambda: next(answers, endless), watch=(200, ""))
    assert main(["events", "digits", "-w", "--kubeconfig", kubeconfig(a=growing)]) == ExitCode.DATA
    assert "connection lost" not in capsys.readouterr().err


def test_missing_events_and_a_missing_right_are_reported(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=server(job(), events=NONE), b=server(job(), events=MAY_NOT))
    assert main(["events", "digits", "--kubeconfig", file]) == 0
    assert "no such events of digits" in capsys.readouterr().err
    assert main(["events", "digits", "--context", "b", "--kubeconfig", file]) == ExitCode.DENIED


def test_watched_events_appear_once_each_until_ctrl_c(kubeconfig: Callable[..., str]) -> None:
    changes = [
        {"type": "ADDED", "object": OTHERS[0]},
        {"type": "MODIFIED", "object": OURS[0]},
        {"type": "BOOKMARK", "object": {}},
        {"type": "ADDED", "object": event("Pod", f"{JOB_NAME}-0-x2x7k", "Pulled")},
        {"type": "MODIFIED", "object": OURS[2] | {"metadata": {"uid": "w"}}},
        {"type": "ERROR", "object": {"code": 410}},
    ]  # fmt: skip
    text = "".join(json.dumps(each) + "\n" for each in changes)
    file = kubeconfig(a=server(job(), events=listed(*OURS), watch=(200, text)))
    command = [sys.executable, "-m", "dlion_cli", "events", "digits", "-w", "--kubeconfig", file]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A background process of a shell ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(1 + len(OURS) + 2)]
        watching.send_signal(signal.SIGINT)
        rest, errors = watching.communicate(timeout=60)
    assert watching.returncode == ExitCode.INTERRUPTED
    reasons = [line.split()[2] for line in lines[1:]]
    assert reasons == [*(each["reason"] for each in OURS), "Pulled", "BackOff"]
    assert not rest
    assert not errors


# ---- wait ----------------------------------------------------------------------------------------


def watched(*documents: dict[str, Any], deleted: bool = False) -> Answer:
    kind = "DELETED" if deleted else "MODIFIED"
    return 200, "".join(json.dumps({"type": kind, "object": each}) + "\n" for each in documents)


DONE = job(condition("Succeeded", "Completed"), version=2)
FAILED = job(condition("Failed", "ProgramFailed"), version=2)
MET = "dlionjob.dlion.dev/digits condition met\n"


@pytest.mark.parametrize(
    ("target", "before", "after", "code", "printed"),
    [
        ("ended", job(), DONE, 0, "digits has succeeded"),
        ("ended", job(), FAILED, 67, ""),
        ("training", job(), job(TRAINS, version=2), 0, MET),
        ("training", job(TRAINS), FAILED, 0, MET),
        ("training", job(condition("Ready", "Suspended")), FAILED, 67, ""),
        ("training", job(TRAINS, generation=2), DONE, 0, MET),
        ("condition=Degraded", job(), job(condition("Degraded", "PeersLost"), version=2), 0, MET),
        ("condition=degraded=false", job(condition("Degraded", "x", "False")), DONE, 0, MET),
        ("condition=Ready=Unknown", job(condition("Ready", "x", "Unknown")), DONE, 0, MET),
        ("condition=Ready", job(condition("Ready", "x", observedGeneration=1), generation=2),
         job(condition("Ready", "x", observedGeneration=2), generation=2, version=2), 0, MET),
    ],
)  # fmt: skip
def test_wait_ends_as_required(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    target: str,
    before: dict[str, Any],
    after: dict[str, Any],
    code: int,
    printed: str,
) -> None:
    file = kubeconfig(a=server(before, watch=watched(after)))
    words = ["wait", "digits", "--for", target, "--timeout", "20", "--kubeconfig", file]
    assert main(words) == code
    assert capsys.readouterr().out.startswith(printed)


def test_wait_is_for_the_end_by_default(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=server(FAILED))
    assert main(["wait", "digits", "--kubeconfig", file]) == ExitCode.PROGRAM
    assert "digits has failed (ProgramFailed)" in capsys.readouterr().err


def test_wait_for_deletion(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    gone = Server({"digits": NOT_THERE})
    going = server(job(), watch=watched(job(), deleted=True))
    file = kubeconfig(a=gone, b=going)
    for context in ("a", "b"):
        where = ["--context", context, "--kubeconfig", file]
        assert main(["wait", "digits", "--for=delete", *where]) == 0
        assert capsys.readouterr().out == MET
        assert main(["wait", "digits", "--for=training", *where]) == ExitCode.UNAVAILABLE
    assert "'digits' was deleted while waiting" in capsys.readouterr().err


def test_wait_for_all_names_ends_at_the_time_limit(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = server(job(), watch=(200, ""), other=(200, json.dumps(DONE)))
    file = kubeconfig(a=scripted)
    words = ["wait", "digits", "other", "--timeout", "0.3", "--kubeconfig", file]
    assert main(words) == ExitCode.DEADLINE
    captured = capsys.readouterr()
    assert "digits: ended was not reached within 0.3 s. `dlion describe digits`" in captured.err
    assert "other has succeeded" in captured.out  # the other job is still checked


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "condition=Readi",
            "'Readi' is not a condition of a job. Did you mean Ready? Allowed: Ready, ",
        ),
        ("condition=", "Allowed: Ready, Reconciling, Stalled, Suspended, PeersConnected"),
        ("condition=Ready=Yes", "status 'Yes': allowed: True, False, Unknown"),
        ("jsonpath={.x}", "allowed: training, ended, delete, condition=TYPE[=STATUS]"),
        ("", "allowed: training"),
    ],
)
def test_wait_refuses_conditions_that_no_job_has(
    target: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["wait", "digits", f"--for={target}"]) == ExitCode.USAGE
    assert words in " ".join(capsys.readouterr().err.split())
