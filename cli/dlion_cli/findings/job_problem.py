"""One finding about a job, and lists of them."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from dlion_cli.terminal.formatting import printable

MAX_NAMED: Final = 4
"""Objects that one finding names."""
DEFAULT_NAMESPACE: Final = "default"

_WITHOUT_NAMESPACE: Final = re.compile(
    r"^kubectl (get|describe) (nodes|pv)\b|^dlion (preflight|validate)| -A\b"
)


OBJECT_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
"""A kind or name that a command may have. Those in events are not validated: they may be options,
or hold what a shell executes."""
_COMMAND: Final = re.compile(r"[A-Za-z0-9 ._:/=,@…-]*")
"""A command that does no more than its words say."""


class Severity(StrEnum):
    """How bad a finding is, worst first."""

    ERROR = "error"
    """The run has failed, or does not continue by itself."""
    WARNING = "warning"
    """It continues without something, or may recover by itself."""
    NOTE = "note"
    """Nothing is wrong; it explains the state."""


_ORDER: Final = {severity: place for place, severity in enumerate(Severity)}


@dataclass(frozen=True)
class JobProblem:
    """What is wrong with which object, and what to do."""

    severity: Severity
    reason: str
    """One CamelCase word: Kubernetes' or the operator's, where there is one."""
    object: str
    """Kind and name, such as `pod/digits-small-77a4cb-0-x2x7k`."""
    message: str
    advice: str
    command: str = ""
    """A command that helps; empty if there is none."""

    def as_json(self) -> dict[str, Any]:
        """For `-o json`."""
        return {**asdict(self), "severity": str(self.severity)}


@dataclass(frozen=True)
class JobScope:
    """The job's name and namespace, for commands, and the present time."""

    name: str
    namespace: str
    now: datetime

    def command(self, words: str) -> str:
        """The command with the namespace, unless it is the default one or the command has none."""
        if not words or self.namespace == DEFAULT_NAMESPACE or _WITHOUT_NAMESPACE.search(words):
            return words
        return f"{words} -n {self.namespace}"

    def age(self, time: str) -> timedelta | None:
        """The time since then; None if it is not a time."""
        try:
            instant = datetime.fromisoformat(time)
        except ValueError:
            return None
        return self.now - (instant if instant.tzinfo else instant.replace(tzinfo=UTC))

    def is_within(self, time: str, span: timedelta) -> bool:
        """Whether that time was at most `span` ago; True for an unknown time."""
        age = self.age(time)
        return age is None or age <= span

    def is_older(self, time: str, span: timedelta) -> bool:
        """Whether that time was more than `span` ago; False for an unknown time."""
        return not self.is_within(time, span)


def sorted_problems(problems: Iterable[JobProblem]) -> list[JobProblem]:
    """The problems, worst first; equal ones of several objects become one.

    A command that a shell or terminal might take for something else is left out.
    """
    grouped: dict[tuple[str, ...], list[JobProblem]] = {}
    for each in problems:
        key = (each.severity, each.reason, each.message, each.advice)
        grouped.setdefault(key, []).append(each)
    merged = [
        replace(
            same[0],
            object=_first_of(list(dict.fromkeys(each.object for each in same))),
            command=same[0].command if _COMMAND.fullmatch(same[0].command) else "",
        )
        for same in grouped.values()
    ]
    return sorted(merged, key=lambda each: _ORDER[each.severity])


def _first_of(objects: list[str]) -> str:
    more = f" and {len(objects) - MAX_NAMED} more" if len(objects) > MAX_NAMED else ""
    return ", ".join(objects[:MAX_NAMED]) + more


def one_line(message: object, most: int = 600) -> str:
    """The message as one printable line of limited length.

    >>> one_line("a  b" + chr(10) + "c")
    'a b c'
    """
    line = printable(" ".join(str(message or "").split()))
    return line if len(line) <= most else f"{line[: most - 1]}…"
