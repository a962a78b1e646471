"""Commands of DLion that must name a cause, and a table of their findings.

`Causes.named` runs a command as users do, in its own process, and reads its JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 30.0
"""The limit of one command, and by default also from the beginning of the cause to its finding."""
_PAUSE_S = 0.5


@dataclass(frozen=True)
class Statement:
    """One problem of `describe`, or one check of `preflight` or `doctor` that is not ok."""

    kind: str
    """The problem's reason, or the check's name."""
    about: str
    """The object, or the site."""
    text: str

    def __str__(self) -> str:
        return f"{self.about}: {self.text}"


def statements(document: Any) -> Iterator[Statement]:
    """The findings of `describe`, `preflight` or `doctor`, from their `-o json`."""
    for part in document if isinstance(document, list) else [document]:
        for each in part.get("problems", ()):
            yield Statement(each["reason"], each["object"], each["message"])
        for each in part.get("checks", ()):
            if each["outcome"] != "ok":
                about = f"{each.get('site') or each.get('where')} {each['check']}"
                yield Statement(each["check"], about, each["observed"])


@dataclass(frozen=True)
class NamedCause:
    """A row of the table."""

    cause: str
    command: str
    command_s: float
    """The duration of the naming command."""
    after_s: float | None
    """From the beginning of the cause to the end of that command; None if it existed before."""
    kind: str
    """The reason of the problem, the name of the check, or the exit code's name."""
    sentence: str


@dataclass
class Causes:
    """The table."""

    rows: list[NamedCause] = field(default_factory=list)

    def named(
        self,
        cause: str,
        *words: str,
        kind: str,
        about: str,
        text: str,
        began_s: float | None = None,
        within_s: float = 0.0,
        wrapper: Sequence[str] = (),
    ) -> Statement:
        """Return the statement of that kind about that object with that text (patterns).

        Runs `dlion WORDS -o json`, behind `wrapper`, until it makes that statement, for at most
        `within_s`. That time starts at `began_s`, when the cause began (monotonic), else now. No
        command may take LIMIT_S.
        """
        command = [*wrapper, sys.executable, "-m", "dlion_cli", *words, "-o", "json"]
        end_s = (time.monotonic() if began_s is None else began_s) + within_s
        while True:
            asked_s = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            ended_s = time.monotonic()
            assert done.stdout.startswith(("{", "[")), done.stderr
            found = list(statements(json.loads(done.stdout)))
            for each in found:
                if (
                    re.fullmatch(kind, each.kind)
                    and re.search(about, each.about)
                    and re.search(text, each.text)
                ):
                    after_s = None if began_s is None else ended_s - began_s
                    self.add(
                        cause, f"dlion {words[0]}", ended_s - asked_s, after_s, each.kind, str(each)
                    )
                    return each
            assert ended_s < end_s, f"{cause} is not named:\n" + "\n".join(map(str, found))
            time.sleep(_PAUSE_S)

    def not_named(self, *words: str, kind: str) -> None:
        """Assert that nothing of that kind is stated before the cause exists."""
        command = [sys.executable, "-m", "dlion_cli", *words, "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout.startswith(("{", "[")), done.stderr
        assert kind not in {each.kind for each in statements(json.loads(done.stdout))}, done.stdout

    def add(
        self,
        cause: str,
        command: str,
        command_s: float,
        after_s: float | None,
        kind: str,
        sentence: str,
    ) -> None:
        """Add a row. Fails if the command exceeded its limit."""
        assert command_s <= LIMIT_S, f"{cause}: {command} took {command_s:.1f} s"
        self.rows.append(NamedCause(cause, command, command_s, after_s, kind, sentence))

    def table(self) -> str:
        """All rows as a table in Markdown."""
        lines = [
            "| cause | command | it took | after the cause began | reason or check | sentence |",
            "|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            after = "" if row.after_s is None else f"{row.after_s:.0f} s"
            cells = [row.cause, f"`{row.command}`", f"{row.command_s:.1f} s", after]
            cells += [f"`{row.kind}`", row.sentence.replace("|", "\\|")]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)
