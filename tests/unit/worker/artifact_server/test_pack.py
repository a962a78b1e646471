"""Tests of the keeper's tar stream, and of its unpacking by the command line.

Files arrive complete and checked, with their names and times. The whole folder comes without files
that mean nothing elsewhere. Files outside the run's folder are not sent, and neither are links. On
request only the events of the records are sent, and of too many the newest. Missing paths are
reported. A stream that is truncated, damaged or hostile at any place does not change the folder.
The program keeps its exit codes when `dlion fetch` starts it.

Left out: the path through the cluster (tests/cluster/test_cli_pods.py).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlion_api.errors import ContractError, DataError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_cli.inputs.unpacking import unpack
from dlion_worker.artifact_server.pack import CHECKSUMS, CONTENTS, MAX_EVENTS_BYTES, main, pack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MODEL = bytes(range(256)) * 5000


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The keeper's disk, with one run on it."""
    run = tmp_path / "kept" / "1"
    site = run / "models" / "plant-a"
    site.mkdir(parents=True)
    (site / "model.keras").write_bytes(MODEL)
    (site / "model.json").write_text("{}")
    (site / ".arriving-x").write_text("half")
    os.utime(site / "model.json", (1_700_000_000, 1_700_000_000))
    (run / "events.jsonl").write_text('{"kind": "event"}\n')
    (run / "empty").touch()
    (run / "run.lock").touch()
    (run / "state").mkdir()
    (run / "state" / "checkpoint").write_text("x")
    (tmp_path / "kept" / "secret").write_text("s")
    (run / "link").symlink_to(tmp_path / "kept" / "secret")
    return tmp_path / "kept"


def stream(kept: Path, *paths: str) -> bytes:
    output = io.BytesIO()
    pack(kept, "1", paths, output)
    return output.getvalue()


def pieces(content: bytes, size: int = 1000) -> Iterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


def names(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}


@pytest.mark.parametrize("size", [1, 511, 512, 100_000, 10_000_000])
def test_a_model_arrives_complete(kept: Path, tmp_path: Path, size: int) -> None:
    content = stream(kept, "models/plant-a/model.json" if size == 1 else "models/plant-a")
    out = tmp_path / "out"
    progress: list[tuple[int, int]] = []
    made = unpack(
        pieces(content, size),
        out,
        rename=lambda name: name.removeprefix("models/plant-a/"),
        on_progress=lambda done, whole: progress.append((done, whole)),
    )
    assert {path.name for path in made} == names(out)
    assert (out / "model.json").stat().st_mtime == 1_700_000_000
    if size > 1:
        assert (out / "model.keras").read_bytes() == MODEL
        assert progress[-1] == (len(MODEL) + 2, len(MODEL) + 2)


def test_the_whole_folder_comes_without_locks_links_and_state(kept: Path, tmp_path: Path) -> None:
    unpack([stream(kept, ".")], tmp_path / "out")
    assert names(tmp_path / "out") == {
        "events.jsonl", "empty", "models/plant-a/model.keras", "models/plant-a/model.json"
    }  # fmt: skip


def test_existing_files_are_replaced_and_the_others_stay(kept: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "events.jsonl").write_text("old")
    (out / "mine").write_text("mine")
    unpack([stream(kept, "events.jsonl")], out)
    assert (out / "events.jsonl").read_text().startswith("{")
    assert names(out) == {"events.jsonl", "mine"}


def test_nothing_is_replaced_where_a_folder_has_the_name_of_a_file(
    kept: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    in_the_way = out / "models" / "plant-a"
    for name in ("model.keras", "model.json"):
        shutil.rmtree(out, ignore_errors=True)
        (in_the_way / name).mkdir(parents=True)
        with pytest.raises(DataError, match="is a folder, not a file"):
            unpack([stream(kept, ".")], out)
        assert names(out) == set()


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "models/../../secret", "link"])
def test_nothing_outside_the_runs_folder_is_sent(kept: Path, path: str) -> None:
    with pytest.raises(DataError, match="is outside"):
        stream(kept, path)


@pytest.mark.parametrize("run", ["", ".", "..", "a/b", "/"])
def test_a_run_is_a_single_name(kept: Path, run: str) -> None:
    with pytest.raises(DataError, match="not a run's name"):
        pack(kept, run, ["."], io.BytesIO())


def test_missing_paths_are_reported(kept: Path) -> None:
    with pytest.raises(DataError, match=r"models/b: does not exist yet; the run has: .*models"):
        stream(kept, "models/b")
    with pytest.raises(DataError, match=r"no results of run '2' yet; it has those of: 1"):
        pack(kept, "2", ["."], io.BytesIO())
    (kept / "3").mkdir()
    with pytest.raises(DataError, match="contains no files yet"):
        pack(kept, "3", ["."], io.BytesIO())


def test_a_growing_file_is_sent_with_its_length_at_its_turn(kept: Path, tmp_path: Path) -> None:
    events = kept / "1" / "events.jsonl"
    events.write_bytes(b"x" * 1_000_000)

    class Growing(io.BytesIO):
        def write(self, content: Iterable[int], /) -> int:  # type: ignore[override]
            with events.open("ab") as file:
                file.write(b"y" * 10)
            return super().write(bytes(content))

    output = Growing()
    pack(kept, "1", ["events.jsonl"], output)
    unpack([output.getvalue()], tmp_path / "out")
    sent = (tmp_path / "out" / "events.jsonl").read_bytes()
    assert sent.rstrip(b"y") == b"x" * 1_000_000
    assert len(sent) < events.stat().st_size


@pytest.mark.parametrize("length", [1, 100, 1_000])
def test_a_file_that_is_replaced_before_its_turn_is_sent_whole(
    kept: Path, tmp_path: Path, length: int
) -> None:
    """As the keeper replaces a model or a summary, with one that is shorter or longer."""
    path = kept / "1" / "summary.json"
    path.write_bytes(b"a" * 100)

    class Replacing(io.BytesIO):
        def write(self, content: Iterable[int], /) -> int:  # type: ignore[override]
            (kept / "new").write_bytes(b"b" * length)
            (kept / "new").replace(path)
            return super().write(bytes(content))

    output = Replacing()
    pack(kept, "1", ["models/plant-a/model.keras", "summary.json"], output)
    unpack([output.getvalue()], tmp_path / "out")
    assert (tmp_path / "out" / "summary.json").read_bytes() == b"b" * length


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.7, 0.99])
def test_a_truncated_stream_changes_nothing(kept: Path, tmp_path: Path, share: float) -> None:
    content = stream(kept, ".")
    out = tmp_path / "out"
    out.mkdir()
    (out / "events.jsonl").write_text("old")
    with pytest.raises(UnavailableError, match="to its end"):
        unpack(pieces(content[: int(share * content.rindex(b"sha256"))]), out)
    assert names(out) == {"events.jsonl"}
    assert (out / "events.jsonl").read_text() == "old"


def test_a_flipped_bit_changes_nothing(kept: Path, tmp_path: Path) -> None:
    content = bytearray(stream(kept, "models"))
    content[content.index(MODEL[:512]) + 700] ^= 1
    with pytest.raises(ContractError, match="SHA-256 differs"):
        unpack([bytes(content)], tmp_path / "out")
    assert names(tmp_path / "out") == set()


def hostile(*members: tarfile.TarInfo) -> bytes:
    """A stream with these members, and valid checksums."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
        digests = {m.name: hashlib.sha256(b"x" * m.size).hexdigest() for m in members}
        content = json.dumps({"sha256": digests}).encode()
        checksums = tarfile.TarInfo(CHECKSUMS)
        checksums.size = len(content)
        archive.addfile(checksums, io.BytesIO(content))
    return output.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **headers: str
) -> tarfile.TarInfo:
    """`headers`: extended ones, with `_` for `.`."""
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    made.pax_headers = {key.replace("_", "."): value for key, value in headers.items()}
    made.size = 1 if kind == tarfile.REGTYPE else 0
    return made


@pytest.mark.parametrize(
    "content",
    [
        hostile(member("../out-of-it")),
        hostile(member("a/../../out-of-it")),
        hostile(member("a/../within")),
        hostile(member("./within")),
        hostile(member("/etc/hostname")),
        hostile(member("twice"), member("twice")),
        hostile(member("link", tarfile.SYMTYPE, "/etc")),
        hostile(member("link", tarfile.SYMTYPE, "inside")),
        hostile(member("hard", tarfile.LNKTYPE, "x")),
        hostile(member("fifo", tarfile.FIFOTYPE)),
        hostile(member("device", tarfile.CHRTYPE)),
        hostile(member(CONTENTS, tarfile.SYMTYPE, "x")),
        hostile(member("name", path="with\0zero")),
        hostile(member("sparse", GNU_sparse_map="x")),
        hostile(member("sparse", GNU_sparse_map="0,0", GNU_sparse_size="1000000000")),
        hostile(member("sparse", GNU_sparse_size="1000000000")),
        hostile(member("sparse", GNU_sparse_major="1", GNU_sparse_minor="0")),
        hostile(member("large-header", comment="x" * 100_000)),
        member("nested", tarfile.XHDTYPE).tobuf() * 10_000,
    ],
)
def test_hostile_members_are_refused(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "below" / "out"
    with pytest.raises(ContractError):
        unpack([content], out)
    assert names(tmp_path) == set()


def test_a_malformed_stream_has_advice_for_the_reader(tmp_path: Path) -> None:
    content = hostile(member("large-header", comment="x" * 100_000))
    with pytest.raises(ContractError, match=r"nothing was changed\. Restart the keeper") as raised:
        unpack([content], tmp_path / "out")
    assert "Pack it" not in str(raised.value)


def test_the_program_keeps_its_exit_codes(kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "dlion_worker.artifact_server.pack",
        "--root",
        str(kept),
        "--run",
        "1",
    ]
    done = subprocess.run(
        [*command, "models/plant-a"], capture_output=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, b"")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        assert archive.getnames()[0] == CONTENTS
        assert archive.getnames()[-1] == CHECKSUMS
    assert main(["--root", str(kept), "--run", "1", "none"]) == ExitCode.DATA
    assert "none: does not exist yet" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--root", str(kept), "models"])
    assert ended.value.code == ExitCode.USAGE
    with subprocess.Popen([*command, "."], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as cut:
        assert cut.stdout is not None
        assert cut.stderr is not None
        cut.stdout.read(100)
        cut.stdout.close()
        assert b"Traceback" not in cut.stderr.read()
    assert cut.returncode == ExitCode.UNAVAILABLE


def test_on_request_only_events_are_sent(kept: Path, tmp_path: Path) -> None:
    events = [b'{"kind":"event","number":%d}\n' % number for number in range(3)]
    step = b'{"kind":"step","text":"\\"kind\\":\\"event\\""}\n'
    half = b'{"kind":"event",'
    (kept / "1" / "events.jsonl").write_bytes(
        step + events[0] + step * 1000 + b"".join(events[1:]) + half
    )
    output = io.BytesIO()
    pack(kept, "1", ["events.jsonl", "models"], output, events_only=True)
    unpack(pieces(output.getvalue()), tmp_path / "out")
    assert (tmp_path / "out" / "events.jsonl").read_bytes() == b"".join(events)
    assert (tmp_path / "out" / "models/plant-a/model.keras").read_bytes() == MODEL


def test_of_too_many_events_the_newest_are_sent(kept: Path, tmp_path: Path) -> None:
    line = b'{"kind":"event","number":%07d}\n'
    count = 2 * MAX_EVENTS_BYTES // len(line % 0)
    (kept / "1" / "events.jsonl").write_bytes(b"".join(line % each for each in range(count)))
    output = io.BytesIO()
    pack(kept, "1", ["events.jsonl"], output, events_only=True)
    unpack(pieces(output.getvalue(), 2**20), tmp_path / "out")
    sent = (tmp_path / "out" / "events.jsonl").read_bytes()
    assert MAX_EVENTS_BYTES - 100 < len(sent) <= MAX_EVENTS_BYTES
    assert sent.endswith(line % (count - 1))
    assert sent.startswith(b'{"kind":"event","number":')


def test_logs_are_sent_with_the_whole_folder(kept: Path, tmp_path: Path) -> None:
    (kept / "1" / "logs").mkdir()
    (kept / "1" / "logs" / "worker-0.log").write_bytes(b"\x1b[2J\xff\n")
    (kept / "1" / "logs" / ".arriving-x").write_text("half")
    unpack(pieces(stream(kept, ".")), tmp_path / "out")
    assert (tmp_path / "out" / "logs" / "worker-0.log").read_bytes() == b"\x1b[2J\xff\n"
    assert not (tmp_path / "out" / "logs" / ".arriving-x").exists()
