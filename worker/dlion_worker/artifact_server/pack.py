"""Write files of a run's result folder to standard output as a tar stream.

`dlion fetch` runs `python -m dlion_worker.artifact_server.pack --run RUN PATH…` in the keeper's
container. It uses only the standard library and writes nothing to the disk. The first member lists
the contents with their lengths at that time, the last one has the SHA-256 of each file as sent. A
file that grows or is replaced later is sent as it is when its turn comes. With `--events-only`,
`events.jsonl` is sent without the records of steps and links, which are nearly all of it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
import tarfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from dlion_api.cluster_names import STATE_DIR
from dlion_api.errors import DataError
from dlion_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONTENTS: Final = ".dlion-contents.json"
CHECKSUMS: Final = ".dlion-checksums.json"
EVENTS: Final = "events.jsonl"
MAX_EVENTS_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes of the newest events with `--events-only`."""
_EVENT_START: Final = b'{"kind":"event",'
_EXCLUDED: Final = ("keeper.json", "run.lock", "state")
"""Excluded from the whole folder: they are useless elsewhere."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dlion_worker.artifact_server.pack")
    parser.add_argument("--root", default=STATE_DIR, help="folder that contains all runs' folders")
    parser.add_argument("--run", required=True, help="the run's folder below it")
    parser.add_argument("paths", nargs="+", help="files or folders; . for everything")
    parser.add_argument(
        "--events-only", action="store_true", help=f"send only the newest events of {EVENTS}"
    )
    given = parser.parse_args(arguments)
    try:
        pack(
            Path(given.root), given.run, given.paths, sys.stdout.buffer,
            events_only=given.events_only,
        )  # fmt: skip
    except DataError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.DATA
    except BrokenPipeError:  # `dlion fetch` has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.UNAVAILABLE
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.STORAGE
    return ExitCode.OK


def pack(
    root: Path, run: str, paths: Sequence[str], output: BinaryIO, *, events_only: bool = False
) -> None:
    """Write the stream, with names relative to the run's folder.

    Raises: DataError, before anything is written, if a path does not exist or is outside the run's
    folder; OSError if a file cannot be read.
    """
    folder = _folder(root, run)
    files = _files(folder, paths)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    checksums: dict[str, str] = {}
    events = _events(files.pop(EVENTS)) if events_only and EVENTS in files else None
    if events is not None:
        sizes[EVENTS] = len(events)
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _add_json(archive, CONTENTS, {"run": run, "files": sizes})
        for name, path in files.items():
            checksums[name] = _add(archive, name, path)
        if events is not None:
            archive.addfile(_entry(EVENTS, len(events)), io.BytesIO(events))
            checksums[EVENTS] = hashlib.sha256(events).hexdigest()
        _add_json(archive, CHECKSUMS, {"sha256": checksums})


def _folder(root: Path, run: str) -> Path:
    if not run or Path(run).name != run or run in (".", ".."):
        raise DataError(
            f"--run: is not a run's name (given: {run!r}; allowed: one without a slash)"
        )
    folder = root / run
    if not folder.is_dir():
        known = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
        raise DataError(
            f"the keeper has no results of run {run!r} yet; it has those of: "
            f"{', '.join(known) or 'none'}"
        )
    return folder.resolve()


def _files(folder: Path, paths: Sequence[str]) -> dict[str, Path]:
    files_by_name: dict[str, Path] = {}
    for given in paths:
        path = folder / given
        if not path.resolve().is_relative_to(folder) or Path(given).is_absolute():
            raise DataError(f"{given}: is outside the run's folder")
        if not path.exists():
            raise DataError(
                f"{given}: does not exist yet; the run has: "
                f"{', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}"
            )
        for each in _below(path, folder):
            files_by_name[each.relative_to(folder).as_posix()] = each
    if not files_by_name:
        raise DataError(f"{', '.join(paths)}: contains no files yet")
    return files_by_name


def _below(path: Path, folder: Path) -> Iterator[Path]:
    """Regular files only: a link could point anywhere, and a socket has no content."""
    path = path.resolve()
    if path.is_file():
        yield path
        return
    for parent, folders, names in os.walk(path):
        at_top = Path(parent) == folder
        folders[:] = sorted(n for n in folders if not (at_top and n in _EXCLUDED))
        for name in sorted(names):
            each = Path(parent) / name
            is_excluded = name.startswith(".") or (at_top and name in _EXCLUDED)
            if not is_excluded and each.is_file() and not each.is_symlink():
                yield each


def _add(archive: tarfile.TarFile, name: str, path: Path) -> str:
    with path.open("rb") as file:
        # An earlier length may be of another file, and cut this one off with a checksum that fits.
        now = os.fstat(file.fileno())
        entry = _entry(name, now.st_size)
        entry.mtime = int(now.st_mtime)
        reader = _Hashing(file)
        archive.addfile(entry, reader)  # raises OSError if the file has become shorter
        return reader.digest.hexdigest()


def _events(path: Path) -> bytes:
    """The newest events of the file, in order."""
    lines: deque[bytes] = deque()
    size = 0
    with path.open("rb") as file:
        for line in file:
            if line.startswith(_EVENT_START) and line.endswith(b"\n"):
                lines.append(line)
                size += len(line)
            while size > MAX_EVENTS_BYTES:
                size -= len(lines.popleft())
    return b"".join(lines)


def _add_json(archive: tarfile.TarFile, name: str, document: object) -> None:
    content = json.dumps(document, sort_keys=True).encode()
    archive.addfile(_entry(name, len(content)), io.BytesIO(content))


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size
    entry.mode = 0o644
    return entry


class _Hashing(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        content = self._file.read(size)
        self.digest.update(content)
        return content


if __name__ == "__main__":
    sys.exit(main())
