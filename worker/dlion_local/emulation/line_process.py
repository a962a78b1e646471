"""A child process that answers each JSON line on its standard input with one on its output.

Used for the relay and the duty cycle. The child cleans up at the end of its input, so also when its
parent is killed. It has its own session, so that Ctrl-C in the terminal reaches only the runner.
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
    """Runs `python -m MODULE ARGUMENTS` and exchanges lines with it. Thread-safe."""

    def __init__(self, module: str, *arguments: str, errors_path: Path) -> None:
        """Start the process; its standard error goes to `errors_path`."""
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

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. Raises UnavailableError if the process has
        ended."""
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError) as error:
                raise self._gone() from error
            return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next line. Raises UnavailableError if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        return cast("dict[str, Any]", json.loads(line))

    def _gone(self) -> UnavailableError:
        # It has closed its pipes, so it ends very soon.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        text = self._errors_path.read_text(encoding="utf-8", errors="replace").strip()
        return UnavailableError(
            f"{self._module} (process {self.pid}) has ended; its last output: "
            f"{text[-2000:] or 'nothing'}"
        )

    def ended(self) -> bool:
        """Whether it has ended before `close`."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process, by force after a time-out. May be called twice."""
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
