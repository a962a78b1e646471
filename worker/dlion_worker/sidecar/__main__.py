"""`python -m dlion_worker.sidecar --config FILE`: the sidecar of one worker.

Turns errors into exit codes. Ends in order on SIGTERM and SIGINT.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dlion_api.errors import ContractError, Problem, SpecError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import Job, load_job
from dlion_worker.sidecar.process import SidecarProcess

_LOG = logging.getLogger("dlion_worker.sidecar")


def main(given: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit code."""
    arguments = _arguments(given)
    logging.basicConfig(
        level=arguments.log_level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        config = WorkerConfig.load(arguments.config)
        job = _job(config)
        asyncio.run(_serve(config, job, arguments))
    except (SpecError, ContractError) as error:
        _LOG.error("%s", error)
        return ExitCode.SPEC
    except (UnavailableError, OSError) as error:
        _LOG.error("%s", error)
        return ExitCode.UNAVAILABLE
    return ExitCode.OK


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dlion_worker.sidecar", description=__doc__)
    parser.add_argument("--config", required=True, help="the worker's configuration file")
    parser.add_argument(
        "--metrics-host", default=None, help="where metrics are served; default: listen_host"
    )
    parser.add_argument(
        "--metrics-port", type=int, default=0, help="0: any; the log names the one chosen"
    )
    parser.add_argument(
        "--trainer-output",
        type=Path,
        metavar="FILE",
        help="file of the trainer's output, whose end goes to the keeper",
    )
    parser.add_argument(
        "--machine-root",
        type=Path,
        metavar="DIR",
        default=os.environ.get("DLION_MACHINE_ROOT", "/"),
        help="folder with the machine's proc and sys; default: DLION_MACHINE_ROOT, else /",
    )
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING"])
    return parser.parse_args(given)


def _job(config: WorkerConfig) -> Job:
    job = load_job(config.job_document, source="job_document")
    try:
        job.worker(config.rank)
    except LookupError as error:
        problem = Problem("rank", f"is not a worker of the job: {error}")
        raise SpecError([problem], source="worker configuration") from error
    return job


async def _serve(config: WorkerConfig, job: Job, arguments: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stopped.set)
    # The process that started this one may have blocked them until a handler exists (`pod`).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    sidecar = SidecarProcess(
        config,
        job,
        metrics_host=arguments.metrics_host or config.listen_host,
        metrics_port=arguments.metrics_port,
        trainer_output=arguments.trainer_output,
        machine_root=arguments.machine_root,
    )
    await sidecar.run(stopped)


if __name__ == "__main__":
    sys.exit(main())
