"""Writes the run's records to the result folder, each exactly once.

Tracks the position in the coordinator's stream across restarts. `keeper.json` stores a position and
the length of `events.jsonl` at it; every line after that length is one more record.
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_api.protocol.records import record_from_json
from dlion_api.reasons import RECORDS_MISSED
from dlion_api.spec import Job
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.layout import EVENTS, SUMMARY
from dlion_results.run_folder.storage import StorageError, write_whole
from dlion_results.summary.summary import Ending

_LOG = logging.getLogger(__name__)

POSITION_FILE = "keeper.json"
SAVE_INTERVAL_S = 10.0


@dataclass(frozen=True)
class RecordPosition:
    """A position in the stream: an epoch, its records so far, and the file's length then."""

    epoch: str = ""
    sequence: int = 0
    events_bytes: int = 0
    started_at: str = ""
    """When the run's first keeper started, ISO 8601."""


class Recorder:
    """Writes one run's folder. Not thread-safe."""

    def __init__(self, folder: Path, job: Job) -> None:
        """Raises: UnavailableError while another keeper holds the folder; StorageError."""
        self._path = folder
        self._folder = ResultFolder.open_or_create(folder, job, now=datetime.now(UTC))
        saved = _load_position(folder / POSITION_FILE)
        self._epoch = saved.epoch
        self._started_at = saved.started_at or datetime.now(UTC).isoformat()
        self._sequence = saved.sequence + _lines_after(folder / EVENTS, saved.events_bytes)
        self._saved_s = time.monotonic()
        self._must_save = False
        """Whether the saved position and the lines after it would count other records."""
        self.is_over = (folder / SUMMARY).exists()
        """Whether the run's summary is written."""

    @property
    def position(self) -> tuple[str, int]:
        """Epoch and sequence of the last recorded record."""
        return self._epoch, self._sequence

    def take(self, epoch: str, first_sequence: int, records_json: Sequence[str]) -> None:
        """Record those that are new.

        Raises: StorageError (for example a full disk): the remaining records are not counted as
        recorded.
        """
        if self._must_save:
            self._save_position()
        if epoch != self._epoch:
            self._jump(epoch, 0)
        if first_sequence > self._sequence + 1:
            self._record_gap(first_sequence)
        for text in records_json[self._sequence + 1 - first_sequence :]:
            self._add(text)
        if time.monotonic() - self._saved_s > SAVE_INTERVAL_S:
            self._save_position()

    def finish(self, reason: str, *, succeeded: bool) -> None:
        """Write the summary. Raises: StorageError."""
        self._folder.finish(Ending(reason, succeeded=succeeded, started_at=self._started_at))
        self._save_position()
        self.is_over = True
        _LOG.info("the run is over: %s; %s is written", reason, SUMMARY)

    def close(self) -> None:
        """Close the files; the folder can be read, or continued later."""
        try:
            self._save_position()
        except StorageError as error:  # the position saved ten seconds ago is sufficient
            _LOG.warning("%s not written: %s", POSITION_FILE, error)
        self._folder.close()

    def _add(self, text: str) -> None:
        try:
            record = record_from_json(text)
        except ContractError as error:
            _LOG.warning("record %d of the coordinator skipped: %s", self._sequence + 1, error)
            self._jump(self._epoch, self._sequence + 1)
            return
        before = self._events_bytes()
        try:
            self._folder.append(record)
        except StorageError:
            # the line was written, the point in the chart was not
            if self._events_bytes() > before:
                self._sequence += 1
            raise
        self._sequence += 1

    def _record_gap(self, first_sequence: int) -> None:
        """Report records that the coordinator dropped before this keeper received them."""
        missing = first_sequence - 1 - self._sequence
        text = f"{missing} records were dropped while the keeper was unavailable"
        _LOG.warning("%s", text)
        now_s = self._folder.elapsed_s
        event = EventRecord(now_s, Rank(0), 0, RECORDS_MISSED, text, warning=True)
        self._folder.append(event)
        self._jump(self._epoch, first_sequence - 1)

    def _jump(self, epoch: str, sequence: int) -> None:
        """Go on at a position that no new line counts. Raises: StorageError."""
        self._epoch, self._sequence, self._must_save = epoch, sequence, True
        self._save_position()

    def _save_position(self) -> None:
        position = RecordPosition(
            self._epoch, self._sequence, self._events_bytes(), self._started_at
        )
        write_whole(self._path / POSITION_FILE, json.dumps(asdict(position)).encode())
        self._saved_s, self._must_save = time.monotonic(), False

    def _events_bytes(self) -> int:
        return (self._path / EVENTS).stat().st_size


def _load_position(path: Path) -> RecordPosition:
    try:
        values = json.loads(path.read_bytes())
        return RecordPosition(
            str(values["epoch"]),
            max(0, int(values["sequence"])),
            max(0, int(values["events_bytes"])),
            str(values.get("started_at", "")),
        )
    except FileNotFoundError:
        return RecordPosition()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        _LOG.warning("%s is damaged: continuing with the coordinator's oldest record", error)
        return RecordPosition()


def _lines_after(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        file.seek(offset)
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
