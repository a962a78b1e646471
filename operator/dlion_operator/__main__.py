"""`python -m dlion_operator --config FILE`: the operator of one site.

Takes SIGTERM from the first on: what an operator is made of takes seconds to import, and the kernel
drops a signal to process 1 that nobody handles. kopf handles it later. Its containers start it with
SIGTERM held back (`HOLDING_BACK_SIGTERM`), so that one that comes before Python runs is not lost.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from dlion_api.exit_codes import ExitCode


def main() -> int:
    """The exit code."""
    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    from dlion_operator.process import main as run

    return run()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """At once: nothing has begun that would have to be put in order, and an import that is broken
    off by an exception may take it for its own."""
    os._exit(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
