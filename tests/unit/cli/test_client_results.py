"""Test what the Python client reads from a result folder.

- The tests cover each end of a run, a run in progress, one that never began, and damaged, huge and
  hostile files.
- Other folders are neither listed nor deleted. A run without read permission is damaged, and never
  deleted.
- The records of a folder are read once, and again after another run has taken it.

The expected figures are those of the summary, which other code computes.

Left out: processes (test_client_processes.py), and whole runs (tests/local).
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import dlion
from dlion.errors import AbsentError, DataError, SpecError, UnavailableError
from dlion.local_backend import LocalBackend
from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord, EventRecord
from dlion_api.protocol.records import record_to_json
from dlion_api.reasons import EventReason
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.lock import FolderLock
from dlion_results.run_folder.storage import StorageError
from dlion_results.summary.judgement import EndReason
from dlion_results.summary.summary import Ending
from synthetic_run import Story, description, records
from unprivileged import without_rights

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STORY = Story(workers=4, seconds=30, killed=None)
NAME = "a-run"


@pytest.fixture
def client(tmp_path: Path) -> dlion.Client:
    return dlion.Client("local", root=tmp_path)


def make(root: Path, ending: Ending | None, name: str = NAME, *, until_s: float = 99) -> Path:
    """Write a run with these records up to a time, and with this end."""
    with ResultFolder.create(root / name, description(STORY), now=NOW) as folder:
        for record in records(STORY):
            if record.time_s <= until_s:
                folder.append(record)
        if ending is not None:
            folder.finish(replace(ending, started_at=NOW.isoformat()))
    return root / name


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """Return a folder whose lock this process holds, as that of a run."""
    path = make(tmp_path, None, until_s=15)
    lock = FolderLock(path)
    yield path
    lock.release()


@pytest.mark.parametrize(
    ("ending", "state", "reason", "message"),
    [
        (Ending("maxSeconds 30 reached"), "Succeeded", "Completed", "maxSeconds 30 reached"),
        (Ending("stopped by a signal", reason=EndReason.STOPPED), "Succeeded", "Stopped", "signal"),
        (Ending("interrupted", "", False, reason=EndReason.INTERRUPTED), "Failed", "Interrupted",
         "interrupted"),
        (Ending("an error", "it broke", False, reason=EndReason.PROGRAM_FAILED), "Failed",
         "ProgramFailed", "it broke"),
        (Ending("maxSeconds 30 reached", "lacks one", False, reason=EndReason.PARTIAL,
                missing=(2,)), "Failed", "Partial", "lacks one"),
    ],
)  # fmt: skip
def test_each_end_is_read_from_the_summary(
    tmp_path: Path, client: dlion.Client, ending: Ending, state: str, reason: str, message: str
) -> None:
    summary = json.loads((make(tmp_path, ending) / "summary.json").read_text())
    job = client.get_job(NAME)
    assert (job.state, job.reason) == (state, reason)
    assert message in job.message
    assert job.accuracy == summary["accuracy"]["mean"]
    losses = [worker["last_loss"] for worker in summary["workers"]]
    assert job.loss == pytest.approx(sum(losses) / 4)
    assert job.eta_s is None
    assert job.has_ended
    assert (job.progress == 1.0) is (reason == "Completed")
    assert job.created == NOW
    assert job.result_folder == tmp_path / NAME
    assert [worker.rank for worker in job.workers] == [0, 1, 2, 3]
    if reason == "Partial":
        assert job.workers[2].state == "lost"
    (listed,) = client.list_jobs()
    assert listed == replace(job, curve=(), progress=listed.progress)
    assert job.curve[0][0] < job.curve[-1][0]
    assert all(0 <= accuracy <= 1 for _, accuracy in job.curve)


def test_a_run_in_progress_is_read_again_and_each_record_once(
    running: Path, client: dlion.Client
) -> None:
    job = client.get_job(NAME)
    assert (job.state, job.reason, job.has_ended) == ("Training", "Training", False)
    assert job.progress is not None
    assert 0.3 < job.progress < 0.6
    assert job.eta_s == pytest.approx(15, abs=3)
    assert {worker.state for worker in job.workers} == {"training"}
    events = running / "events.jsonl"
    before = events.read_bytes()
    new = EventRecord(15.5, Rank(1), 9, EventReason.WORKER_LOST, "its stream broke", True)
    # Records must not be read twice: they are overwritten with the same length.
    with events.open("r+b") as file:
        file.write(b" " * (len(before) - 1) + b"\n")
    line = record_to_json(new).encode() + b"\n"
    with events.open("ab") as file:
        file.write(line[:20])
    assert client.get_job(NAME).state == "Training", "half a line is not read"
    with events.open("ab") as file:
        file.write(line[20:])
    job = client.get_job(NAME)
    assert (job.state, job.reason) == ("Degraded", "PeersLost")
    assert job.message == f"lost: {job.workers[1].name}"
    assert job.workers[1].state == "lost"
    events.write_bytes(b"")
    assert client.get_job(NAME).state == "Pending", "a truncated file is read from its start"


@pytest.mark.parametrize(
    ("reasons", "state", "reason"),
    [
        ([], "Pending", "WorkersStarting"),
        ([EventReason.WORKER_READY], "Waiting", "WaitingForPeers"),
        ([EventReason.WORKER_READY, EventReason.TRAINING_STARTED], "Training", "Training"),
        ([EventReason.TRAINING_STARTED, EventReason.QUORUM_LOST], "Waiting", "BelowQuorum"),
        ([EventReason.TRAINING_STARTED, EventReason.QUORUM_LOST, EventReason.QUORUM_BACK],
         "Training", "Training"),
    ],
)  # fmt: skip
def test_the_state_before_and_without_steps(
    tmp_path: Path, client: dlion.Client, reasons: list[str], state: str, reason: str
) -> None:
    with ResultFolder.create(tmp_path / NAME, description(STORY), now=NOW) as folder:
        for number, each in enumerate(reasons):
            folder.append(EventRecord(float(number), Rank(0), 0, each, ""))
        job = client.get_job(NAME)
    assert (job.state, job.reason) == (state, reason)
    assert job.accuracy is None
    assert job.loss is None


def test_a_resumed_run_is_not_ended_by_its_earlier_summary(
    tmp_path: Path, client: dlion.Client
) -> None:
    path = make(tmp_path, Ending("interrupted", "", False), until_s=15)
    assert client.get_job(NAME).state == "Failed"
    lock = FolderLock(path)
    assert client.get_job(NAME).state == "Training"
    lock.release()
    assert client.get_job(NAME).state == "Failed"


def test_a_killed_run_has_failed_and_names_the_remedy(tmp_path: Path, client: dlion.Client) -> None:
    path = make(tmp_path, None, "my run", until_s=15)
    job = client.get_job("my run")
    assert (job.state, job.reason) == ("Failed", "Killed")
    assert f"dlion report '{path}'" in job.message
    assert job.accuracy is not None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"ending": 3}', b"[" * 100_000, b'{"ending": null}'],
)
def test_an_unreadable_summary_is_damage(
    tmp_path: Path, client: dlion.Client, content: bytes
) -> None:
    (make(tmp_path, Ending("x")) / "summary.json").write_bytes(content)
    job = client.get_job(NAME)
    assert (job.state, job.reason) == ("Failed", "Damaged")
    assert [each.reason for each in client.list_jobs()] == ["Damaged"]


def test_wrong_types_in_a_summary_are_left_out(tmp_path: Path, client: dlion.Client) -> None:
    ending = {"succeeded": True, "reason": 3, "message": [], "missing": ["x", -1], "started_at": 9}
    strange = {"ending": ending, "accuracy": {"mean": "high"}, "workers": [1, {"last_loss": {}}]}
    path = make(tmp_path, Ending("x"))
    (path / "summary.json").write_text(json.dumps(strange))
    job = client.get_job(NAME)
    assert (job.state, job.reason) == ("Succeeded", "Completed")
    assert job.accuracy is not None, "from the records"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"a: [", b"\xff", b"kind: DLionJob", b"x" * 2_000_000,
        b"a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c]\n",
    ],
)  # fmt: skip
def test_a_damaged_manifest_does_not_hide_the_result(
    tmp_path: Path, client: dlion.Client, content: bytes
) -> None:
    (make(tmp_path, Ending("x")) / "job.yaml").write_bytes(content)
    job = client.get_job(NAME)
    assert (job.state, job.workers, job.curve) == ("Succeeded", (), ())
    assert job.accuracy is not None
    assert [each.name for each in client.list_jobs()] == [NAME]


def test_damaged_records_are_skipped(tmp_path: Path, client: dlion.Client) -> None:
    path = make(tmp_path, None, until_s=15)
    whole = client.get_job(NAME)
    events = path / "events.jsonl"
    bad = b'nonsense\n{"kind":"step"}\n' + b"x" * 5_000_000 + b"\n"
    events.write_bytes(bad + events.read_bytes() + b'{"kind":')
    again = dlion.Client(root=tmp_path).get_job(NAME)
    assert (again.accuracy, again.loss, again.curve) == (whole.accuracy, whole.loss, whole.curve)


@pytest.mark.parametrize("name", ["events.jsonl", "summary.json", "job.yaml", "command.json"])
def test_a_pipe_in_place_of_a_file_does_not_block(
    tmp_path: Path, client: dlion.Client, name: str
) -> None:
    path = make(tmp_path, Ending("x"))
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    if name == "job.yaml":
        assert client.list_jobs() == []
    else:
        assert client.get_job(NAME).name == NAME


@pytest.fixture
def unprivileged(tmp_path: Path) -> Iterator[Path]:
    """Return a root for a process without any user's rights, though the tests may run as root."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        if os.geteuid() != 0:
            yield Path(place)
            return
        make(Path(place), Ending("x"), "warm")
        dlion.Client(root=place).get_job("warm")  # only root may have access to the imports
        shutil.rmtree(Path(place, "warm"))
        yield Path(place)


@pytest.mark.parametrize("name", ["job.yaml", "run.lock", "summary.json", "events.jsonl"])
def test_a_run_without_read_permission_is_damaged(unprivileged: Path, name: str) -> None:
    ending = None if name == "events.jsonl" else Ending("x")
    path = make(unprivileged, ending)
    make(unprivileged, Ending("x"), "other")
    (path / name).chmod(0)
    client = dlion.Client(root=unprivileged)
    with without_rights():
        jobs = {job.name: (job.state, job.reason) for job in client.list_jobs()}
        assert jobs == {NAME: ("Failed", "Damaged"), "other": ("Succeeded", "Completed")}
        job = client.get_job(NAME)
        assert (job.reason, job.result_folder) == ("Damaged", path)
        assert job.message
        if name == "run.lock":
            with pytest.raises(UnavailableError, match="its lock cannot be read"):
                client.delete_job(NAME)
    assert (path / "job.yaml").exists()


def test_a_run_that_may_not_be_removed_is_reported(unprivileged: Path) -> None:
    path = make(unprivileged, Ending("x"))
    client = dlion.Client(root=unprivileged)
    with without_rights(), pytest.raises(StorageError) as raised:
        client.delete_job(NAME)
    assert str(raised.value).endswith(
        "cannot remove the result folder: Permission denied. Check the rights of it and of the "
        f"folder above it: {str(path)!r}"
    )
    assert (path / "job.yaml").exists()


def test_a_folder_without_access_is_not_a_job(unprivileged: Path) -> None:
    make(unprivileged, Ending("x"), "other")
    path = make(unprivileged, Ending("x"))
    path.chmod(0)
    client = dlion.Client(root=unprivileged)
    with without_rights():
        assert [job.name for job in client.list_jobs()] == ["other"]
        for method in (client.get_job, client.delete_job):
            with pytest.raises(AbsentError):
                method(NAME)
    unprivileged.chmod(0)
    with without_rights(), pytest.raises(DataError, match="cannot be read"):
        client.list_jobs()
    unprivileged.chmod(0o755)
    path.chmod(0o755)


def test_another_run_of_the_same_folder_is_read_again(tmp_path: Path, client: dlion.Client) -> None:
    path = make(tmp_path, Ending("x"))
    before = client.get_job(NAME)
    shutil.rmtree(path)
    with ResultFolder.create(path, description(replace(STORY, workers=2)), now=NOW) as folder:
        for record in records(replace(STORY, workers=2, seconds=60)):
            folder.append(record)
    job = client.get_job(NAME)
    assert (len(before.workers), len(job.workers)) == (4, 2)
    assert job == dlion.Client(root=tmp_path).get_job(NAME)
    (path / "job.yaml").write_text("kind: [")
    assert client.get_job(NAME).workers == ()


def test_nothing_is_kept_of_folders_that_others_have_removed(tmp_path: Path) -> None:
    backend = LocalBackend("local", tmp_path)
    for name in ("one", "two", "three"):
        path = make(tmp_path, Ending("maxSeconds 30 reached"), name)
        assert backend.get(name).curve
        if name != "two":
            shutil.rmtree(path)
    assert backend.get("two").curve
    make(tmp_path, Ending("maxSeconds 30 reached"), "four")
    assert len(backend.list()) == 2
    assert set(backend._readers) == {"two", "four"}


def test_other_folders_are_not_jobs_and_stay(tmp_path: Path, client: dlion.Client) -> None:
    run = make(tmp_path / "elsewhere", Ending("x"))
    foreign = {
        "empty": lambda path: path.mkdir(),
        "manifest-only": lambda path: (path.mkdir(), (path / "job.yaml").write_text("kind: x")),
        "foreign-lock": lambda path: (
            path.mkdir(), (path / "job.yaml").write_text(""), (path / "run.lock").write_text("mine")
        ),
        "link": lambda path: path.symlink_to(run),
        "file": lambda path: path.write_text("precious"),
        "foreign-command": lambda path: (
            path.mkdir(), (path / "command.json").write_text('{"pid": 1, "backend": "local"}')
        ),
    }  # fmt: skip
    for name, make_it in foreign.items():
        make_it(tmp_path / name)
    assert client.list_jobs() == []
    for name in foreign:
        for method in (client.get_job, client.delete_job, client.get_job_logs):
            with pytest.raises(AbsentError, match="list_jobs"):
                method(name)
        assert (tmp_path / name).exists()
    assert (run / "summary.json").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../elsewhere/a-run", "/etc", "a\0b"])
def test_a_path_is_not_a_name(tmp_path: Path, name: str) -> None:
    run = make(tmp_path / "elsewhere", Ending("x"))
    client = dlion.Client(root=tmp_path / "root")
    for method in (client.get_job, client.delete_job):
        with pytest.raises(SpecError, match="not a job's name"):
            method(name)
    assert run.exists()


def test_a_finished_job_is_deleted_with_only_its_folder(
    tmp_path: Path, client: dlion.Client
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("")
    path = make(tmp_path, Ending("x"))
    other = make(tmp_path, Ending("x"), "another")
    (path / "state").mkdir()
    (path / "state" / "link").symlink_to(victim)
    client.delete_job(NAME)
    assert not path.exists()
    assert other.exists()
    assert (victim / "precious").exists()
    with pytest.raises(AbsentError):
        client.get_job(NAME)


def test_a_folder_in_use_elsewhere_is_not_deleted(running: Path, client: dlion.Client) -> None:
    """The lock names this process; another number belongs to another machine."""
    (running / "run.lock").write_text("1\n")
    with pytest.raises(UnavailableError, match="not on this machine"):
        client.delete_job(NAME)
    assert (running / "summary.json").parent.exists()


def test_a_missing_root_has_no_jobs(tmp_path: Path) -> None:
    assert dlion.Client(root=tmp_path / "none").list_jobs() == []


def test_logs_are_read_by_rank(tmp_path: Path, client: dlion.Client) -> None:
    path = make(tmp_path, Ending("x"))
    (path / "state").mkdir()  # `dlion run` creates it, a simulation does not
    (path / "logs").mkdir()
    (path / "logs" / "worker-1.log").write_bytes(b"one\r\ntw\xffo\n\nlast")
    assert [*client.get_job_logs(NAME, worker=1)] == ["one", "tw�o", "", "last"]
    assert [*client.get_job_logs(NAME, worker=1, follow=True)][-1] == "last"
    assert [*client.get_job_logs(NAME, worker=0)] == []
    for rank in (4, -1):
        with pytest.raises(SpecError, match="0 to 3"):
            client.get_job_logs(NAME, worker=rank)
    with pytest.raises(UnavailableError, match="terminal"):
        client.get_job_logs(NAME, worker=None)


def test_an_unreadable_log_is_reported(tmp_path: Path, client: dlion.Client) -> None:
    path = make(tmp_path, Ending("x"))
    (path / "state").mkdir()
    (path / "logs").mkdir()
    (path / "logs" / "worker-0.log").write_text("one\n")
    lines = client.get_job_logs(NAME, worker=0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))  # applies to a superuser, too
    try:
        with pytest.raises(DataError, match=r"worker-0\.log: cannot be read: Too many open"):
            next(lines)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_truncated_log_is_followed(running: Path, client: dlion.Client) -> None:
    (running / "state").mkdir()  # of a run, not of a simulation
    (running / "logs").mkdir()
    log = running / "logs" / "worker-0.log"
    log.write_text("a longer line\n")
    lines = client.get_job_logs(running.name, worker=0, follow=True)
    assert next(lines) == "a longer line"
    log.write_text("the rest\n")
    assert next(lines) == "the rest"


def test_metrics_are_the_records(tmp_path: Path, client: dlion.Client) -> None:
    summary = json.loads((make(tmp_path, Ending("x")) / "summary.json").read_text())
    frame = client.get_job_metrics(NAME)
    steps = frame[frame["loss"].notna()]
    assert len(steps) == summary["steps"]
    assert steps["batch_size"].sum() == summary["samples"]
    assert frame["time_s"].is_monotonic_increasing
    last = frame[frame["accuracy"].notna()].groupby("worker")["accuracy"].last()
    finals = [worker["accuracy"]["final"] for worker in summary["workers"]]
    assert list(last) == pytest.approx(finals)
    assert set(frame["site"]) == {"plant-a"}
    assert [*map(str, frame.dtypes)].count("int64") == 3


def test_metrics_of_compile_have_their_own_columns(tmp_path: Path, client: dlion.Client) -> None:
    """Also a metric with the name of a column, and one that started late."""
    path = make(tmp_path, Ending("x"))
    late = EvaluationRecord(
        1e6, Rank(2), 9, 9, 0.5, 1.0, 9, metrics={"auc": 0.75, "loss": 3.0, "metric_loss": 4.0}
    )
    lone = replace(late, rank=Rank(1), metrics={"auc": 0.25, "huge": 1e305, "none": math.nan})
    with (path / "events.jsonl").open("a") as file:
        file.writelines(f"{record_to_json(each)}\n" for each in (late, lone))
    frame = client.get_job_metrics(NAME)
    assert [*frame.columns[-6:]] == ["samples", "auc", "metric_loss", "metric_metric_loss",
                                     "huge", "none"]  # fmt: skip
    last = frame[frame["time_s"] == 1e6]
    assert [*last["auc"]] == [0.75, 0.25]
    assert last["metric_loss"].iloc[0] == 3.0
    assert last["metric_metric_loss"].iloc[0] == 4.0
    assert frame["auc"].notna().sum() == 2
    assert [*map(str, frame.dtypes[-5:])] == ["float64"] * 5
    job = client.get_job(NAME)
    assert job.metrics == {"auc": 0.5, "loss": 3.0, "metric_loss": 4.0}
    assert "<th style='text-align:left'>auc</th><td style='text-align:left'>0.5</td>" in (
        job._repr_html_()
    )
    assert client.list_jobs()[0].metrics == {}


def test_a_run_without_records_has_an_empty_frame(tmp_path: Path, client: dlion.Client) -> None:
    make(tmp_path, None, until_s=0)
    frame = client.get_job_metrics(NAME)
    assert len(frame) == 0
    assert "accuracy" in frame


def test_waiting_ends_with_another_end_or_with_the_time(
    tmp_path: Path, client: dlion.Client
) -> None:
    make(tmp_path, Ending("x", "it broke", False, reason=EndReason.DIVERGED))
    with pytest.raises(dlion.JobEndedError, match=r"Failed \(Diverged\).*it broke") as caught:
        client.wait_for_job_status(NAME)
    assert caught.value.job.reason == "Diverged"
    assert client.wait_for_job_status(NAME, "Failed").state == "Failed"
    with pytest.raises(SpecError, match=r"Finished.*allowed: Pending"):
        client.wait_for_job_status(NAME, {"Finished"})
    wrong: tuple[Any, ...] = (5, None, True, ["Succeeded", 5], [["Succeeded"]])
    for status in wrong:
        with pytest.raises(SpecError, match=r"status: .*allowed: Pending"):
            client.wait_for_job_status(NAME, status)
    wrong = ("1s", float("nan"), 10**400)
    for timeout_s in wrong:
        with pytest.raises(SpecError, match=r"timeout_s: .*allowed: a number of seconds"):
            client.wait_for_job_status(NAME, "Training", timeout_s=timeout_s)
    with pytest.raises(AbsentError):
        client.wait_for_job_status("none")


def test_waiting_for_a_running_job_times_out(running: Path, client: dlion.Client) -> None:
    states: list[str] = []
    with pytest.raises(dlion.JobTimeoutError, match=r"is Training.*within 0\.3 s"):
        client.wait_for_job_status(
            NAME, timeout_s=0.3, callback=lambda job: states.append(job.state)
        )
    assert len(states) >= 2
    with pytest.raises(TimeoutError):
        client.wait_for_job_status(NAME, {"Failed"}, timeout_s=0)
    assert client.wait_for_job_status(NAME, {"Training"}, timeout_s=0).state == "Training"


def test_the_error_for_a_missing_model_states_when_it_exists(
    tmp_path: Path, client: dlion.Client
) -> None:
    make(tmp_path, Ending("x"))
    with pytest.raises(UnavailableError, match="has no model"):
        dlion.load_model(client.get_job(NAME))
    for path in (tmp_path / "none", tmp_path / "none.keras"):
        with pytest.raises(DataError, match=r"none.*: no such file or folder"):
            dlion.load_model(path)
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        dlion.load_model(tmp_path / ("none" * 100))
    of_a_cluster = dlion.Job(name="digits", backend="kubernetes", state="Succeeded")
    with pytest.raises(UnavailableError, match="dlion fetch digits"):
        dlion.load_model(of_a_cluster)


def test_the_form_for_notebooks_escapes_and_is_small(tmp_path: Path, client: dlion.Client) -> None:
    make(tmp_path, Ending("<script>alert(1)</script>" * 1000))
    page = client.get_job(NAME)._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<polyline") == 1
    assert len(page) < 20_000
    bare = dlion.Job(name="<b>", backend="local", state="Pending")
    assert "<svg" not in bare._repr_html_()
    assert "<b><b>" not in bare._repr_html_()


def test_a_metric_named_as_a_row_of_the_table_does_not_replace_it() -> None:
    named = {"state": 0.125, "message": 0.25, "loss": 0.5, "accuracy": 0.75, "m" * 70: 1.5,
             "m" * 71: 2.5}  # fmt: skip
    row = "<th style='text-align:left'>{}</th><td style='text-align:left'>{}</td>"
    full = dlion.Job(
        name="n", backend="local", state="Training", message="why", loss=4.5, accuracy=1.0,
        metrics=named,
    )  # fmt: skip
    shown = full._repr_html_()
    own = {"state": "Training ", "message": "why", "loss": "4.5", "accuracy": "100.0 %"}
    for name, value in own.items():
        assert row.format(name, value) in shown
    for name, number in named.items():
        assert row.format(name[:60], number) in shown
