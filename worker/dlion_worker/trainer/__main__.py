"""`python -m dlion_worker.trainer --config FILE`: one incarnation of one worker.

Started and restarted by the supervisor, which reads the exit code (`dlion_api.exit_codes`).
SIGTERM and SIGINT let the step under way finish, save a checkpoint and end in order.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import sys
from pathlib import Path

from dlion_api.errors import (
    ContractError,
    DataError,
    DivergedError,
    DLionError,
    ProgramError,
    SpecError,
    UnavailableError,
)
from dlion_api.exit_codes import ExitCode
from dlion_api.spec import Job, load_job
from dlion_api.worker_config import WorkerConfig
from dlion_worker.trainer.end_report import write_end_report
from dlion_worker.trainer.interruption import Interrupted, Signals
from dlion_worker.trainer.saving import ModelLostError
from dlion_worker.trainer.snapshot import storage_words
from dlion_worker.trainer.start_up import tell_imports
from dlion_worker.trainer.worker import Worker
from dlion_worker.training import threads

_LOG = logging.getLogger("dlion_worker.trainer")

_EXIT_CODES: tuple[tuple[type[DLionError], ExitCode], ...] = (
    (SpecError, ExitCode.SPEC),
    (DataError, ExitCode.DATA),
    (ProgramError, ExitCode.PROGRAM),
    (UnavailableError, ExitCode.UNAVAILABLE),
    (DivergedError, ExitCode.DIVERGED),
    (ModelLostError, ExitCode.MODEL_LOST),
    (ContractError, ExitCode.FAILED),
)
_STORAGE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES, errno.EPERM}
)


def main() -> int:
    """Runs one incarnation; its exit code."""
    parser = argparse.ArgumentParser(prog="dlion_worker.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the worker's configuration")
    parser.add_argument(
        "--end-report",
        type=Path,
        metavar="FILE",
        help="where to say how it ended in order; in a pod: the container's termination message",
    )
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    tell_imports()
    _let_steps_be()
    signals = Signals()
    try:
        config = WorkerConfig.load(arguments.config)
        job = load_job(config.job_document)
        return _train(config, job, signals, arguments.end_report)
    except Interrupted:
        return ExitCode.INTERRUPTED
    except DLionError as error:
        _LOG.error("%s", error)
        return exit_code_of(error)
    except OSError as error:
        if error.errno in _STORAGE:
            _LOG.error("%s", storage_words(error))
            return ExitCode.STORAGE
        _LOG.exception("%s", error)
        return ExitCode.FAILED


def _let_steps_be() -> None:
    """What arrives waits for the scheduler's next tick instead of interrupting a step: it then
    comes in larger pieces, and costs a tenth less (benchmarks/exchange_cost.py). Threads that are
    started later inherit it."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def exit_code_of(error: DLionError) -> ExitCode:
    """The documented exit code of one of our errors."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), ExitCode.FAILED)


def _train(config: WorkerConfig, job: Job, signals: Signals, report_path: Path | None) -> int:
    threads.configure(config.cpu_quota_cores)
    worker = Worker(config, job, signals)
    finished, reason = False, ""
    try:
        reason = worker.run()
        _LOG.info("run over: %s", reason)
        finished = signals.reason is None
    except ModelLostError:
        finished = True  # as far as its peers are concerned
        raise
    except Interrupted as interruption:
        reason = str(interruption)
        _LOG.info("stopped: %s", reason)
        finished = signals.reason is None
    finally:
        with signals.patiently():
            worker.close(finished=finished)
    if finished and report_path is not None:
        write_end_report(report_path, worker.end_report(reason))
    return ExitCode.OK if finished else ExitCode.INTERRUPTED


def _leave(code: int) -> None:
    """Ends this process at once: TensorFlow takes one to three seconds to take itself apart.

    Everything of ours has been closed; after an unexpected error Python's own way out is taken.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
