"""Lines of one container's log as they come, each once, over lost connections.

Called by `logs` in a thread per container. Knows no job.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from dlion_api.errors import AbsentError, SpecError, UnavailableError
from dlion_cli.cluster import path_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlion_cli.cluster import Cluster

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[-+]\d\d:\d\d)")
_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 8.0
"""Between two looks at a container that has ended and may be started again."""


@dataclass(frozen=True)
class Source:
    """One container of one pod."""

    namespace: str
    pod: str
    container: str
    label: str
    """What its lines begin with."""

    @property
    def path(self) -> str:
        """The address of its log."""
        return path_of("api", "v1", "namespaces", self.namespace, "pods", self.pod, "log")


@dataclass(frozen=True)
class Line:
    """A line, and when it was written, as the kubelet says; `time` is empty where it does not."""

    time: str
    text: str
    moment: tuple[int, int] = (0, 0)
    """Seconds and nanoseconds: as text, times without their last zeros have another order."""


def line_of(content: str) -> Line:
    """A line with its time before it.

    >>> line_of("2026-01-31T12:00:00.5Z hello")
    Line(time='2026-01-31T12:00:00.5Z', text='hello', moment=(1769860800, 500000000))
    >>> line_of("unable to retrieve container logs").text
    'unable to retrieve container logs'
    """
    time, _, text = content.rstrip("\r").partition(" ")
    found = _TIME.fullmatch(time)
    if found is None:
        return Line("", content)
    second = datetime.fromisoformat(found[1] + ("+00:00" if found[3] == "Z" else found[3]))
    return Line(time, text, (int(second.timestamp()), int((found[2] or "").ljust(9, "0"))))


def lines_now(cluster: Cluster, source: Source, *, tail: int | None) -> Iterator[Line]:
    """What the log holds. Raises: as `Cluster.lines`; SpecError: the container has not started."""
    yield from _stream(cluster, source, tail=tail, since="", follow=False)


def lines_for_ever(
    cluster: Cluster, source: Source, *, tail: int | None, stop: threading.Event
) -> Iterator[Line]:
    """What the log holds and what is added, until the pod is gone or `stop` is set.

    A stream that ends (a restarted container, a lost connection) is taken up behind the last line.
    """
    last, at_last = Line("", ""), 0
    pause_s = _PAUSE_S
    while not stop.is_set():
        skip, again = at_last, last
        try:
            for line in _stream(cluster, source, tail=tail, since=last.time, follow=True):
                if not line.time:  # the kubelet's own words: the log is not to be had just now
                    continue
                if _is_known(line, again, skip):  # the API server takes whole seconds
                    skip -= line.moment == again.moment
                    continue
                at_last = at_last + 1 if line.moment == last.moment else 1
                last, tail, pause_s = line, None, _PAUSE_S
                yield line
                if stop.is_set():
                    return
        except AbsentError:
            return
        except (UnavailableError, SpecError):  # away, or the container is about to start
            pass
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _is_known(line: Line, last: Line, left_of_last: int) -> bool:
    """Whether a stream that was taken up again repeats this line."""
    return line.moment < last.moment or (line.moment == last.moment and left_of_last > 0)


def _stream(
    cluster: Cluster, source: Source, *, tail: int | None, since: str, follow: bool
) -> Iterator[Line]:
    query = {"container": source.container, "timestamps": "true"}
    query |= {"follow": "true"} if follow else {}
    query |= {"tailLines": str(tail)} if tail is not None else {}
    query |= {"sinceTime": since} if since else {}
    for content in cluster.lines(source.path, query, silence_s=None if follow else 60.0):
        yield line_of(content.decode("utf-8", "replace"))
