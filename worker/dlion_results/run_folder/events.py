"""Reads `events.jsonl`, also of a run that was killed or is still running.

`folder` writes the file.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from dlion_api.errors import ContractError, DataError
from dlion_api.protocol.progress import ProgressRecord
from dlion_api.protocol.records import MAX_RECORD_BYTES, record_from_json

MAX_LINE_BYTES = MAX_RECORD_BYTES + 1
"""Maximum length of a record with its newline."""


def read_events(
    path: Path, on_bad_line: Callable[[str], None] | None = None
) -> Iterator[ProgressRecord]:
    """Iterate over the records of the file, in order.

    A last line without newline that is not a record is ignored: the writer was killed or is still
    writing. `on_bad_line` gets the number (from 1) and the fault of others; reading continues.

    Raises DataError if the file does not exist or cannot be read.
    """
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(_lines(stream.readline), start=1):
                record = _record(line, number, on_bad_line)
                if record is not None:
                    yield record
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Name a folder that `dlion run` made"
        ) from error


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
        return record_from_json(line)
    except ContractError as error:
        if line.endswith(b"\n") and on_bad_line is not None:
            on_bad_line(f"line {number}: {error}")
        return None
