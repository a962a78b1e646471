"""A process of ours that answers one JSON line on its standard input with one on its output.

Used for the relay and the duty cycle. Its life hangs on the pipe: when whoever started it goes,
even by SIGKILL, it reads the end of the file and puts things in order. It has a session of its
own, so that Ctrl-C in the terminal reaches only the runner, which ends it when its time comes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

from dlion_api.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)
_END_TIMEOUT_S = 5.0


class LineProcess:
    """`python -m MODULE ARGUMENTS`, spoken to in lines. Safe to use from several threads."""

    def __init__(self, module: str, *arguments: str, errors_path: Path) -> None:
        """Start the process; what it writes to its standard error goes to `errors_path`."""
        self._module = module
        self._errors_path = errors_path
        self._lock = threading.Lock()
        with errors_path.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises: UnavailableError when the process has gone."""
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError) as error:
                raise self._gone() from error
            return self.read()

    def read(self) -> dict[str, Any]:
        """The next line it says. Raises: UnavailableError when the process has gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        return cast("dict[str, Any]", json.loads(line))

    def _gone(self) -> UnavailableError:
        # It has closed its pipes: what is left of its end takes no time worth mentioning.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        text = self._errors_path.read_text(encoding="utf-8", errors="replace").strip()
        return UnavailableError(
            f"{self._module} (process {self.pid}) has ended; the last it said: "
            f"{text[-2000:] or 'nothing'}"
        )

    def ended(self) -> bool:
        """Whether it has gone, though nobody closed it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process in order, and by force where it does not. Safe to call twice."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            log.debug("%s had ended before", self._module)
        try:
            self._process.wait(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("%s does not end: killing process %d", self._module, self.pid)
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
