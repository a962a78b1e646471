"""Tests of `dlion ls` on result folders.

Each ending has its state, and only a run that `--resume` accepts is resumable. A run is running
while its lock is held, whatever its summary contains. A run that ends during the listing is not
reported as killed. Listing does not prevent locking.

Figures of an unfinished run are those of its last records. Impossible figures are not shown.
Damaged, partly written, foreign and unreadable folders are named and hide no other. Links, pipes,
huge files and manifests that expand without end are not read. The list is newest first and needs no
NumPy. A comparison is one entry. A label that YAML reads as a number or truth value is named with
the fix.

Left out: a real run (tests/local/test_listed_runs.py).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord
from dlion_api.protocol.records import record_to_json
from dlion_cli.__main__ import main
from dlion_results.run_folder.environment import EnvironmentReport, LocalCommand
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.layout import LOCK
from dlion_results.run_folder.listing import (
    ResultFinder,
    StoredRun,
    StoredState,
    read_comparison,
    read_run,
)
from dlion_results.run_folder.lock import FolderLock
from dlion_results.run_folder.manifest import read_job
from dlion_results.summary.judgement import EndReason
from dlion_results.summary.summary import Ending
from synthetic_run import Story, description, records

STORY = Story(workers=2, seconds=20.0, killed=None)
JOB = description(STORY, target=None)
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def make(path: Path, ending: Ending | None, *, checkpoint: bool = False, logs: bool = True) -> Path:
    """A result folder with the records of a short run; without an ending it was killed."""
    with ResultFolder.create(path, JOB, now=NOW) as folder:
        if logs:
            (path / "logs").mkdir()
        if checkpoint:
            (path / "state" / "w0").mkdir(parents=True)
            with zipfile.ZipFile(path / "state" / "w0" / "checkpoint.npz", "w") as archive:
                archive.writestr("weights.npy", b"x")
        for record in records(STORY):
            folder.append(record)
        if ending is not None:
            folder.finish(ending)
    return path


def ended(reason: EndReason, *, succeeded: bool = False, started: str = "") -> Ending:
    return Ending("maxSeconds reached", succeeded=succeeded, reason=reason, started_at=started)


def found(root: Path) -> dict[str, StoredRun]:
    return {str(run.path.relative_to(root)): run for run in ResultFinder().find(root)}


@pytest.mark.parametrize(
    ("ending", "checkpoint", "state", "resumable"),
    [
        (ended(EndReason.COMPLETED, succeeded=True), True, StoredState.SUCCEEDED, False),
        (ended(EndReason.STOPPED, succeeded=True), True, StoredState.SUCCEEDED, False),
        (ended(EndReason.INTERRUPTED), True, StoredState.INTERRUPTED, True),
        (ended(EndReason.INTERRUPTED), False, StoredState.INTERRUPTED, False),
        (ended(EndReason.STORAGE_FAILED), True, StoredState.FAILED, True),
        (ended(EndReason.PARTIAL), False, StoredState.FAILED, False),
        (None, True, StoredState.INTERRUPTED, True),
        (None, False, StoredState.INTERRUPTED, False),
    ],
)
def test_each_ending_has_its_state(
    tmp_path: Path, ending: Ending | None, checkpoint: bool, state: StoredState, resumable: bool
) -> None:
    run = read_run(make(tmp_path / "run", ending, checkpoint=checkpoint))
    assert (run.state, run.is_resumable) == (state, resumable)
    assert run.job == "cifar10"
    assert run.reason == (ending.reason if ending else "")


def test_a_run_with_a_damaged_checkpoint_is_not_resumable(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", ended(EndReason.INTERRUPTED), checkpoint=True)
    (folder / "state" / "w0" / "checkpoint.npz").write_bytes(b"PK\x03\x04 half")
    assert not read_run(folder).is_resumable


def test_figures_are_those_of_the_summary(tmp_path: Path) -> None:
    ending = ended(EndReason.COMPLETED, succeeded=True, started=NOW.isoformat())
    folder = make(tmp_path / "run", ending)
    summary = json.loads((folder / "summary.json").read_text())
    run = read_run(folder)
    assert run.accuracy == summary["accuracy"]["mean"]
    assert run.iteration == summary["ending"]["iteration"] > 0
    assert run.duration_s == summary["time_s"] > 0
    assert run.started_at == NOW


def test_an_unfinished_run_has_the_figures_of_its_last_records(tmp_path: Path) -> None:
    whole = read_run(make(tmp_path / "ended", ended(EndReason.COMPLETED, succeeded=True)))
    folder = make(tmp_path / "killed", None)
    late = EvaluationRecord(30.0, Rank(0), 99, 99, 0.5, 1.0, 10)
    also = EvaluationRecord(31.0, Rank(1), 99, 99, 0.75, 1.0, 10)
    with (folder / "events.jsonl").open("a") as events:
        events.write(record_to_json(late) + "\n" + record_to_json(also) + "\nnot a record\n{")
    run = read_run(folder)
    assert (run.accuracy, run.duration_s) == (0.625, 31.0)
    assert run.iteration == whole.iteration


def test_an_accuracy_that_is_no_number_does_not_count_in_an_unfinished_run(tmp_path: Path) -> None:
    folder = make(tmp_path / "killed", None)
    with (folder / "events.jsonl").open("a") as events:
        for worker in JOB.workers():
            accuracy = math.nan if worker.rank else 0.5
            last = EvaluationRecord(30.0, worker.rank, 99, 99, accuracy, 1.0, 10)
            events.write(record_to_json(last) + "\n")
    assert read_run(folder).accuracy == 0.5


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", ended(EndReason.INTERRUPTED), checkpoint=True)
    lock = FolderLock(folder)  # the case of a resumed run, whose old summary still exists
    try:
        run = read_run(folder)
        assert (run.state, run.is_resumable) == (StoredState.RUNNING, False)
    finally:
        lock.release()
    assert read_run(folder).state is StoredState.INTERRUPTED


def end_at(moment: int, end: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `end` at that call of the operating system."""
    calls = 0

    def ending_at(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment + 1:
                monkeypatch.undo()
                end()
            return call(*arguments, **options)

        return wrapped

    monkeypatch.setattr(os, "scandir", ending_at(os.scandir))
    monkeypatch.setattr(os, "open", ending_at(os.open))


@pytest.mark.parametrize("moment", range(12))
def test_a_run_that_ends_during_the_listing_was_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    folder = ResultFolder.create(tmp_path / "run", JOB, now=NOW)

    def end() -> None:
        folder.finish(ended(EndReason.COMPLETED, succeeded=True))
        folder.close()

    for record in records(STORY):
        folder.append(record)
    end_at(moment, end, monkeypatch)
    state = read_run(folder.path).state
    monkeypatch.undo()
    folder.close()
    assert state in (StoredState.RUNNING, StoredState.SUCCEEDED)


def test_listing_does_not_prevent_locking(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", None)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            read_run(folder)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(50):
            FolderLock(folder).release()
    finally:
        done.set()
        for reader in readers:
            reader.join()


@pytest.mark.parametrize(
    ("files", "logs", "command"),
    [
        ({}, True, "run"),
        ({"simulation.json": "{}"}, False, "simulate"),
        ({"environment.yaml": "name: quickstart\n"}, False, "simulate"),
        ({"environment.yaml": "name: recorded\n"}, False, "replay"),
        ({"replay.json": "{}", "simulation.json": "{}"}, False, "replay"),
        ({"compared.json": "{}", "simulation.json": "{}"}, False, "compare"),
    ],
)
def test_the_command_is_recognized_by_its_files(
    tmp_path: Path, files: dict[str, str], logs: bool, command: str
) -> None:
    folder = make(tmp_path / "run", None, logs=logs)
    for name, text in files.items():
        (folder / name).write_text(text)
    assert read_run(folder).command == command


@pytest.mark.parametrize("command", LocalCommand)
def test_a_run_that_ends_at_its_start_has_its_command(
    tmp_path: Path, command: LocalCommand
) -> None:
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW) as folder:
        folder.write_environment(EnvironmentReport("recorded", command=command))
    assert read_run(tmp_path / "run").command == command


def test_a_folder_without_lock_and_logs_was_fetched(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", ended(EndReason.COMPLETED, succeeded=True), logs=False)
    (folder / LOCK).unlink()
    assert read_run(folder).command == "fetched"


def summary_of(**changes: Any) -> str:
    return json.dumps({"ending": {"succeeded": True}, **changes})


@pytest.mark.parametrize(
    ("name", "content", "detail"),
    [
        ("summary.json", b"{", "summary.json"),
        ("summary.json", b"\xff\xfe", "summary.json"),
        ("summary.json", b"[" * 100_000, "summary.json"),
        ("job.yaml", b"a: [", "job.yaml"),
        ("job.yaml", b"", "job.yaml"),
        ("job.yaml", b"kind: Pod", "job.yaml"),
        ("job.yaml", b"!!timestamp x", "job.yaml"),
        ("job.yaml", b"a: " + b"[" * 100_000, "job.yaml"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, detail: str) -> None:
    folder = make(tmp_path / "run", None, checkpoint=True)
    (folder / name).write_bytes(content)
    run = read_run(folder)
    assert run.state is StoredState.DAMAGED
    assert run.detail.startswith(f"{detail}: ")
    assert "\n" not in run.detail
    assert not run.is_resumable


@pytest.mark.parametrize(
    "changes",
    [
        {"accuracy": 7, "job": [], "time_s": "x"},
        {"accuracy": {"mean": 10**400}, "time_s": True},
        {"ending": {"succeeded": True, "iteration": -1, "started_at": "0000", "reason": {}}},
        {"ending": {"succeeded": True, "started_at": "9999-12-31T23:59:59-23:59"}},
        {"accuracy": {"mean": None}, "job": {"name": "\ud800"}},
    ],
)
def test_foreign_values_are_unknown(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = make(tmp_path / "run", None)
    (folder / "summary.json").write_text(summary_of(**changes))
    run = read_run(folder)
    assert run.state is StoredState.SUCCEEDED
    assert (run.accuracy, run.iteration) == (None, None)


def test_impossible_figures_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = EvaluationRecord(1.7e308, Rank(0), 1, 1, 1.7e308, 1.0, 10)
    killed, done = make(tmp_path / "killed", None), make(tmp_path / "done", None)
    before = read_run(killed)
    with (killed / "events.jsonl").open("a") as events:
        events.write(record_to_json(huge) + "\n")
    assert (read_run(killed).duration_s, read_run(killed).accuracy) == (
        before.duration_s, before.accuracy,
    )  # fmt: skip
    (done / "summary.json").write_text(summary_of(time_s=1e299, accuracy={"mean": 1e299}))
    assert (read_run(done).duration_s, read_run(done).accuracy) == (None, None)
    assert main(["ls", str(tmp_path)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 200


def test_a_partly_written_folder_is_listed(tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB.to_document()))
    (folder / LOCK).write_text("12\n")
    run = found(tmp_path)["half"]
    assert (run.state, run.is_resumable) == (StoredState.INTERRUPTED, False)
    assert "before its first record" in run.detail


def test_folders_without_results_are_foreign_and_hidden_ones_are_left_out(tmp_path: Path) -> None:
    make(tmp_path / "compared" / "quickstart" / "dlion-1", None)
    (tmp_path / "photos" / "2020").mkdir(parents=True)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "file").touch()
    states = {name: run.state for name, run in found(tmp_path).items()}
    assert states == {
        "compared/quickstart/dlion-1": StoredState.INTERRUPTED,
        "photos": StoredState.FOREIGN,
    }


def compared(path: Path, figures: str | None = None) -> Path:
    """The folder of a comparison with one run."""
    make(path / "quickstart" / "dlion" / "lr-0.05" / "seed-1", ended(EndReason.COMPLETED))
    (path / LOCK).write_text("12\n")
    if figures is not None:
        (path / "comparison.json").write_text(figures)
    return path


ROWS = [
    {"environment": "quickstart", "variant": name, "runs": [{"seed": 1}, {"seed": 2}]}
    for name in ("dlion", "none")
]


@pytest.mark.parametrize(
    ("figures", "state", "detail"),
    [
        (
            json.dumps({"rows": ROWS, "targetAccuracy": 0.5}),
            StoredState.SUCCEEDED,
            "4 runs: dlion, none in quickstart",
        ),
        (None, StoredState.INTERRUPTED, "the same command continues it"),
        ("{", StoredState.DAMAGED, "comparison.json: "),
        (
            json.dumps({"rows": [7, {"runs": 1, "variant": []}], "targetAccuracy": 0}),
            StoredState.SUCCEEDED,
            "0 runs",
        ),
        (json.dumps({"rows": {}, "targetAccuracy": 0}), StoredState.SUCCEEDED, "0 runs"),
    ],
)
def test_a_comparison_is_one_entry_and_lists_its_runs(
    tmp_path: Path, figures: str | None, state: StoredState, detail: str
) -> None:
    folder = compared(tmp_path / "c", figures)
    (run,) = ResultFinder().find(tmp_path)
    assert (run.path, run.command, run.state) == (folder, "compare", state)
    assert run.detail.startswith(detail)
    assert run.size_bytes
    (own,) = ResultFinder().find(folder)
    assert own.path == folder / "quickstart" / "dlion" / "lr-0.05" / "seed-1"


def test_a_comparison_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    lock = FolderLock(compared(tmp_path / "c"))
    assert found(tmp_path)["c"].state is StoredState.RUNNING
    lock.release()


@pytest.mark.parametrize("moment", range(8))
def test_a_comparison_that_ends_during_the_listing_need_not_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    folder = compared(tmp_path / "c")
    lock = FolderLock(folder)

    def end() -> None:
        figures = json.dumps({"rows": ROWS, "targetAccuracy": 0.5})
        (folder / "comparison.json").write_text(figures)
        lock.release()

    end_at(moment, end, monkeypatch)
    run = read_comparison(folder)
    monkeypatch.undo()
    lock.release()
    assert run is not None
    assert run.state in (StoredState.RUNNING, StoredState.SUCCEEDED)


def test_a_comparison_without_runs_is_listed(tmp_path: Path) -> None:
    (tmp_path / "c" / "quickstart" / "dlion").mkdir(parents=True)
    (tmp_path / "c" / LOCK).write_text("12\n")
    (run,) = ResultFinder().find(tmp_path / "c")
    assert (run.path, run.state) == (tmp_path / "c", StoredState.INTERRUPTED)


@pytest.mark.parametrize("name", ["comparison.json", LOCK])
def test_other_files_with_these_names_are_not_a_comparison(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine" / "deeper").mkdir(parents=True)
    (tmp_path / "mine" / name).write_text('{"what": "else"}')
    assert found(tmp_path)["mine"].state is StoredState.FOREIGN


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    elsewhere = make(tmp_path / "elsewhere", None)
    root = tmp_path / "runs"
    folder = make(root / "run", None)
    (root / "link").symlink_to(elsewhere, target_is_directory=True)
    (elsewhere / "big").write_bytes(bytes(5_000_000))
    (folder / "tensorboard" / "up").symlink_to(elsewhere, target_is_directory=True)
    (folder / "summary.json").symlink_to(elsewhere / "job.yaml")
    listed = found(root)
    assert list(listed) == ["run"]
    assert listed["run"].state is StoredState.DAMAGED
    assert (listed["run"].size_bytes or 0) < 4_000_000
    (folder / "summary.json").unlink()
    os.mkfifo(folder / "summary.json")
    assert found(root)["run"].detail == "summary.json: is not a regular file"


def test_a_manifest_that_expands_without_end_or_is_a_pipe_is_damaged(tmp_path: Path) -> None:
    """Ten levels of ten aliases are 10^10 values: a reader that expands them would not end."""
    folder = make(tmp_path / "run", None)
    (folder / "job.yaml").write_text(unfolding())
    assert "unfolds to more than 100000 values" in read_run(folder).detail
    (folder / "job.yaml").write_text("- a\n" * 1_000_000)
    assert "is too large" in read_run(folder).detail
    (folder / "job.yaml").unlink()
    os.mkfifo(folder / "job.yaml")
    assert read_run(folder).detail == "job.yaml: is not a regular file"
    for command in ("ls", "report"):
        assert main([command, str(folder)]) == {"ls": 0, "report": 66}[command]


def unfolding() -> str:
    """A job of less than a kilobyte whose labels are 10^10 values, by aliases of aliases."""
    lines = ["x0: &a0 {k: x}"]
    for level in range(1, 11):
        values = ",".join(f"k{place}: *a{level - 1}" for place in range(10))
        lines.append(f"x{level}: &a{level} {{{values}}}")
    return "\n".join([*lines, "kind: DLionJob", "metadata: {name: q, labels: *a10}"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    assert found(tmp_path)["closed"].state is StoredState.UNREADABLE


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    for day in (3, 1, 2):
        started = f"2026-01-0{day}T00:00:00+00:00"
        make(tmp_path / f"day{day}", ended(EndReason.COMPLETED, succeeded=True, started=started))
    assert list(found(tmp_path)) == ["day3", "day2", "day1"]


def test_the_command_lists_and_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "[red]a", ended(EndReason.DIVERGED), checkpoint=True)
    assert main(["ls", str(tmp_path)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["NAME", "COMMAND", "STATE"]
    assert line.startswith("[red]a ")
    assert "failed (Diverged), resumable" in line
    assert main(["ls", str(tmp_path), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (run,) = document["runs"]
    assert (run["path"], run["reason"]) == (str(tmp_path / "[red]a"), "Diverged")
    assert document["complete"] is True
    assert main(["ls", str(tmp_path / "absent")]) == 66
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["ls", str(tmp_path / "[red]a" / "job.yaml")]) == 66
    (tmp_path / "empty").mkdir()
    assert main(["ls", str(tmp_path / "empty")]) == 0
    assert "has no results" in capsys.readouterr().err


def test_the_list_is_made_without_numpy(tmp_path: Path) -> None:
    make(tmp_path / "run", None)
    code = (
        "import sys; from dlion_cli.__main__ import main; code = main(['ls', sys.argv[1]]);"
        "sys.exit(code or any(m in sys.modules for m in ('numpy', 'tensorflow', 'grpc')))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


@pytest.mark.parametrize("text", ["1e3", "1", "yes", "1.5"])
@pytest.mark.parametrize("field", ["labels", "annotations"])
def test_a_label_that_yaml_does_not_read_as_a_string_is_named_with_the_fix(
    tmp_path: Path, field: str, text: str
) -> None:
    folder = make(tmp_path / "run", None)
    manifest = (folder / "job.yaml").read_text()
    assert f"  {field}: {{}}" in manifest
    (folder / "job.yaml").write_text(
        manifest.replace(f"  {field}: {{}}", f"  {field}: {{version: {text}}}")
    )
    run = read_run(folder)
    assert run.state is StoredState.DAMAGED
    assert f"metadata.{field}.version: must be a string" in run.detail
    assert run.detail.endswith("Put its text in quotes.")
    with pytest.raises(DataError, match=rf"metadata\.{field}\.version: .*in quotes"):
        read_job(folder)
