"""Processes beside each other: what each said when it failed, and an end to all of them together.

Called by `comparing` from a thread for each. Knows nothing of what they do.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import Final

from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode
from dlion_cli.failures import EndedError

_SAID: Final = "dlion: "
_MOST_SAID: Final = 2000


class Processes:
    """What runs just now. For use by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._given_up = False

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Exit code and standard error of a command, once it has ended.

        Raises: DLionError where all has been given up.
        """
        with self._lock:
            if self._given_up:
                raise DLionError("given up")
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            self._children.add(child)
        try:
            _, said = child.communicate()
        finally:
            with self._lock:
                self._children.discard(child)
        return child.returncode, said.decode(errors="replace").strip()

    def give_up(self) -> None:
        """Ends what is running; nothing new begins."""
        with self._lock:
            self._given_up = True
            children = list(self._children)
        for child in children:
            child.terminate()


def failure(what: str, code: int, said: str) -> EndedError:
    """Why a process of ours failed, in its own words and with its own exit code."""
    if code < 0:
        words = (
            f"the run was ended by {signal.Signals(-code).name}. Where memory is short, give a"
            " smaller --jobs; the same command goes on where it was"
        )
        return EndedError(f"{what}: {words}", ExitCode.UNAVAILABLE)
    known = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED
    words = said[-_MOST_SAID:] if known is ExitCode.FAILED else last_words(said)
    return EndedError(f"{what}: {words}", known)


def last_words(said: str) -> str:
    """Of what a `dlion` command wrote to standard error, the message that it ended with.

    >>> last_words("a warning\\n0:01 elapsed\\ndlion: job.yaml: 1 problem:\\n  spec: is wrong")
    'job.yaml: 1 problem:\\n  spec: is wrong'
    """
    _, mark, words = f"\n{said}".rpartition(f"\n{_SAID}")
    return words if mark else said[-_MOST_SAID:]
