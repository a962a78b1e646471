"""Test `dlion logs` of a local result folder.

- Each line has its worker's name, as for pods. Group, index and container select files. `--tail`
  counts lines of each file of any size.
- A path, or an existing result folder without a cluster option, is local; anything else is a job.
- Following shows new lines and files, an unfinished line at last, and ends with the run. A log
  truncated meanwhile is shown once; a note marks lines dropped unread.
- Control characters, links, foreign files, and a damaged or hostile job do no harm.

Left out: a real run (tests/local/test_listed_runs.py), a cluster's logs
(tests/unit/cli/test_cluster_streams.py).
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from dlion_cli.__main__ import main
from dlion_cli.local_runs.run_logs import GrowingFile, WorkerLogs
from dlion_local.runner.log_limit import cut_log
from dlion_results.run_folder.lock import FolderLock
from local_run import job_document

TWO_SITES = {"plant-a": 2, "plant-b": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a result folder named `digits` in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    path = tmp_path / "digits"
    (path / "logs").mkdir(parents=True)
    (path / "job.yaml").write_text(yaml.safe_dump(job_document(TWO_SITES)))
    (path / "events.jsonl").touch()
    for rank in range(3):
        write(path, rank, f"one of {rank}\ntwo of {rank}\n")
    (path / "logs" / "sidecar-0.log").write_text("a sidecar\n")
    (path / "logs" / "evaluator.log").write_text("the evaluator\n")
    return path


def write(folder: Path, rank: int, text: str) -> None:
    with (folder / "logs" / f"worker-{rank}.log").open("a") as log:
        log.write(text)


def lines(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert main(["logs", *arguments]) == code
    return capsys.readouterr().out.splitlines()


def test_each_line_has_its_workers_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, str(folder)) == [
        "plant-a/g-0 | one of 0", "plant-a/g-0 | two of 0",
        "plant-a/g-1 | one of 1", "plant-a/g-1 | two of 1",
        "plant-b/g-0 | one of 2", "plant-b/g-0 | two of 2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--worker", "1"], ["plant-a/g-1 | one of 1", "plant-a/g-1 | two of 1"]),
        (["--worker", "0", "--tail", "1"], ["plant-a/g-0 | two of 0", "plant-b/g-0 | two of 2"]),
        (["--tail", "0"], []),
        (["-c", "sidecar"], ["plant-a/g-0 | a sidecar"]),
        (["--group", "g", "--worker", "1", "--tail", "9"],
         ["plant-a/g-1 | one of 1", "plant-a/g-1 | two of 1"]),
    ],
)  # fmt: skip
def test_options_select_lines(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: list[str]
) -> None:
    assert lines(capsys, str(folder), *options) == expected


@pytest.mark.parametrize("name", ["digits", "./digits", "digits/"])
def test_a_folder_is_named_with_and_without_a_slash(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert folder.is_dir()
    assert len(lines(capsys, name)) == 6


@pytest.mark.parametrize(
    "arguments",
    [["digits", "--context", "there"], ["other"], ["digits", "-n", "ml"], ["x" * 300]],
)
def test_any_other_argument_is_a_job_of_a_cluster(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert folder.is_dir()
    assert main(["logs", *arguments]) == 66
    assert "no kubeconfig file" in capsys.readouterr().err


def test_the_error_for_a_name_of_ls_gives_its_path(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = folder.parent / "runs" / "my run"
    listed.mkdir(parents=True)
    (listed / "events.jsonl").touch()
    assert main(["logs", "my run"]) == 66
    assert "for the result folder write 'runs/my run'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["runs/absent"], 66, "there is no such folder"),
        (["./empty"], 66, "is not a result folder of `dlion run`"),
        (["digits", "--worker", "7"], 69, "no worker with index 7 has a log of its trainer"),
        (["digits", "--group", "gpu"], 69, "no worker of group gpu"),
        (["a link", "--group", "gpu"], 69, "`dlion report 'a link'` names the workers"),
        (["digits", "--timestamps"], 2, "have no times"),
        (["digits", "-c", "keeper"], 2, "has no keeper"),
    ],
)
def test_a_missing_folder_or_log_is_reported(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    (folder.parent / "empty").mkdir()
    (folder.parent / "a link").symlink_to(folder)
    assert main(["logs", *arguments]) == code
    assert words in capsys.readouterr().err


def test_hostile_files_do_no_harm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text("a: [")
    (folder / "logs" / "worker-0.log").write_bytes(b"a\x1b[2J\tb\xff\r\nlast")
    (folder / "logs" / "worker-1.log").unlink()
    (folder / "logs" / "worker-1.log").symlink_to("/etc/passwd")
    (folder / "logs" / "worker-x.log").write_text("foreign\n")
    (folder / "logs" / "worker-2.log").write_bytes(b"y" * 3_000_000)
    shown = lines(capsys, "digits")
    assert shown[:2] == ["worker 0 | a·[2J    b\ufffd", "worker 0 | last"]
    assert {line.partition(" | ")[0] for line in shown[2:]} == {"worker 2"}
    assert sum(line.count("y") for line in shown[2:]) == 3_000_000


@pytest.mark.parametrize("kind", ["unfolding", "pipe"])
def test_logs_do_not_wait_for_an_endless_manifest(
    folder: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (folder / "job.yaml").unlink()
    if kind == "pipe":
        os.mkfifo(folder / "job.yaml")
    else:
        levels = [f"x{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 11)]
        text = "\n".join(["x0: &a0 [x]", *levels, "metadata: {name: q, labels: *a10}"])
        (folder / "job.yaml").write_text(text)
    assert lines(capsys, "digits")[0] == "worker 0 | one of 0"


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("count", [1, 2, 1000, 20_000, 30_000])
def test_a_tail_is_exact_over_many_blocks(
    folder: Path, capsys: pytest.CaptureFixture[str], count: int, end: str
) -> None:
    every = [f"line {number} {'x' * (number % 17)}" for number in range(20_000)]
    (folder / "logs" / "worker-0.log").write_text("\n".join(every) + end)
    shown = lines(capsys, "digits", "--tail", str(count), "--worker", "0", "--group", "g")
    own = [line.partition(" | ")[2] for line in shown if line.startswith("plant-a")]
    assert own == every[-count:]


def following(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dlion_cli", "logs", "-f", str(folder), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_following_shows_new_lines_and_ends_with_the_run(folder: Path) -> None:
    lock = FolderLock(folder)
    with following(folder, "--tail", "1") as process:
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in range(3)]
        assert first[0] == "plant-a/g-0 | two of 0\n"
        write(folder, 1, "three\nhalf")
        assert process.stdout.readline() == "plant-a/g-1 | three\n"
        write(folder, 1, " a line\nno end")
        assert process.stdout.readline() == "plant-a/g-1 | half a line\n"
        (folder / "logs" / "worker-0.log").write_text("new\n")  # replaced by a shorter one
        assert process.stdout.readline() == "plant-a/g-0 | new\n"
        assert process.poll() is None
        lock.release()
        assert process.stdout.read() == "plant-a/g-1 | no end\n"
        assert process.wait(timeout=30) == 0


def test_a_follower_waits_for_the_first_log_of_a_started_run(folder: Path) -> None:
    for log in (folder / "logs").iterdir():
        log.unlink()
    lock = FolderLock(folder)
    with following(folder) as process:
        time.sleep(1.0)
        assert process.poll() is None
        write(folder, 0, "at last\n")
        assert process.stdout is not None
        assert process.stdout.readline() == "plant-a/g-0 | at last\n"
        lock.release()
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("same", [True, False], ids=["equal lines", "other lines"])
def test_a_truncated_log_is_followed_without_repeats(tmp_path: Path, same: bool) -> None:
    """Between two reads the log grows by at most what a truncation keeps, also in parts of
    lines.
    """
    rng = random.Random(7)
    path = tmp_path / "worker-0.log"
    path.touch()
    whole, shown, cuts = "", [], 0
    reader = GrowingFile(path, None)
    for number in range(300):
        text = "".join(
            f"line {0 if same else f'{number}.{each}'}\n" for each in range(rng.randrange(80))
        )
        text = text[: len(text) - rng.choice((0, 0, 3))]  # a line without its end
        whole += text
        with path.open("a") as log:
            log.write(text)
        if rng.random() < 0.5:
            shown += reader.lines(is_last=False)
            cuts += cut_log(path, max_bytes=4000, kept_bytes=2000) > 0
    shown += reader.lines(is_last=True)
    assert cuts > 20
    assert shown == whole.splitlines()


def test_a_note_marks_lines_that_were_dropped_unread(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.write_text("first\nhalf a li")
    reader = GrowingFile(path, None)
    assert list(reader.lines(is_last=False)) == ["first"]
    with path.open("a") as log:
        log.write("ne\n" + "unread\n" * 1000)
    dropped = cut_log(path, max_bytes=4000, kept_bytes=75)
    assert dropped
    half, note, *rest = reader.lines(is_last=False)
    assert half == "half a li"
    assert re.fullmatch(r"\(\d+ earlier bytes were dropped: the log is too long\)", note)
    assert rest == ["unread"] * 10
    assert list(GrowingFile(path, 2).lines(is_last=True)) == ["unread"] * 2


def test_a_log_is_followed_while_another_process_truncates_it(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.touch()
    ended = threading.Event()

    def write_and_cut() -> None:
        with path.open("ab", buffering=0) as log:
            for number in range(4000):
                log.write(b"%d\n" % number)
                cut_log(path, max_bytes=1500, kept_bytes=700)
        ended.set()

    writer = threading.Thread(target=write_and_cut)
    writer.start()
    reader, shown, is_last = GrowingFile(path, None), [], False
    while not is_last:
        is_last = ended.is_set()
        shown += reader.lines(is_last=is_last)
    writer.join()
    before, is_noted = -1, False
    for line in shown:
        if line.startswith("("):
            is_noted = True
            continue
        number = int(line)
        assert number == before + 1 or (is_noted and number > before)
        before, is_noted = number, False
    assert before == 3999


def test_only_files_of_the_folder_itself_are_read(folder: Path) -> None:
    logs = WorkerLogs(folder, "trainer", None, None)
    assert {path.parent for path in logs.files()} == {folder / "logs"}
