"""The process of the `dlion` command, from its first signal to its exit code.

Handles signals before it imports the commands, which takes a tenth of a second and more.
"""

import atexit
import gc
import os
import sys
from contextlib import suppress

from dlion_cli.terminal.interruption import exit_on_signals

GARBAGE_THRESHOLD = 100_000
"""New containers between two searches for garbage. Imports make nearly as many and no garbage:
with 20,000 the searches took a twelfth of the start of a cluster's command."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code (`dlion_api.exit_codes`).

    Without `arguments` it reads `sys.argv`, and the process ends with this code.
    """
    codes: list[int] = []
    gc.set_threshold(GARBAGE_THRESHOLD)
    if arguments is None:
        exit_on_signals()
        # For `dlion run` and its workers: gRPC prints a line when a server ends an idle connection.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        # Exit without interpreter shutdown: threads of gRPC and TensorFlow that still run would
        # abort the process. Registered first, so that it is called last.
        atexit.register(_exit_process, codes)
    from dlion_cli.command_line import run  # not earlier: signals would end it in silence

    codes.append(run(arguments))
    return codes[0]


def _exit_process(codes: list[int]) -> None:
    if not codes:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed pipe or stream
            stream.flush()
    os._exit(codes[0])


if __name__ == "__main__":
    sys.exit(main())
