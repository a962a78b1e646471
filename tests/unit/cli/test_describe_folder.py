"""Test `dlion describe` of a local result folder.

- The end of the run, missing replicas, warnings, delays and the command that continues it come
  first, with a remedy. Figures are those of the records. JSON contains all of it.
- A running, a killed and an empty run have their sections. The remaining time is that of `dlion
  run`.
- A path is local, a job's name is not. A comparison, a folder without a run and a misspelt name are
  refused with the correct form. Damaged, foreign and hostile folders do no harm.

Left out: jobs of a cluster (test_describe.py), the rules for culprits (test_culprit.py).
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import tempfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_api.reasons import EventReason
from dlion_cli.__main__ import main
from dlion_cli.views.live_view import LiveView
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.lock import FolderLock
from dlion_results.summary.judgement import EndReason
from dlion_results.summary.summary import Ending
from synthetic_run import Story, description, records
from unprivileged import without_rights

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STORY = Story(workers=4, seconds=30, killed=None)
ESCAPE = "\x1b[31m\x07red"


@pytest.fixture(autouse=True)
def _without_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.setenv("COLUMNS", "160")


def make(path: Path, ending: Ending | None, *extra: EventRecord, checkpoint: bool = False) -> Path:
    with ResultFolder.create(path, description(STORY), now=NOW) as folder:
        for record in (*records(STORY), *extra):
            folder.append(record)
        if ending is not None:
            folder.finish(ending)
    if checkpoint:
        (path / "state" / "w0").mkdir(parents=True)
        with zipfile.ZipFile(path / "state" / "w0" / "checkpoint.npz", "w") as file:
            file.writestr("a", "")
    return path


def warning(reason: str, message: str, *, rank: int = 1, time_s: float = 20.0) -> EventRecord:
    return EventRecord(time_s, Rank(rank), 7, reason, message, warning=True)


def described(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["describe", *arguments]) == 0
    text = capsys.readouterr().out
    assert not [letter for letter in text if not letter.isprintable() and letter != "\n"]
    return text


def as_json(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(described(capsys, str(path), "-o", "json"))
    assert list(found) == [
        "run", "problems", "progress", "culprit", "events", "notes", "next", "summary",
    ]  # fmt: skip
    return found


def problems(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(each["severity"], each["reason"], each["object"]) for each in found["problems"]]


def test_a_run_that_succeeded_has_figures_events_and_its_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "a run", Ending("maxSeconds 30 reached"))
    text = described(capsys, str(folder))
    assert text.startswith("PROBLEMS\n")
    assert "cifar10: maxSeconds 30 reached after 0:31" in text
    assert "Time: computing " in text
    assert "Bytes on links: " in text
    assert "LINK                                BYTES" in "\n".join(text.splitlines())
    assert "links to all peers are up" in text
    assert text.endswith(f"NEXT\ndlion report {shlex.quote(str(folder))}\n")
    found = as_json(capsys, folder)
    assert found["run"]["state"] == "succeeded"
    assert found["progress"] is None
    assert "ETA" not in text
    assert found["summary"]["steps"] == json.loads((folder / "summary.json").read_text())["steps"]


def test_a_partial_run_names_missing_replicas_and_the_command_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = Ending("maxSeconds 30 reached", "the saved model lacks workers 1, 3", False,
                    reason=EndReason.PARTIAL, missing=(1, 3))  # fmt: skip
    folder = make(tmp_path / "run", ending, checkpoint=True)
    (folder / "logs").mkdir()
    found = as_json(capsys, folder)
    assert problems(found)[:3] == [
        ("error", "Partial", "run/run"),
        ("error", "ReplicaMissing", "worker/plant-a/small-1"),
        ("error", "ReplicaMissing", "worker/plant-a/small-3"),
    ]
    own = found["problems"][1]
    assert "the saved model lacks its replica; its last step was" in own["message"]
    assert own["command"] == f"dlion logs {folder} --tail 40 --group small --worker 1"
    assert found["next"][0] == f"dlion run {folder}/job.yaml --resume {folder}"
    assert "trainer.stop.maxSteps" in described(capsys, str(folder))


@pytest.mark.parametrize("reason", sorted(EndReason))
def test_each_unsuccessful_end_has_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: EndReason
) -> None:
    folder = make(tmp_path / "run", Ending("an error", "it broke", False, reason=reason))
    first = as_json(capsys, folder)["problems"][0]
    assert (first["reason"], first["message"]) == (reason, "it broke")
    assert len(first["advice"]) > 10
    assert first["severity"] == ("warning" if reason == "Interrupted" else "error")


def test_warnings_are_counted_by_reason_with_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [warning(EventReason.CHECKPOINT_FAILED, f"disk {n}", time_s=20.0 + n) for n in (0, 1)]
    events += [warning(f"Odd{n}", "once", time_s=1.0) for n in range(20)]
    events.append(warning("FromTheOperator", "of the job", time_s=25.0))
    folder = make(tmp_path / "run", Ending("x"), *events)
    warnings = [each for each in as_json(capsys, folder)["problems"]
                if each["severity"] == "warning"]  # fmt: skip
    assert len(warnings) == 8
    assert (warnings[0]["object"], warnings[0]["message"]) == (
        "run/run", "after 0:25: of the job",
    )  # fmt: skip
    assert warnings[1]["message"] == "2 times, the last after 0:21: disk 1"
    assert warnings[1]["object"] == "worker/plant-a/small-1"
    assert "Free space" in warnings[1]["advice"]


def test_a_run_in_progress_is_not_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "run", None)
    (folder / "logs").mkdir()
    lock = FolderLock(folder)
    try:
        text, found = described(capsys, str(folder)), as_json(capsys, folder)
    finally:
        lock.release()
    assert "cifar10: is running after 0:31" in text
    assert not [each for each in found["problems"] if each["severity"] == "error"]
    assert found["next"] == [f"dlion logs {folder} -f", f"dlion report {folder}"]


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("target", [None, 0.65])
def test_a_run_in_progress_has_the_remaining_time_of_its_live_view(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: float | None, simulated: bool
) -> None:
    story = Story(workers=4, seconds=100, killed=None)
    job = description(story, target=target)
    view = LiveView(job, Console(file=io.StringIO()), is_virtual=simulated, clock=lambda: 0.0)
    with ResultFolder.create(tmp_path / "run", job, now=NOW) as folder:
        for record in records(story):
            if record.time_s <= 40.0:
                folder.append(record)
                view.update(record)
        if simulated:
            (folder.path / "simulation.json").write_text("{}")
        text = described(capsys, str(folder.path))
        found = as_json(capsys, folder.path)["progress"]
    shown = re.search(r"(\d+) % done, ETA ([^,]*),", view.line())
    assert shown is not None
    assert shown[2].endswith(" of virtual time") == simulated
    assert f"\n{shown[1]} % done, ETA {shown[2]}\n" in text
    assert found["secondsLeft"] == pytest.approx(61, abs=2), "training began after a second"
    assert found["fraction"] == pytest.approx(float(shown[1]) / 100, abs=0.006)
    assert (found["secondsToTarget"] is None) == (target is None)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_killed_run_states_whether_it_can_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: bool
) -> None:
    folder = make(tmp_path / "run", None, checkpoint=checkpoint)
    found = as_json(capsys, folder)
    first = found["problems"][0]
    assert (first["severity"], first["reason"]) == ("warning", "Interrupted")
    assert first["message"] == "killed before it wrote its summary"
    assert ("--resume" in first["command"]) is checkpoint
    assert ("no checkpoint" in first["advice"]) is not checkpoint
    assert found["summary"]["steps"] > 0
    assert "Interrupted: killed before it wrote its summary" in described(capsys, str(folder))


def test_a_run_without_a_step_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW) as folder:
        folder.finish(Ending("an error", "no data", False, reason=EndReason.DATA_FAILED))
    text = described(capsys, str(tmp_path / "run"))
    assert "DataFailed" in text
    assert "--data-root" in text
    assert "NEXT" not in text


def test_a_name_is_a_job_unless_it_is_a_result_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "digits", Ending("x"))
    assert main(["init", str(tmp_path / "project")]) == 0
    monkeypatch.chdir(tmp_path)
    assert "PROBLEMS" in described(capsys, "digits")
    for arguments in (["digits", "--context", "x"], ["other"], ["project"], ["digits", "-n", "ml"]):
        assert main(["describe", *arguments]) != 0
        assert "kubeconfig" in capsys.readouterr().err.lower()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/digis", 'there is no such folder. Did you mean "runs/digits"? `dlion ls`'),
        ("sweep/a run", 'Did you mean "runs/sweep/a run"? `dlion ls`'),  # as `dlion ls` names it
        ("no/where", "there is no such folder. `dlion ls`"),
        ("runs/" + "x" * 300, "there is no such folder"),
        ("runs/an empty", "has no run. `dlion ls 'runs/an empty'`"),
        ("runs/project", "has no run. `dlion ls runs/project`"),
        ("runs/sweep", "is a comparison, whose runs have separate folders. `dlion ls"),
        ("runs/digits/job.yaml", "there is no such folder"),
    ],
)
def test_a_folder_without_a_run_is_refused_with_the_correct_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    make(Path("runs/digits"), Ending("x"))
    Path("runs/an empty").mkdir()
    assert main(["init", "runs/project"]) == 0
    make(Path("runs/sweep/a run"), Ending("x"))
    Path("runs/sweep/comparison.json").write_text('{"rows": [], "targetAccuracy": null}')
    for command in ("describe", "logs"):
        assert main([command, name]) == ExitCode.DATA
        error = capsys.readouterr().err
        assert command == "logs" or message in error
        assert "Traceback" not in error


def test_a_folder_that_may_not_be_read_is_named_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        above = Path(place, "above")
        folder = make(above / "run", Ending("x"))
        (folder / "logs").mkdir()
        commands = ("describe", "logs", "ls")
        for command in commands:  # only root may have access to the imports
            main([command, str(folder)])
        capsys.readouterr()
        for closed in (folder, above):
            closed.chmod(0)
            try:
                with without_rights():
                    for command in commands:
                        assert main([command, str(folder)]) == ExitCode.STORAGE
                        assert capsys.readouterr().err == (
                            f"dlion: {folder}: cannot be read: Permission denied. Check the rights "
                            "of it and of the folders above it\n"
                        )
            finally:
                closed.chmod(0o755)


def test_hostile_texts_do_not_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = Ending(ESCAPE, ESCAPE * 1000, False, reason=ESCAPE)
    folder = make(tmp_path / f"run {ESCAPE}; rm -rf $HOME", ending, warning(ESCAPE, ESCAPE * 9))
    with (folder / "events.jsonl").open("a") as file:
        file.write(f"not a record {ESCAPE}\n" * 3)
    text = described(capsys, str(folder))
    assert "3 lines of events.jsonl are not records" in text
    assert "·[31m·red" in text
    found = as_json(capsys, folder)
    assert "'" in found["next"][0], "a shell reads the name as one word"
    assert max(len(each["message"]) for each in found["problems"]) < 1000


def unfolding() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("job.yaml", unfolding()),
        ("job.yaml", "kind: [" * 5000),
        ("job.yaml", None),
        ("events.jsonl", None),
        ("events.jsonl", '{"kind":"step"}\n' * 100 + "x" * 200_000),
        ("summary.json", None),
        ("summary.json", "{"),
        ("summary.json", '{"ending": {"succeeded": false, "reason": 7, "missing": [1e999, -1]}}'),
        ("summary.json", '{"ending": {"missing": ' + json.dumps([*range(5000)]) + "}}"),
        ("summary.json", '{"ending": [], "workers": {"a": NaN}}'),
    ],
    ids=["unfolding", "nested", "job pipe", "events pipe", "no records", "summary pipe", "cut",
         "foreign values", "thousands missing", "foreign forms"],
)  # fmt: skip
def test_damaged_folders_are_described_as_far_as_they_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None
) -> None:
    folder = make(tmp_path / "run", Ending("x"))
    (folder / name).unlink()
    if content is None:
        os.mkfifo(folder / name)
    else:
        (folder / name).write_text(content)
    text = described(capsys, str(folder))
    assert len(text) < 20_000
    found = as_json(capsys, folder)
    assert found["run"]["path"] == str(folder)
    if name != "summary.json" and content is None:
        assert found["notes"][0].startswith("without records: ")


def test_missing_files_leave_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "run", Ending("maxSeconds 30 reached"))
    (folder / "events.jsonl").unlink()
    text = described(capsys, str(folder))
    assert "without records" in text
    assert "cifar10: maxSeconds 30 reached" in text, "the figures of the summary"
