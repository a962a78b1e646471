"""A child process that answers each JSON line on its standard input with one on its output.

Used for the relay, the duty cycle and the fork server. The child cleans up at the end of its input,
so also when its parent is killed. It has its own session, so that Ctrl-C in the terminal reaches
only the runner.
"""

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
        self._caller = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dlion-lines")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._errors_path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors_path.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, *self._arguments],
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
        return self._running.pid

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. Raises UnavailableError if the process has
        ended."""
        # In a thread that Ctrl-C cannot interrupt between the request and its answer: the next
        # request would be given this answer.
        return self._caller.submit(self._exchange, self._running, request).result()

    def _exchange(
        self, process: subprocess.Popen[bytes], request: dict[str, Any]
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError) as error:
            raise self._gone(process) from error
        if not line.endswith(b"\n"):  # nothing, or the beginning of an answer
            raise self._gone(process)
        return cast("dict[str, Any]", json.loads(line))

    def _gone(self, process: subprocess.Popen[bytes]) -> UnavailableError:
        # It has closed its pipes, so it ends very soon.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        name = f"{self._module} (process {process.pid})"
        return UnavailableError(f"{name} has ended{self._how(process)}")

    def _how(self, process: subprocess.Popen[bytes]) -> str:
        """How it ended, as the rest of a sentence."""
        code = process.returncode
        by = "" if code is None else f" with {code}"
        if code is not None and code < 0:
            by = f" by signal {-code}"  # a real-time one has no name
        text = ""
        with contextlib.suppress(OSError):  # the folder may be gone
            text = self._errors_path.read_text(encoding="utf-8", errors="replace").strip()
        return f"{by}; its last output: {text[-2000:] or 'nothing'}"

    def failure(self) -> str:
        """The failure, with the last output, if it ended before `close`; empty if it did not."""
        if self._process is None or self._process.poll() is None:
            return ""
        name = self._errors_path.stem.replace("_", " ")
        return f"the {name} process has ended{self._how(self._process)}"

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
        self._caller.shutdown()
        process.stdout.close()
