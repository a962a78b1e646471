"""TensorBoard logs of a run: scalars, in one sub-folder per worker.

Uses TensorBoard's record format and messages, but not its `EventFileWriter`, which would load all
of TensorFlow.
"""

import io
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord, LinkRecord, ProgressRecord, StepRecord
from dlion_results.run_folder.storage import AppendedFile, writing
from dlion_results.summary.accuracy_name import common_name

STEP_INTERVAL_S = 1.0
"""At most one point per second of steps and links: TensorBoard shows only a thousand points."""


class TensorBoardLogs:
    """Writes records as scalars: loss, batch size, samples/s, accuracy and bytes on each link.

    `opened_at_s` is the wall-clock start (seconds since 1970) of the run, or of its resumption
    after the existing records. It sets TensorBoard's time axis.
    """

    def __init__(self, folder: Path, names: Mapping[Rank, str], *, opened_at_s: float) -> None:
        self._folder = folder
        self._names = names
        self._opened_at_s = opened_at_s
        self._existing_until_s = 0.0
        self._files: dict[Rank, AppendedFile] = {}
        self._due_s: dict[tuple[Rank, Rank | None], float] = {}
        self._sent_bytes: dict[tuple[Rank, Rank], int] = {}

    def add(self, record: ProgressRecord) -> None:
        """Add the record's scalars, if they are due. Raises StorageError."""
        match record:
            case StepRecord() if self._due(record.rank, None, record.time_s):
                self._write(record, record.iteration, _step_scalars(record))
            case EvaluationRecord():
                name = common_name([record.accuracy_name])
                scalars = {f"held-out/{name}": record.accuracy, "held-out/loss": record.loss}
                for metric, value in record.metrics.items():
                    tag = f"held-out/{metric}"
                    while tag in scalars:  # as in `dlion.metrics`
                        tag = f"held-out/metric_{tag.removeprefix('held-out/')}"
                    scalars[tag] = value
                self._write(record, record.iteration, scalars)
            case LinkRecord():
                self._add_link(record)
            case _:
                pass

    def note_existing(self, record: ProgressRecord) -> None:
        """Note a record of the run that is resumed; its scalars are already written.

        Call it before the first `add`.
        """
        self._existing_until_s = max(self._existing_until_s, record.time_s)
        if isinstance(record, LinkRecord):
            self._count_sent(record)

    def close(self) -> None:
        """Close the files; all data is already in them."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _add_link(self, record: LinkRecord) -> None:
        self._count_sent(record)
        if self._due(record.rank, record.peer, record.time_s):
            peer = self._names.get(record.peer, str(record.peer))
            scalars = {f"sent bytes/to {peer}": float(self._sent_bytes[record.rank, record.peer])}
            if record.bandwidth_bytes_per_s is not None:
                scalars[f"bandwidth bytes per s/to {peer}"] = record.bandwidth_bytes_per_s
            self._write(record, record.iteration, scalars)

    def _count_sent(self, record: LinkRecord) -> None:
        link = (record.rank, record.peer)
        self._sent_bytes[link] = self._sent_bytes.get(link, 0) + record.sent_bytes

    def _due(self, rank: Rank, peer: Rank | None, time_s: float) -> bool:
        due = time_s >= self._due_s.get((rank, peer), 0.0)
        if due:
            self._due_s[rank, peer] = time_s + STEP_INTERVAL_S
        return due

    def _write(self, record: ProgressRecord, step: int, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        wall_time = self._opened_at_s + record.time_s - self._existing_until_s
        event = Event(wall_time=wall_time, step=step, summary=Summary(value=values))
        self._file(record.rank).append(_framed(event))

    def _file(self, rank: Rank) -> AppendedFile:
        if rank not in self._files:
            name = self._names.get(rank, str(rank)).replace("/", ".")
            path = self._folder / name / f"events.out.tfevents.{int(self._opened_at_s):010d}.dlion"
            with writing("cannot make the TensorBoard folder", path):
                # Without parents: a removed result folder must not be recreated.
                self._folder.mkdir(exist_ok=True)
                path.parent.mkdir(exist_ok=True)
            self._files[rank] = AppendedFile(path)
        file = self._files[rank]
        if file.is_empty:  # it is new, or the disk was full
            head = Event(wall_time=self._opened_at_s, file_version="brain.Event:2")
            file.append(_framed(head))
        return file


def _step_scalars(record: StepRecord) -> dict[str, float]:
    scalars = {
        "training/loss": record.loss,
        "training/local batch size": float(record.local_batch_size),
        "training/learning rate": record.learning_rate,
    }
    if record.wall_s > 0:
        scalars["training/samples per s"] = record.local_batch_size / record.wall_s
    return scalars


def _framed(event: Event) -> bytes:
    """The event in TensorBoard's file format, with length and checksums."""
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
