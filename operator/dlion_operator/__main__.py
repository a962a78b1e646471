"""`python -m dlion_operator --config FILE`: the operator of one site."""

import os
import signal
import sys
from types import FrameType

from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.port_limits import prepare_process


def main() -> int:
    """Run the operator. Return its exit code."""
    # The imports below take seconds, and the kernel ignores an unhandled signal to process 1.
    # kopf handles SIGTERM later.
    signal.signal(signal.SIGTERM, _leave)
    # The containers start Python with SIGTERM blocked (`HOLDING_BACK_SIGTERM`), so that an earlier
    # signal is not lost.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    from dlion_operator.controller.process import main as run

    prepare_process()
    return run()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Exit at once: nothing has started that needs a shutdown, and an exception could be caught by
    code that is being imported."""
    os._exit(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
