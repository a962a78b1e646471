"""The run's records on their way into the result folder, each of them once.

Owns where the keeper is in the coordinator's stream, also over its own restarts: `keeper.json`
names a place in the stream and the length of `events.jsonl` at it, and every line behind that
length is one record further. Called by `following`, in its thread.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.progress import EventRecord
from dlion_api.reasons import EventReason
from dlion_api.records import record_from_json
from dlion_api.spec import Job
from dlion_worker.results.description import describe
from dlion_worker.results.folder import EVENTS, SUMMARY, ResultFolder
from dlion_worker.results.storage import StorageError, write_whole
from dlion_worker.results.summary import Ending

_LOG = logging.getLogger(__name__)

PLACE_FILE = "keeper.json"
NOTE_EVERY_S = 10.0


@dataclass(frozen=True)
class Place:
    """A place in the stream: of an epoch's records so many were taken when the file was so long."""

    epoch: str = ""
    sequence: int = 0
    events_bytes: int = 0


class Recorder:
    """One run's folder. Not for use by two threads at once."""

    def __init__(self, folder: Path, job: Job) -> None:
        """Raises: UnavailableError while another keeper has the folder; StorageError."""
        self._path = folder
        self._folder = ResultFolder.take_up(folder, describe(job), now=datetime.now(UTC))
        noted = _noted(folder / PLACE_FILE)
        self._epoch = noted.epoch
        self._sequence = noted.sequence + _lines_behind(folder / EVENTS, noted.events_bytes)
        self._noted_s = time.monotonic()
        self.is_over = (folder / SUMMARY).exists()
        """Whether the run's summary is written."""

    @property
    def place(self) -> tuple[str, int]:
        """Epoch and sequence of the last record that was taken."""
        return self._epoch, self._sequence

    def take(self, epoch: str, first_sequence: int, records_json: Sequence[str]) -> None:
        """Adds those that are new.

        Raises: StorageError (a full disk): what was not added has not been taken.
        """
        if epoch != self._epoch:
            self._epoch, self._sequence = epoch, 0
            self._note()
        if first_sequence > self._sequence + 1:
            self._tell_gap(first_sequence)
        for text in records_json[self._sequence + 1 - first_sequence :]:
            self._add(text)
        if time.monotonic() - self._noted_s > NOTE_EVERY_S:
            self._note()

    def finish(self, reason: str, *, succeeded: bool) -> None:
        """Writes the summary. Raises: StorageError."""
        self._folder.finish(Ending(stop_reason=reason, succeeded=succeeded))
        self._note()
        self.is_over = True
        _LOG.info("the run is over: %s; %s is written", reason, SUMMARY)

    def close(self) -> None:
        """Closes the files; the folder can be read and gone on with."""
        try:
            self._note()
        except StorageError as error:  # the place of ten seconds ago will do
            _LOG.warning("%s not written: %s", PLACE_FILE, error)
        self._folder.close()

    def _add(self, text: str) -> None:
        try:
            record = record_from_json(text)
        except ContractError as error:
            _LOG.warning("record %d of the coordinator left out: %s", self._sequence + 1, error)
            self._sequence += 1
            self._note()
            return
        before = self._events_bytes()
        try:
            self._folder.append(record)
        except StorageError:
            if self._events_bytes() > before:  # the line is there, a chart's point is not
                self._sequence += 1
            raise
        self._sequence += 1

    def _tell_gap(self, first_sequence: int) -> None:
        """The coordinator had to forget records before this keeper could take them."""
        missing = first_sequence - 1 - self._sequence
        words = f"{missing} records passed by while the keeper was away"
        _LOG.warning("%s", words)
        now_s = self._folder.elapsed_s
        event = EventRecord(now_s, Rank(0), 0, EventReason.RECORDS_DROPPED, words, warning=True)
        self._folder.append(event)
        self._sequence = first_sequence - 1
        self._note()

    def _note(self) -> None:
        place = Place(self._epoch, self._sequence, self._events_bytes())
        write_whole(self._path / PLACE_FILE, json.dumps(asdict(place)).encode())
        self._noted_s = time.monotonic()

    def _events_bytes(self) -> int:
        return (self._path / EVENTS).stat().st_size


def _noted(path: Path) -> Place:
    try:
        values = json.loads(path.read_bytes())
        return Place(
            str(values["epoch"]),
            max(0, int(values["sequence"])),
            max(0, int(values["events_bytes"])),
        )
    except FileNotFoundError:
        return Place()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        _LOG.warning("%s is damaged: records are taken from where the coordinator has them", error)
        return Place()


def _lines_behind(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        file.seek(offset)
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
