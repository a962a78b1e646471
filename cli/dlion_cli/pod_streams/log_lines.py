"""Reads and follows a container's log, without repeated lines after a reconnect; prints lines."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import click

from dlion_api.errors import AbsentError, SpecError, UnavailableError
from dlion_cli.cluster.client import ClusterClient
from dlion_cli.terminal.formatting import printable

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[-+]\d\d:\d\d)")
_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 8.0
"""Between attempts for a container that has ended and may restart."""
_COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "bright_red")


@dataclass(frozen=True)
class LogSource:
    """One container of one pod."""

    pod: str
    container: str
    label: str
    """Prefix of its lines."""


@dataclass(frozen=True)
class LogLine:
    """A line with its kubelet timestamp; `time` is empty if there is none."""

    time: str
    text: str
    instant: tuple[int, int] = (0, 0)
    """Seconds and nanoseconds. Timestamps without trailing zeros do not sort as text."""


def parse_line(content: str) -> LogLine:
    """Split a line into timestamp and text.

    >>> parse_line("2026-01-31T12:00:00.5Z hello")
    LogLine(time='2026-01-31T12:00:00.5Z', text='hello', instant=(1769860800, 500000000))
    >>> parse_line("unable to retrieve container logs").text
    'unable to retrieve container logs'
    """
    stamp, _, text = content.rstrip("\r").partition(" ")
    match = _TIME.fullmatch(stamp)
    if match is None:
        return LogLine("", content)
    second = datetime.fromisoformat(match[1] + ("+00:00" if match[3] == "Z" else match[3]))
    return LogLine(stamp, text, (int(second.timestamp()), int((match[2] or "").ljust(9, "0"))))


def read_lines(
    cluster: ClusterClient,
    source: LogSource,
    *,
    tail: int | None,
    since: str = "",
    follow: bool = False,
) -> Iterator[LogLine]:
    """The log's content from a time on; with `follow`, also new lines until the stream ends.

    Raises: as `ClusterClient.stream_lines`; SpecError if the container has not started.
    """
    query = {"container": source.container, "timestamps": "true"}
    query |= {"follow": "true"} if follow else {}
    query |= {"tailLines": str(tail)} if tail is not None else {}
    query |= {"sinceTime": since} if since else {}
    path = cluster.core_path("pods", source.pod, "log")
    silence_s = None if follow else cluster.silence_s()
    for content in cluster.stream_lines(path, query, silence_s=silence_s):
        yield parse_line(content.decode("utf-8", "replace"))


def follow_lines(
    cluster: ClusterClient,
    source: LogSource,
    *,
    tail: int | None,
    stop: threading.Event,
    to_end: bool = False,
) -> Iterator[LogLine]:
    """The log's content and new lines, until the pod is deleted or `stop` is set.

    Resumes after the last line if the stream ends, after a restart or a lost connection. With
    `to_end`, `stop` means that the container writes no more: the rest of its log comes first.

    Raises: as `read_lines`, only for that rest.
    """
    log = _NewLines(cluster, source, tail)
    pause_s = _PAUSE_S
    while not stop.is_set():
        try:
            for line in log.read(follow=True):
                pause_s = _PAUSE_S
                yield line
                if stop.is_set():
                    break
        except AbsentError:
            return
        except (UnavailableError, SpecError):  # unavailable, or the container has not started
            pass
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    if to_end:
        with contextlib.suppress(AbsentError):
            yield from log.read(follow=False)


class _NewLines:
    """Reads one log repeatedly: each line once."""

    def __init__(self, cluster: ClusterClient, source: LogSource, tail: int | None) -> None:
        self._cluster, self._source, self._tail = cluster, source, tail
        self._last, self._at_last = LogLine("", ""), 0
        """The last line, and how many with its time there were."""

    def read(self, *, follow: bool) -> Iterator[LogLine]:
        """Lines that no call has yielded before. Raises: as `read_lines`."""
        again, skip = self._last, self._at_last
        for line in read_lines(
            self._cluster, self._source, tail=self._tail, since=again.time, follow=follow
        ):
            if not line.time:  # an error message of the kubelet: the log is unavailable
                continue
            if _is_known(line, again, skip):  # sinceTime has a resolution of one second
                skip -= line.instant == again.instant
                continue
            self._at_last = self._at_last + 1 if line.instant == self._last.instant else 1
            self._last, self._tail = line, None
            yield line


def _is_known(line: LogLine, last: LogLine, left_of_last: int) -> bool:
    """Whether a resumed stream repeats this line."""
    return line.instant < last.instant or (line.instant == last.instant and left_of_last > 0)


class LogPrinter:
    """Prints whole lines from several threads, with one colour per source."""

    def __init__(self, *, timestamps: bool) -> None:
        self._timestamps = timestamps
        self._lock = threading.Lock()
        self._colours: dict[str, str] = {}
        self._width = 0
        self._last_s = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since the last line; 0 while one is printed, however slow the terminal is."""
        return 0.0 if self._lock.locked() else time.monotonic() - self._last_s

    def show(self, source: LogSource, line: LogLine) -> None:
        """Print one line, with control characters escaped."""
        with self._lock:
            colour = self._colours.setdefault(
                source.label, _COLOURS[len(self._colours) % len(_COLOURS)]
            )
            self._width = max(self._width, len(source.label))
            before = click.style(f"{source.label:<{self._width}} | ", fg=colour)
            at = f"{line.time} " if self._timestamps else ""
            text = printable(line.text.replace("\t", "    "))
            click.echo(f"{before}{at}{text}")
            self._last_s = time.monotonic()
