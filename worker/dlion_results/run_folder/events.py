"""Reads `events.jsonl`, also of a run that was killed or is still running.

`folder` writes the file.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from dlion_api.errors import ContractError, DataError
from dlion_api.protocol.progress import END_PHASES, START_PHASES, ProgressRecord
from dlion_api.protocol.records import MAX_RECORD_BYTES, NON_FINITE_FIELDS, record_from_json
from dlion_results.run_folder.regular_files import opened
from dlion_results.run_folder.stored_values import MAX_FIGURE, MAX_NUMBER

MAX_LINE_BYTES = MAX_RECORD_BYTES + 1
"""Maximum length of a record with its newline."""
_BOUNDED: Final = frozenset({
    "time_s", "compute_s", "wall_s", "cpu_s", "exchange_cpu_s", "waited_s", "accuracy",
    "class_accuracy", *START_PHASES, "train_s", *END_PHASES,
})  # fmt: skip


def parse_record(line: bytes) -> ProgressRecord:
    """The record of a line.

    Raises: ContractError, also for a time, an accuracy or a rate that no run has: their sums would
    not be finite, and their figures have hundreds of digits.
    """
    record = record_from_json(line)
    for name, value in vars(record).items():
        values = (value,) if isinstance(value, float) else ()
        if isinstance(value, Mapping):
            values = tuple(value.values())
        elif name in _BOUNDED and isinstance(value, tuple):
            values = value
        most = MAX_FIGURE if name in _BOUNDED else math.inf if name in NON_FINITE_FIELDS else (
            MAX_NUMBER
        )  # fmt: skip
        if any(math.isfinite(number) and abs(number) >= most for number in values):
            raise ContractError(f"{name}: is too large; allowed: less than {most:g}")
    return record


def read_events(
    path: Path, on_bad_line: Callable[[str], None] | None = None
) -> Iterator[ProgressRecord]:
    """Iterate over the records of the file, in order.

    A last line without newline that is not a record is ignored: the writer was killed or is still
    writing. `on_bad_line` gets the number (from 1) and the fault of others; reading continues.

    Raises DataError if the file does not exist or cannot be read.
    """
    try:
        with (
            opened(path, follow_links=True) as descriptor,
            os.fdopen(descriptor, "rb", closefd=False) as stream,
        ):
            for number, line in enumerate(_lines(stream.readline), start=1):
                record = _record(line, number, on_bad_line)
                if record is not None:
                    yield record
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}). "
            "Name a folder that `dlion run` made"
        ) from error


class EventFollower:
    """Reads a growing `events.jsonl` piece by piece. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: os.stat_result | None = None
        self._offset = 0

    def read_new(self, take: Callable[[ProgressRecord], None], restart: Callable[[], None]) -> None:
        """Pass each record since the last call to `take`, in order.

        If the file was replaced or cut, call `restart` and begin again. A last line without newline
        is left for the next call, lines that are not records are skipped, and a missing file has no
        records. Raises DataError if the file cannot be read.
        """
        try:
            with (
                opened(self._path, follow_links=True) as descriptor,
                os.fdopen(descriptor, "rb", closefd=False) as stream,
            ):
                status = os.fstat(stream.fileno())
                if self._file is not None and (
                    not os.path.samestat(self._file, status) or status.st_size < self._offset
                ):
                    restart()
                    self._offset = 0
                self._file = status
                stream.seek(self._offset)
                for record in self._records(stream.readline):
                    take(record)
        except FileNotFoundError:
            if self._file is not None:
                restart()
            self._file, self._offset = None, 0
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({error.strerror or error})") from error

    def _records(self, readline: Callable[[int], bytes]) -> Iterator[ProgressRecord]:
        while line := readline(MAX_LINE_BYTES):
            length, is_whole = len(line), line.endswith(b"\n")
            while not is_whole and (rest := readline(MAX_LINE_BYTES)):
                length, is_whole, line = length + len(rest), rest.endswith(b"\n"), b""
            if not is_whole:
                return
            self._offset += length
            if (record := _record(line, 0, None)) is not None:
                yield record


def _lines(readline: Callable[[int], bytes]) -> Iterator[bytes]:
    """Lines with their newline; a line that is too long is replaced and its rest skipped."""
    while line := readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            line = b"(too long)\n"
        yield line


def _record(
    line: bytes, number: int, on_bad_line: Callable[[str], None] | None
) -> ProgressRecord | None:
    if not line.strip():
        return None
    try:
        return parse_record(line)
    except ContractError as error:
        if line.endswith(b"\n") and on_bad_line is not None:
            on_bad_line(f"line {number}: {error}")
        return None
