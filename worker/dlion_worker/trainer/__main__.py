"""`python -m dlion_worker.trainer --config FILE`: one incarnation of one worker.

The supervisor starts it and reads its exit code (`dlion_api.exit_codes`). On SIGTERM or SIGINT it
finishes the current step, saves a checkpoint and exits.
"""

import argparse
import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dlion_api.errors import DLionError, ProgramError
from dlion_api.exit_codes import STORAGE_ERRNOS, TRAINING_ENDED, ExitCode
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import Job, load_job
from dlion_worker.program_traceback import program_traceback
from dlion_worker.trainer.end_report import write_end_report
from dlion_worker.trainer.process_times import log_import_time
from dlion_worker.trainer.saving import ModelLostError
from dlion_worker.trainer.signal_handler import Interrupted, SignalHandler
from dlion_worker.trainer.worker import Worker
from dlion_worker.training import threads
from dlion_worker.training.snapshot import storage_error_message

_LOG = logging.getLogger("dlion_worker.trainer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one incarnation and return its exit code; TRAINING_ENDED after an orderly end."""
    parser = argparse.ArgumentParser(prog="dlion_worker.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the worker's configuration")
    parser.add_argument(
        "--end-report",
        type=Path,
        metavar="FILE",
        help="file for the end report after an orderly end; in a pod: the termination message",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    faulthandler.enable()  # a signal's log names the Python line
    log_import_time()
    _use_batch_scheduling()
    signals = SignalHandler()
    try:
        config = WorkerConfig.load(options.config)
        job = load_job(config.job_document)
        return _train(config, job, signals, options.end_report)
    except Interrupted:
        return ExitCode.INTERRUPTED
    except DLionError as error:
        if isinstance(error, ProgramError) and error.__cause__ is not None:
            # A separate record, as the runner reports the whole text of the last error.
            _LOG.warning("traceback of the program\n%s", program_traceback(error.__cause__))
        _LOG.error("%s", error)
        return error.exit_code
    except SystemExit as error:
        _LOG.warning("traceback of the program\n%s", program_traceback(error))
        _LOG.error(
            "the program called sys.exit(%s): remove the call; a program returns, or raises an "
            "error",
            "" if error.code is None else repr(error.code),
        )
        return ExitCode.PROGRAM
    except OSError as error:
        if error.errno in STORAGE_ERRNOS:
            _LOG.error("%s", storage_error_message(error))
            return ExitCode.STORAGE
        _LOG.exception("%s", error)
        return ExitCode.FAILED


def _use_batch_scheduling() -> None:
    """Use batch scheduling, so that arriving data does not preempt a step.

    Data is then handled in larger pieces and costs a tenth less CPU (benchmarks/exchange_cost.py).
    Threads started later inherit the policy.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _train(config: WorkerConfig, job: Job, signals: SignalHandler, report_path: Path | None) -> int:
    threads.configure(config.cpu_quota_cores)
    worker = Worker(config, job, signals)
    finished, reason = False, ""
    try:
        reason = worker.run()
        _LOG.info("run over: %s", reason)
        finished = signals.reason is None
    except ModelLostError:
        finished = True  # peers need nothing more from this worker
        raise
    except Interrupted as interruption:
        reason = str(interruption)
        _LOG.info("stopped: %s", reason)
        finished = signals.reason is None
    finally:
        with signals.deferred():
            worker.close(finished=finished)
    if finished and report_path is not None:
        write_end_report(report_path, worker.end_report(reason))
    return TRAINING_ENDED if finished else ExitCode.INTERRUPTED


def _exit_now(code: int) -> None:
    """Exit without interpreter teardown, which takes TensorFlow one to three seconds.

    All resources are closed by then. After an unexpected error Python exits normally instead.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit_now(main())
