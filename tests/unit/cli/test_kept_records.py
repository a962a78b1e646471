"""Test `dlion logs`, `events` and `describe` of a run whose pods or events were deleted.

- They show what the keeper has, marked as such; with --run also of an earlier run. An ended run has
  its figures, its time shares, and whether its records persist.
- Without a keeper, without the right to read it, or without content, the command reports it and
  shows the rest.
- Damaged figures, control characters and an endless answer of the keeper do no harm.
- The Python client reads the same logs, and the same data frame of records as for a local run.

The API servers are scripted. Commands in pods run the keeper's program on a real result folder.

Left out: pods and a real API server (tests/cluster/test_kept_records.py).
"""

from __future__ import annotations

import contextlib
import json
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

import dlion
from dlion.errors import AbsentError, DeniedError, SpecError, UnavailableError
from dlion_api import cluster_names as names
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank, SiteName
from dlion_api.protocol.progress import EvaluationRecord, EventRecord, StepRecord
from dlion_api.protocol.records import record_to_json
from dlion_api.reasons import EventReason
from dlion_api.spec import load_job
from dlion_cli.__main__ import main
from dlion_cli.local_runs import kept_logs
from dlion_cli.pod_streams import kept_records
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.summary.summary import Ending
from manifest_table import changed, smallest
from scripted_servers import Server, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from scripted_servers import Answer

SITE = "plant-a"
MANIFEST = changed(
    smallest(),
    {"metadata.namespace": "ml", "spec.runId": "2", "spec.sites.0.groups.0.workers": 2},
)  # fmt: skip
OTHER = load_job(MANIFEST).with_group_ranks().worker_at(SiteName(SITE), "small", 1).rank
NONE: Answer = (200, '{"items": []}')
DENIED: Answer = (403, json.dumps({"message": 'User "jane" cannot create resource "pods/exec"'}))


def job(state: str = "Failed", reason: str = "ProgramFailed") -> Answer:
    conditions = [
        {"type": state, "status": "True", "reason": reason, "message": "small-0 ended with 67",
         "lastTransitionTime": "2026-01-31T12:00:00Z"}
    ]  # fmt: skip
    status = {"observedGeneration": 1, "runId": "2", "state": state, "conditions": conditions}
    return 200, json.dumps(MANIFEST | {"status": status})


def pod(component: str, index: int = 0, volume: str = "persistentVolumeClaim") -> dict[str, Any]:
    labels = {
        names.JOB_LABEL: "digits", names.RUN_LABEL: "2", names.COMPONENT_LABEL: component,
        names.SITE_LABEL: SITE,
    }  # fmt: skip
    if component == names.WORKER:
        labels |= {names.GROUP_LABEL: "small", names.INDEX_LABEL: str(index)}
    return {
        "metadata": {"name": f"{component}-{index}", "labels": labels,
                     "creationTimestamp": "2026-01-31T11:00:00Z"},
        "spec": {"volumes": [{"name": "state", volume: {}}]},
        "status": {"phase": "Running" if component == names.KEEPER else "Succeeded"},
    }  # fmt: skip


KEEPER = pod(names.KEEPER)


@pytest.fixture
def keeper_disk(tmp_path: Path) -> Path:
    """Return the disk of a keeper with two runs, the second of which has failed."""
    for run in ("1", "2"):
        manifest = load_job(changed(MANIFEST, {"spec.runId": run})).with_group_ranks()
        folder = ResultFolder.open_or_create(
            tmp_path / "kept" / run, manifest, now=datetime.now(UTC)
        )
        for record in records():
            folder.append(record)
        folder.finish(Ending("small-0 ended with 67", succeeded=False))
        folder.close()
        logs = tmp_path / "kept" / run / "logs"
        logs.mkdir()
        (logs / "worker-0.log").write_text(f"step 1 of run {run}\nValueError: no layer\n")
        (logs / f"worker-{OTHER}.log").write_text(f"lost \x1b[2J peer of run {run}\n")
    return tmp_path / "kept"


def step(rank: int, iteration: int) -> StepRecord:
    return StepRecord(
        10.0 * iteration, Rank(rank), 1, iteration, 1.0, 32, 64, 0.05, 4.0, 10.0, 4.0, 0.1, 5.0,
        32 * iteration, waited_for=(1 - rank,),
    )  # fmt: skip


def records() -> list[StepRecord | EventRecord]:
    lost = EventRecord(63.0, OTHER, 4, EventReason.WORKER_LOST, "its stream\x1b[2J broke", True)
    ended = EventRecord(65.0, Rank(0), 0, "ProgramFailed", "small-0 ended with 67", True)
    steps = [step(rank, iteration) for iteration in range(1, 5) for rank in range(2)]
    return [*steps, lost, EventRecord(64.0, Rank(0), 4, "Training", "all train"), ended]


class Cluster(Server):
    """A server that lists the pods of a selector."""

    def __init__(self, pods: Sequence[dict[str, Any]], answers: dict[str, Answer], disk: Path | None
                 ) -> None:  # fmt: skip
        super().__init__(answers, kept=disk)
        self._pods = pods

    def answer(self, address: str) -> Answer:
        url = urlsplit(address)
        if not url.path.endswith("/pods"):
            return super().answer(address)
        wanted = dict(
            each.split("=") for each in parse_qs(url.query)["labelSelector"][0].split(",")
        )
        found = [
            each for each in self._pods if wanted.items() <= each["metadata"]["labels"].items()
        ]
        return 200, json.dumps({"items": found})


@pytest.fixture
def run_command(
    tmp_path: Path, keeper_disk: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Return a function that runs a command against a cluster and returns code, output and
    errors.
    """

    def run(
        *arguments: str,
        pods: Sequence[dict[str, Any]] = (KEEPER,),
        disk: Path | None = keeper_disk,
        **answers: Answer,
    ) -> tuple[int, str, str]:
        all_answers = {"digits": job(), "events": NONE, **answers}
        with served(tmp_path / "config", {"x": Cluster(pods, all_answers, disk)}) as config:
            code = main([*arguments, "--kubeconfig", config])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# ---- logs ----------------------------------------------------------------------------------------


def test_logs_of_deleted_pods_come_from_the_keeper(run_command: Callable[..., Any]) -> None:
    code, printed, errors = run_command("logs", "digits")
    assert code == 0, errors
    assert printed.splitlines() == [
        f"{SITE}/small-0 | step 1 of run 2", f"{SITE}/small-0 | ValueError: no layer",
        f"{SITE}/small-1 | lost ·[2J peer of run 2",
    ]  # fmt: skip
    assert errors == "dlion: pods are gone: the keeper has the ends of their logs\n"
    code, printed, _ = run_command("logs", "digits", "--worker", "0", "--tail", "1", "-f")
    assert (code, printed) == (0, f"{SITE}/small-0 | ValueError: no layer\n")


def test_logs_come_from_existing_pods_and_otherwise_from_the_keeper(
    run_command: Callable[..., Any],
) -> None:
    line = "2026-01-31T12:00:00Z from the pod\n"
    pods = (KEEPER, pod(names.WORKER, 1))
    code, printed, errors = run_command("logs", "digits", pods=pods, log=(200, line))
    assert code == 0, errors
    assert printed.splitlines() == [
        "small-1 | from the pod", f"{SITE}/small-0 | step 1 of run 2",
        f"{SITE}/small-0 | ValueError: no layer",
    ]  # fmt: skip
    assert errors == "dlion: pods of small-0 are gone: the keeper has the ends of their logs\n"


def test_logs_of_an_earlier_run(run_command: Callable[..., Any]) -> None:
    code, printed, errors = run_command("logs", "digits", "--run", "1", "--worker", "1")
    assert (code, printed, errors) == (0, f"{SITE}/small-1 | lost ·[2J peer of run 1\n", "")
    code, _, errors = run_command("logs", "digits", "--run", "7")
    assert code == ExitCode.UNAVAILABLE
    assert "the keeper has no results of run '7' yet; it has those of: 1, 2" in errors
    for flags in (("-f",), ("--timestamps",), ("-c", "sidecar")):
        code, _, errors = run_command("logs", "digits", "--run", "1", *flags)
        assert (code, "--run reads trainers' logs" in errors) == (ExitCode.USAGE, True)


def test_lost_logs_are_reported(
    run_command: Callable[..., Any], keeper_disk: Path, tmp_path: Path
) -> None:
    code, _, errors = run_command("logs", "digits", pods=())
    assert code == ExitCode.UNAVAILABLE
    assert "has no pods of workers at this site" in errors
    assert "has no keeper pod here" in errors
    assert "digits-keeper" in errors
    code, _, errors = run_command("logs", "digits", disk=None, exec=DENIED)
    assert code == ExitCode.UNAVAILABLE
    assert "pods/exec" in errors
    for each in (keeper_disk / "2" / "logs").iterdir():
        each.unlink()
    code, _, errors = run_command("logs", "digits")
    assert code == ExitCode.UNAVAILABLE
    assert "the keeper has no logs of these workers of run 2" in errors
    code, _, errors = run_command("logs", "digits", "-c", "sidecar")
    assert (code, "no pods of workers" in errors) == (ExitCode.UNAVAILABLE, True)


def test_an_endless_answer_of_the_keeper_is_stopped(
    run_command: Callable[..., Any], keeper_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (keeper_disk / "2" / "logs" / "worker-9.log").open("wb") as file:
        file.truncate(20 * 2**20)
    monkeypatch.setattr(kept_logs, "_MAX_BYTES", 2**20)
    code, printed, errors = run_command("logs", "digits")
    assert (code, printed) == (ExitCode.UNAVAILABLE, "")
    assert "sends more than these files may have" in errors


@pytest.fixture
def python_client(tmp_path: Path, keeper_disk: Path) -> Iterator[Callable[..., dlion.Client]]:
    """Return a function that creates a Python client of such a cluster."""
    with contextlib.ExitStack() as stack:

        def client(
            *,
            pods: Sequence[dict[str, Any]] = (KEEPER,),
            disk: Path | None = keeper_disk,
            **more: Answer,
        ) -> dlion.Client:
            answers = {"digits": job(), **more}
            config = served(tmp_path / "config", {"x": Cluster(pods, answers, disk)})
            path = stack.enter_context(config)
            return stack.enter_context(dlion.Client("kubernetes", kubeconfig=path))

        yield client


def test_the_python_client_reads_logs_of_deleted_pods_from_the_keeper(
    python_client: Callable[..., dlion.Client],
) -> None:
    client = python_client()
    assert [*client.get_job_logs("digits")] == ["step 1 of run 2", "ValueError: no layer"]
    assert [*client.get_job_logs("digits", worker=int(OTHER), follow=True)] == [
        "lost \x1b[2J peer of run 2"
    ]  # unchanged: a program may need it
    with pytest.raises(SpecError, match="is not a rank"):
        client.get_job_logs("digits", worker=9_999_999)
    with pytest.raises(AbsentError, match="at site plant-b, not at the site of this cluster"):
        client.get_job_logs(
            "digits", worker=9
        )  # its group and index may equal those of a worker here


def test_the_python_client_reads_an_existing_pod(
    python_client: Callable[..., dlion.Client],
) -> None:
    line = "2026-01-31T12:00:00Z from the pod\n"
    client = python_client(pods=(KEEPER, pod(names.WORKER, 1)), log=(200, line))
    assert [*client.get_job_logs("digits", worker=int(OTHER))] == ["from the pod"]
    assert [*client.get_job_logs("digits")][-1] == "ValueError: no layer"


def test_the_python_client_names_the_missing_part(
    python_client: Callable[..., dlion.Client], keeper_disk: Path
) -> None:
    with pytest.raises(UnavailableError, match=r"no pods of workers.*has no keeper pod here"):
        python_client(pods=()).get_job_logs("digits")
    with pytest.raises(UnavailableError, match=r"Of what is kept: .*pods/exec"):
        python_client(disk=None, exec=DENIED).get_job_logs("digits")
    waiting = python_client(digits=job("Training", "Training"))
    with pytest.raises(UnavailableError, match="no pods of workers"):
        waiting.get_job_logs("digits", follow=True)
    elsewhere = pod(names.KEEPER)
    elsewhere["metadata"]["labels"][names.SITE_LABEL] = "plant-z"
    with pytest.raises(AbsentError, match="is at site plant-a, not at the site of this cluster"):
        python_client(pods=(elsewhere,)).get_job_logs("digits")
    for each in (keeper_disk / "2" / "logs").iterdir():
        each.unlink()
    with pytest.raises(UnavailableError, match="the keeper has no logs of these workers"):
        python_client().get_job_logs("digits")


def test_metrics_of_the_python_client_are_the_records_of_the_keeper(
    python_client: Callable[..., dlion.Client], keeper_disk: Path
) -> None:
    """The frame equals that of the same folder on this machine."""
    figures = EvaluationRecord(
        70.0, OTHER, 4, 128, 0.75, 0.5, 9, final=True, metrics={"auc": 0.25, "loss": 3.0}
    )
    with (keeper_disk / "2" / "events.jsonl").open("a") as file:
        file.write(f"{record_to_json(figures)}\n")
    client = python_client()
    frame = client.get_job_metrics("digits")
    assert frame.equals(dlion.Client(root=keeper_disk).get_job_metrics("2"))
    assert frame["loss"].notna().sum() == 8
    assert {SITE} < set(frame["site"])
    last = frame.iloc[-1]
    assert (last["worker"], last["accuracy"], last["auc"]) == (OTHER, 0.75, 0.25)
    assert last["metric_loss"] == 3.0


def test_the_python_client_explains_missing_metrics(
    python_client: Callable[..., dlion.Client], keeper_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnavailableError, match=r"has no keeper pod here.*docs/keeper.md"):
        python_client(pods=()).get_job_metrics("digits")
    with pytest.raises(DeniedError, match="pods/exec"):
        python_client(disk=None, exec=DENIED).get_job_metrics("digits")
    with monkeypatch.context() as patch:
        patch.setattr(kept_records, "MAX_RECORDS_BYTES", -(4 << 20))
        with pytest.raises(UnavailableError, match="sends more than these files may have"):
            python_client().get_job_metrics("digits")
    (keeper_disk / "2" / "events.jsonl").unlink()
    with pytest.raises(UnavailableError, match=r"records of run 2 cannot be read: .*events"):
        python_client().get_job_metrics("digits")
    shutil.rmtree(keeper_disk / "2")
    with pytest.raises(UnavailableError, match="no results of run '2' yet; it has those of: 1"):
        python_client().get_job_metrics("digits")


# ---- events --------------------------------------------------------------------------------------


def test_expired_events_come_from_the_keeper(
    run_command: Callable[..., Any],
) -> None:
    code, printed, errors = run_command("events", "digits")
    assert code == 0, errors
    assert errors == (
        "dlion: the cluster has no such events of digits (any more): these are the keeper's\n"
    )
    rows = [line.split() for line in printed.splitlines()]
    assert rows[0] == ["RUN", "TIME", "TYPE", "REASON", "OBJECT", "MESSAGE"]
    assert rows[1][:4] == ["1:03", "Warning", "WorkerLost", f"worker/{SITE}/small-1"]
    assert rows[2][:4] == ["1:04", "Normal", "Training", "dlionjob/digits"]
    assert rows[3][:4] == ["1:05", "Warning", "ProgramFailed", "dlionjob/digits"]
    assert "\x1b" not in printed
    code, printed, _ = run_command("events", "digits", "--types", "Warning", "-o", "json")
    assert [(each["reason"], each["runSeconds"]) for each in json.loads(printed)] == [
        ("WorkerLost", 63.0), ("ProgramFailed", 65.0)
    ]  # fmt: skip


def test_events_of_an_earlier_and_of_an_unknown_run(run_command: Callable[..., Any]) -> None:
    code, printed, errors = run_command("events", "digits", "--run", "1")
    assert (code, errors, "WorkerLost" in printed) == (0, "", True)
    code, printed, errors = run_command("events", "digits", "--run", "7")
    assert (code, printed) == (ExitCode.UNAVAILABLE, "")
    assert "no results of run '7'" in errors
    code, printed, errors = run_command("events", "digits", pods=())
    assert (code, printed) == (0, "")
    assert "none of the keeper: digits has no keeper pod here" in errors
    assert run_command("events", "digits", "--run", "1", "-w")[0] == ExitCode.USAGE


# ---- describe ------------------------------------------------------------------------------------


def test_an_ended_run_is_described_with_its_figures(run_command: Callable[..., Any]) -> None:
    code, printed, errors = run_command("describe", "digits")
    assert code == 0, errors
    assert "Failed: small-0 ended with 67 after" in " ".join(printed.split())
    assert f"{SITE}/small-1" in printed
    assert "Time: computing " in printed
    assert "keeper.size" not in printed
    _, printed, _ = run_command("describe", "digits", "-o", "json")
    assert json.loads(printed)["summary"]["steps"] == 8


def test_hostile_text_of_a_keeper_does_not_control_the_terminal(
    run_command: Callable[..., Any], keeper_disk: Path
) -> None:
    summary = keeper_disk / "2" / "summary.json"
    document = json.loads(summary.read_text())
    document["job"]["name"] = document["workers"][0]["name"] = "a\x1b]0;b\x07\x1b[2J"
    for steps in (document["steps"], 0):
        summary.write_text(json.dumps({**document, "steps": steps}))
        code, printed, _ = run_command("describe", "digits")
        assert (code, "a·]0;b" in printed) == (0, True)
        assert not {"\x1b", "\x07"} & set(printed)


def test_describe_names_the_data_that_ends_with_the_keepers_pod(
    run_command: Callable[..., Any],
) -> None:
    code, printed, _ = run_command(
        "describe", "digits", pods=(pod(names.KEEPER, volume="emptyDir"),)
    )
    words = " ".join(printed.split())
    assert code == 0
    assert (
        "are lost with the keeper's pod: this site's operator has no keeper.size. `dlion" in words
    )
    code, printed, _ = run_command("describe", "digits", pods=())
    words = " ".join(printed.split())
    assert code == 0
    assert "Without figures of the run: digits has no keeper pod here." in words
    assert "Reading the claim" in words
    code, printed, _ = run_command("describe", "digits", "-o", "json", pods=())
    (note,) = json.loads(printed)["notes"]
    assert note.startswith("without figures of the run: digits has no keeper pod here.")
    code, printed, _ = run_command("describe", "digits", disk=None, exec=DENIED)
    assert (code, "Without figures of the run:" in printed) == (0, True)


@pytest.mark.parametrize(
    "content",
    ["", "nonsense", "[]", "{}", '{"steps": "many"}', '{"steps": 1, "workers": [], "ending": 7}',
     '{"a":' * 100_000],
)  # fmt: skip
def test_damaged_figures_do_no_harm(
    run_command: Callable[..., Any], keeper_disk: Path, content: str
) -> None:
    (keeper_disk / "2" / "summary.json").write_text(content)
    code, printed, errors = run_command("describe", "digits")
    assert (code, errors) == (0, "")
    assert "damaged" in printed
    assert "ProgramFailed" in printed


def test_a_running_job_is_described_without_the_keeper(
    run_command: Callable[..., Any],
) -> None:
    code, printed, errors = run_command(
        "describe", "digits", digits=job("Ready", "Training"), disk=None
    )
    assert (code, errors) == (0, "")
    assert "figures" not in printed
