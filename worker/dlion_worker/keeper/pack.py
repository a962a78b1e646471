"""Files of a run's result folder as a tar stream on standard output, for `dlion fetch`.

`python -m dlion_worker.keeper.pack --run RUN PATH…` is what `dlion fetch` runs in the keeper's
container. Standard library only, and it writes nothing to the disk. The stream's first member says
what comes, for the progress bar; its last one has each file's SHA-256, as it was sent. A file that
grows meanwhile is sent as long as it was at the start.

The exit codes are `dlion_api.exit_codes`; what is wrong goes to standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from dlion_api.cluster_names import STATE_DIR
from dlion_api.errors import DataError
from dlion_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONTENTS: Final = ".dlion-contents.json"
CHECKSUMS: Final = ".dlion-checksums.json"
_PASSED_OVER: Final = ("keeper.json", "logs", "run.lock", "state")
"""Of the whole folder: what means nothing elsewhere."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Packs what the command line names; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dlion_worker.keeper.pack")
    parser.add_argument("--root", default=STATE_DIR, help="folder of all runs' folders")
    parser.add_argument("--run", required=True, help="the run's folder below it")
    parser.add_argument("paths", nargs="+", help="files or folders; . is all that there is")
    given = parser.parse_args(arguments)
    try:
        pack(Path(given.root), given.run, given.paths, sys.stdout.buffer)
    except DataError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.DATA
    except BrokenPipeError:  # whoever fetched has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.UNAVAILABLE
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.STORAGE
    return ExitCode.OK


def pack(root: Path, run: str, paths: Sequence[str], output: BinaryIO) -> None:
    """Writes the stream. Names in it are relative to the run's folder.

    Raises: DataError before anything is written where a path is not there or leads out of the
    run's folder; OSError where a file cannot be read.
    """
    folder = _folder(root, run)
    files = _files(folder, paths)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    checksums: dict[str, str] = {}
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _add_json(archive, CONTENTS, {"run": run, "files": sizes})
        for name, path in files.items():
            checksums[name] = _add(archive, name, path, sizes[name])
        _add_json(archive, CHECKSUMS, {"sha256": checksums})


def _folder(root: Path, run: str) -> Path:
    if not run or Path(run).name != run or run in (".", ".."):
        raise DataError(f"--run: is no run's name (given: {run!r}; allowed: one without a slash)")
    folder = root / run
    if not folder.is_dir():
        known = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
        raise DataError(
            f"the keeper has no results of run {run!r} yet; it has those of: "
            f"{', '.join(known) or 'none'}"
        )
    return folder.resolve()


def _files(folder: Path, paths: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for given in paths:
        path = folder / given
        if not path.resolve().is_relative_to(folder) or Path(given).is_absolute():
            raise DataError(f"{given}: leads out of the run's folder")
        if not path.exists():
            raise DataError(
                f"{given}: is not there yet; the run has kept: "
                f"{', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}"
            )
        for each in _below(path, folder):
            found[each.relative_to(folder).as_posix()] = each
    if not found:
        raise DataError(f"{', '.join(paths)}: holds no files yet")
    return found


def _below(path: Path, folder: Path) -> Iterator[Path]:
    """Regular files only: a link might lead anywhere, and a socket has no content."""
    path = path.resolve()
    if path.is_file():
        yield path
        return
    for parent, folders, names in os.walk(path):
        at_top = Path(parent) == folder
        folders[:] = sorted(n for n in folders if not (at_top and n in _PASSED_OVER))
        for name in sorted(names):
            each = Path(parent) / name
            is_left_out = name.startswith(".") or (at_top and name in _PASSED_OVER)
            if not is_left_out and each.is_file() and not each.is_symlink():
                yield each


def _add(archive: tarfile.TarFile, name: str, path: Path, size: int) -> str:
    with path.open("rb") as file:
        entry = _entry(name, size)
        entry.mtime = int(os.fstat(file.fileno()).st_mtime)
        reader = _Hashing(file)
        archive.addfile(entry, reader)  # raises OSError where the file has become shorter
        return reader.digest.hexdigest()


def _add_json(archive: tarfile.TarFile, name: str, document: object) -> None:
    content = json.dumps(document, sort_keys=True).encode()
    archive.addfile(_entry(name, len(content)), io.BytesIO(content))


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size
    entry.mode = 0o644
    return entry


class _Hashing(io.RawIOBase):
    """A file whose digest grows as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""
        content = self._file.read(size)
        self.digest.update(content)
        return content


if __name__ == "__main__":
    sys.exit(main())
