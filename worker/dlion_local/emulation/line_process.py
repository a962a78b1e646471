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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dlion_api.errors import UnavailableError

log = logging.getLogger(__name__)
_END_TIMEOUT_S = 5.0


class LineProcess:
    """Runs `python -m MODULE` from `start` to `close` and exchanges lines with it. Thread-safe."""

    def __init__(
        self,
        module: str,
        work_dir: Path,
        *,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """Its standard error goes to a log in `work_dir`, named after the module.

        `environment` replaces that of this process.
        """
        self._module, self._arguments = module, arguments
        self._errors_path = work_dir / f"{module.rpartition('.')[2]}.log"
        self._environment = environment
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process."""
        self._errors_path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors_path.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise UnavailableError(f"{self._module} is not running: call start() first")
        return self._process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running.pid

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. Raises UnavailableError if the process has
        ended."""
        process = self._running
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            except (BrokenPipeError, ValueError) as error:
                raise self._gone(process) from error
            line = process.stdout.readline()
        if not line:
            raise self._gone(process)
        return cast("dict[str, Any]", json.loads(line))

    def _gone(self, process: subprocess.Popen[bytes]) -> UnavailableError:
        # It has closed its pipes, so it ends very soon.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        text = self._errors_path.read_text(encoding="utf-8", errors="replace").strip()
        return UnavailableError(
            f"{self._module} (process {process.pid}) has ended; its last output: "
            f"{text[-2000:] or 'nothing'}"
        )

    def failure(self) -> str:
        """That it has ended before `close`; empty if it has not."""
        if self._process is None or self._process.poll() is None:
            return ""
        log_name, name = self._errors_path.name, self._errors_path.stem.replace("_", " ")
        return f"the {name} process has ended: see {log_name} in the run's work folder"

    def kill(self) -> None:
        """Kill the process; `close` is still needed."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, by force after a time-out. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            log.debug("%s had ended before", self._module)
        try:
            process.wait(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("%s does not end: killing process %d", self._module, process.pid)
            process.kill()
            process.wait()
        process.stdout.close()
