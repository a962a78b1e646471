"""Tests of result folders.

A result folder never replaces other content. Its events are readable at any time, also when the
disk is full or the last writer was killed. A run that never trained leaves nothing when it is
undone. A resumed run continues after them if it is the same job, has a checkpoint, and no other
process writes in the folder. The manifest is restored unchanged. A worker's image can open folders.

Left out: an invalid lock (test_lock.py); a kill of a real process
(tests/local/test_results_survive_a_kill.py).
"""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from dlion_api.endings import stop_rule_met
from dlion_api.errors import DataError, SpecError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_api.spec import load_job
from dlion_cli.terminal.failures import exit_code_of
from dlion_results.run_folder import folder as folder_module
from dlion_results.run_folder.environment import EnvironmentFigure, EnvironmentReport
from dlion_results.run_folder.events import read_events
from dlion_results.run_folder.folder import ResultFolder, default_folder
from dlion_results.run_folder.lock import FolderLock
from dlion_results.run_folder.manifest import read_job
from dlion_results.run_folder.storage import AppendedFile, StorageError, write_whole, writing
from dlion_results.summary.summary import Ending
from synthetic_run import Story, description, records

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STORY = Story(workers=2, seconds=20, killed=None)


@contextmanager
def files_no_longer_than(size_bytes: int):
    """A disk that is full once a file has that size (the system returns EFBIG
    instead of ENOSPC).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def interrupted_run(path):
    """A run that ended early with one event, and a checkpoint of worker 1."""
    with ResultFolder.create(path, description(STORY), now=NOW) as folder:
        folder.append(EventRecord(1.0, Rank(0), 1, "Something", ""))
    save_checkpoint(path)
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def save_checkpoint(path):
    (path / "state" / "w1").mkdir(parents=True)
    with zipfile.ZipFile(path / "state" / "w1" / "checkpoint.npz", "w") as archive:
        archive.writestr("weights.npy", b"the trainer's business")


def changed(*settings):
    """The story's job with other values: pairs of a dotted path in `spec` and a value."""
    document = json.loads(json.dumps(description(STORY).to_document()))
    for where, value in settings:
        *parents, name = where.split(".")
        part = document["spec"]
        for parent in parents:
            part = part[int(parent)] if parent.isdigit() else part[parent]
        part[name] = value
    return load_job(document)


def append_often(folder, event):
    for _ in range(1000):
        folder.append(event)


def test_the_default_folder_has_job_and_time_in_its_name():
    assert default_folder("digits", NOW) == Path("runs/digits-20260102-030405")


def test_two_runs_within_a_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        ResultFolder.create(None, description(STORY), now=NOW) as one,
        ResultFolder.create(None, description(STORY), now=NOW) as other,
    ):
        assert one.path != other.path
        assert other.path.name == "cifar10-20260102-030405-2"


@pytest.mark.parametrize("is_over", [False, True])
def test_two_runs_that_choose_a_folder_at_once_get_two(tmp_path, monkeypatch, is_over):
    """The other one takes it after this one has looked."""
    monkeypatch.chdir(tmp_path)
    others, look = [], folder_module._check

    def looks_first(path, *, resume):
        look(path, resume=resume)
        if not others:
            others.append(path)
            others[0] = ResultFolder.create(path, description(STORY), now=NOW)
            if is_over:
                others[0].close()

    monkeypatch.setattr(folder_module, "_check", looks_first)
    with ResultFolder.create(None, description(STORY), now=NOW) as one:
        assert one.path.name == "cifar10-20260102-030405-2"
        assert others[0].path.name == "cifar10-20260102-030405"
    others[0].close()


@pytest.mark.parametrize("holds", ["a file", "a folder"])
def test_a_folder_with_other_content_is_refused_and_not_changed(tmp_path, holds):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").mkdir() if holds == "a folder" else (foreign / "x").write_text("y")
    before = sorted(foreign.iterdir())
    with pytest.raises(SpecError, match="not empty"):
        ResultFolder.create(foreign, description(STORY), now=NOW)
    assert sorted(foreign.iterdir()) == before


def test_a_file_is_not_a_result_folder(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SpecError, match="is a file, but results need a folder"):
        ResultFolder.create(tmp_path / "README.md", description(STORY), now=NOW)


def test_the_error_for_a_used_folder_states_whether_its_run_can_resume(tmp_path):
    """Only a run with a checkpoint can; a simulation has none."""
    path = tmp_path / "run"
    with ResultFolder.create(path, description(STORY), now=NOW):
        pass
    with pytest.raises(SpecError) as refused:
        ResultFolder.create(path, description(STORY), now=NOW)
    assert "or remove this one: its run has no checkpoint" in str(refused.value)
    assert "--resume" not in str(refused.value)
    save_checkpoint(path)
    with pytest.raises(SpecError, match=f"dlion run FILE --resume {path}"):
        ResultFolder.create(path, description(STORY), now=NOW)


def test_a_run_that_never_trained_can_be_undone(tmp_path):
    """The folders that were made for it are removed, and nothing else."""
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "new" / "run"
    with ResultFolder.create(path, description(STORY), now=NOW) as folder:
        folder.write_environment(EnvironmentReport(name="some"))
        folder.append(EventRecord(1.0, Rank(0), 1, "Something", ""))
        assert not folder.has_steps
        folder.discard()
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]
    with ResultFolder.create(path, description(STORY), now=NOW) as folder:
        for record in records(STORY):
            folder.append(record)
        assert folder.has_steps


def test_files_of_others_are_not_removed(tmp_path):
    path = tmp_path / "run"
    with ResultFolder.create(path, description(STORY), now=NOW) as folder:
        (path / "thesis.tex").write_text("mine")
        folder.discard()
    assert list(path.iterdir()) == [path / "thesis.tex"]


def test_a_folder_that_cannot_be_started_is_removed(tmp_path):
    with files_no_longer_than(100), pytest.raises(StorageError, match=r"cannot write job\.yaml"):
        ResultFolder.create(tmp_path / "new" / "run", description(STORY), now=NOW)
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_start_is_interrupted_is_removed(tmp_path, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("dlion_results.run_folder.folder.AppendedFile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ResultFolder.create(tmp_path / "new" / "run", description(STORY), now=NOW)
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_accepted(tmp_path):
    with ResultFolder.create(tmp_path, description(STORY), now=NOW) as folder:
        job = yaml.safe_load((folder.path / "job.yaml").read_text())
    assert job["metadata"]["name"] == "cifar10"
    assert job["spec"]["synchronization"]  # defaults are filled in


def test_every_record_is_in_the_file_before_the_folder_is_closed(tmp_path):
    given = list(records(STORY))
    folder = ResultFolder.create(tmp_path / "run", description(STORY), now=NOW)
    for record in given:
        folder.append(record)
    assert list(read_events(folder.path / "events.jsonl")) == given
    folder.close()


def test_a_resumed_run_continues_after_the_old_events_without_their_torn_end(tmp_path):
    given = list(records(STORY))
    half = len(given) // 2
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW) as folder:
        for record in given[:half]:
            folder.append(record)
    save_checkpoint(tmp_path / "run")
    events = tmp_path / "run" / "events.jsonl"
    with events.open("ab") as stream:
        stream.write(b'{"kind": "step", "time_')
    again = ResultFolder.create(tmp_path / "run", description(STORY), now=NOW, resume=True)
    with again as folder:
        for record in given[half:]:
            folder.append(record)
        summary = folder.finish(Ending("maxSeconds"))
    assert list(read_events(events)) == given
    assert summary["bad_line_count"] == 0
    with ResultFolder.create(tmp_path / "whole", description(STORY), now=NOW) as folder:
        for record in given:
            folder.append(record)
        assert folder.finish(Ending("maxSeconds")) == summary


def test_resuming_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no run to resume"):
        ResultFolder.create(tmp_path, description(STORY), now=NOW, resume=True)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (changed(("exchange.policy", "full")), ["spec.exchange.policy", "full", "dlion"]),
        (changed(("sites.0.groups.0.workers", 3)), ["spec.sites[0].groups[0].workers", "3", "2"]),
        (changed(("trainer.seed", 7), ("minSites", 1)), ["spec.trainer.seed"]),
        (description(STORY, name="other"), ["metadata.name", "other", "cifar10"]),
        (
            description(Story(workers=5, seconds=20, killed=None)),
            ["spec.sites", "plant-b", "1 of them"],
        ),
    ],
    ids=["a policy", "workers", "seed", "name", "sites"],
)
def test_the_refusal_to_resume_another_job_names_the_fields_that_differ(tmp_path, given, named):
    before = interrupted_run(tmp_path / "run")
    with pytest.raises(SpecError) as raised:
        ResultFolder.create(tmp_path / "run", given, now=NOW, resume=True)
    message = str(raised.value)
    assert all(words in message for words in named), message
    assert "job.yaml" in message
    assert "--out" in message
    assert len(raised.value.problems) == 2
    assert {file: file.read_bytes() for file in before} == before


def test_a_resumed_run_may_change_its_stop_rules_and_fields_that_may_differ_between_sites(tmp_path):
    interrupted_run(tmp_path / "run")
    job = changed(("trainer.stop", {"maxSteps": 99}), ("checkpoint.everySeconds", 7))
    with ResultFolder.create(tmp_path / "run", job, now=NOW, resume=True):
        pass
    stored = yaml.safe_load((tmp_path / "run" / "job.yaml").read_text())["spec"]
    assert stored["trainer"]["stop"]["maxSteps"] == 99
    assert stored["checkpoint"]["everySeconds"] == 7


def test_resuming_without_a_checkpoint_is_refused_with_a_remedy(tmp_path):
    before = interrupted_run(tmp_path / "run")
    (tmp_path / "run" / "state" / "w1" / "checkpoint.npz").unlink()
    with pytest.raises(SpecError, match=r"no checkpoint.*Start a new run.*--out"):
        ResultFolder.create(tmp_path / "run", description(STORY), now=NOW, resume=True)
    events = tmp_path / "run" / "events.jsonl"
    assert events.read_bytes() == before[events]


def test_resuming_without_a_readable_checkpoint_is_refused_and_each_is_named(tmp_path):
    interrupted_run(tmp_path / "run")
    whole = (tmp_path / "run" / "state" / "w1" / "checkpoint.npz").read_bytes()
    paths = [tmp_path / "run" / "state" / name / "checkpoint.npz" for name in ("w0", "w1", "w2")]
    flipped = whole.replace(b"business", b"busyness")
    for path, content in zip(paths, (b"", flipped, whole[:40]), strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(DataError) as refused:
        ResultFolder.create(tmp_path / "run", description(STORY), now=NOW, resume=True)
    assert all(str(path) in str(refused.value) for path in paths)
    assert "start a new run" in str(refused.value)
    paths[2].write_bytes(whole)  # one is enough: the others adopt its worker's state
    ResultFolder.create(tmp_path / "run", description(STORY), now=NOW, resume=True).close()


@pytest.mark.parametrize(
    ("ended_by", "stop", "advice"),
    [
        ("maxSteps 90 reached", {"maxSteps": 90}, "raise trainer.stop.maxSteps above 90"),
        ("maxSteps 90 reached", {"maxSteps": 80, "maxSeconds": 600}, "above 90"),
        ("maxSteps 90 reached", {"maxSteps": 91}, ""),
        ("maxSteps 90 reached", {"maxSeconds": 600}, ""),
        ("worker 2: maxSeconds 600 reached", {"maxSeconds": 600}, "maxSeconds above 600"),
        ("targetAccuracy 0.9 reached: mean 0.91", {"targetAccuracy": 0.9}, "above 0.9, or"),
        ("targetAccuracy 0.9 reached: mean 0.91", {"targetAccuracy": 0.95}, ""),
        ("maxSteps much reached", {"maxSteps": 90}, ""),
        ("maxSteps inf reached", {"maxSteps": 90}, ""),
        (stop_rule_met("maxSeconds", 1234567.0), {"maxSeconds": 1234567}, "above 1234567, or"),
        (stop_rule_met("maxSeconds", 1234567.0), {"maxSeconds": 1234568}, ""),
        (stop_rule_met("targetAccuracy", 0.9123454), {"targetAccuracy": 0.9123454}, "0.9123454"),
        (stop_rule_met("targetAccuracy", 0.9123454), {"targetAccuracy": 0.9123455}, ""),
    ],
)
def test_a_finished_run_is_resumed_only_with_a_later_stop(tmp_path, ended_by, stop, advice):
    interrupted_run(tmp_path / "run")
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW, resume=True) as folder:
        folder.finish(Ending(ended_by))
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    before = {file: file.read_bytes() for file in files}
    job = changed(("trainer.stop", stop))
    if not advice:
        ResultFolder.create(tmp_path / "run", job, now=NOW, resume=True).close()
        return
    with pytest.raises(SpecError, match="has finished: ") as refused:
        ResultFolder.create(tmp_path / "run", job, now=NOW, resume=True)
    assert ended_by in str(refused.value)
    assert advice in str(refused.value)
    assert "For a new run, omit --resume" in str(refused.value)
    assert {file: file.read_bytes() for file in files} == before


@pytest.mark.parametrize(
    ("stop", "advice"),
    [
        ({"maxSteps": 91, "maxSeconds": 30}, "raise trainer.stop.maxSeconds above 30, or"),
        ({"maxSteps": 90, "maxSeconds": 9}, "maxSteps above 90 and trainer.stop.maxSeconds above"),
        ({"maxSeconds": 31}, ""),
    ],
)
def test_a_finished_run_is_not_resumed_with_another_rule_that_is_met(tmp_path, stop, advice):
    interrupted_run(tmp_path / "run")
    ending = {"reason": "Completed", "stop_reason": "maxSteps 90 reached", "iteration": 90}
    summary = {"ending": ending, "training_s": 30.7}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    job = changed(("trainer.stop", stop))
    if not advice:
        ResultFolder.create(tmp_path / "run", job, now=NOW, resume=True).close()
        return
    with pytest.raises(SpecError, match="has finished: maxSteps 90") as refused:
        ResultFolder.create(tmp_path / "run", job, now=NOW, resume=True)
    assert advice in str(refused.value)


ODD_FIGURES = {
    "ending": {"reason": "Completed", "stop_reason": "maxSteps 90 reached", "iteration": []},
    "training_s": "600",
}


@pytest.mark.parametrize(
    "summary",
    ["[]", "{", '{"ending": 3}', '{"ending": {"reason": []}}', json.dumps(ODD_FIGURES)],
)
def test_a_run_with_a_foreign_summary_is_resumed(tmp_path, summary):
    interrupted_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(summary)
    ResultFolder.create(tmp_path / "run", description(STORY), now=NOW, resume=True).close()


def test_a_folder_with_a_running_run_is_not_resumed(tmp_path):
    interrupted_run(tmp_path / "run")
    job, path = description(STORY), tmp_path / "run"
    with (
        ResultFolder.create(path, job, now=NOW, resume=True),
        pytest.raises(UnavailableError, match=f"still uses this folder.*process {os.getpid()}"),
    ):
        ResultFolder.create(path, job, now=NOW, resume=True)
    ResultFolder.create(path, job, now=NOW, resume=True).close()


def test_the_second_of_two_runs_that_start_in_one_folder_is_refused(tmp_path):
    """Both have found it empty: the first has taken the lock and written nothing yet."""
    first = FolderLock(tmp_path)
    with pytest.raises(UnavailableError, match="still uses this folder"):
        ResultFolder.create(tmp_path, description(STORY), now=NOW)
    first.release()
    ResultFolder.create(tmp_path, description(STORY), now=NOW).close()


def test_the_lock_of_a_killed_run_is_free(tmp_path):
    program = (
        "import sys, time; from pathlib import Path;"
        "from dlion_results.run_folder.lock import FolderLock;"
        "lock = FolderLock(Path(sys.argv[1])); print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(UnavailableError, match=f"process {holder.pid}"):
            FolderLock(tmp_path)
        holder.kill()
    FolderLock(tmp_path).release()


def test_a_full_disk_ends_with_a_whole_line_and_writing_continues_with_space(tmp_path):
    event = EventRecord(1.0, Rank(0), 1, "Something", "x" * 300)
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW) as folder:
        with files_no_longer_than(20_000), pytest.raises(StorageError, match="Free some space"):
            append_often(folder, event)
        events = folder.path / "events.jsonl"
        assert events.read_bytes().endswith(b"\n")
        fitted = len(list(read_events(events)))
        assert 20 < fitted < 100
        folder.append(event)
        assert len(list(read_events(events))) == fitted + 1


def test_a_full_disk_keeps_the_old_summary(tmp_path):
    path = tmp_path / "summary.json"
    write_whole(path, b'{"old": true}')
    with files_no_longer_than(1000), pytest.raises(StorageError):
        write_whole(path, b"x" * 5000)
    assert json.loads(path.read_text()) == {"old": True}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_by_a_library_names_its_path(tmp_path):
    """Keras' errors of a full disk have no path, and HDF5's have no number."""
    for error in (OSError(errno.ENOSPC, "No space left on device"), OSError("cannot flush")):
        with pytest.raises(StorageError) as raised, writing("cannot save", tmp_path / "model"):
            raise error
        assert str(tmp_path / "model") in str(raised.value)
        assert "Free some space" in str(raised.value)


def test_a_full_disk_ends_the_process_with_the_storage_code():
    full = AppendedFile(Path("/dev/full"))
    with pytest.raises(StorageError) as raised:
        full.append(b"line\n")
    full.close()
    assert raised.value.errno == errno.ENOSPC
    assert exit_code_of(raised.value) is ExitCode.STORAGE


def test_labels_that_look_like_numbers_stay_strings(tmp_path):
    """Readers differ: for PyYAML, which writes the file, `1e3` and `08` are strings."""
    labels = {f"l{place}": text for place, text in enumerate(("1e3", "08", "0o17", "1.e5", "yes"))}
    document = description(STORY).to_document()
    job = load_job({**document, "metadata": {**document["metadata"], "labels": labels}})
    with ResultFolder.create(tmp_path / "run", job, now=NOW):
        pass
    assert read_job(tmp_path / "run") == job


def test_the_environment_is_kept_as_yaml_and_in_the_summary(tmp_path):
    figure = EnvironmentFigure(1, "link rate", "Mbit/s", 20.0, 19.6, peer=0)
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW) as folder:
        folder.write_environment(EnvironmentReport("hetero-sys-a", (figure,), ("a note",)))
        summary = folder.finish(Ending("maxSeconds"))
    kept = yaml.safe_load((tmp_path / "run" / "environment.yaml").read_text())
    assert kept == summary["environment"]
    assert kept["figures"][0]["measured"] == 19.6


def test_models_saved_by_sites_are_named_in_the_summary(tmp_path):
    about = {
        "model": "averaged", "accuracy": 0.97, "averaged_accuracy": 0.97, "best_replica": 1,
        "ranks": [0, 1], "sites": ["plant-a", "plant-b"], "samples": 9, "stop_reason": "maxSteps",
    }  # fmt: skip
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW) as folder:
        for site, text in (("plant-a", json.dumps(about)), ("plant-b", "{half")):
            (folder.path / "models" / site).mkdir(parents=True)
            (folder.path / "models" / site / "model.json").write_text(text)
        summary = folder.finish(Ending("maxSteps"))
    assert [model["path"] for model in summary["models"]] == ["models/plant-a/model.keras"]
    assert summary["included_sites"] == ["plant-a", "plant-b"]
    assert summary["accuracy"]["averaged_model"] == 0.97
