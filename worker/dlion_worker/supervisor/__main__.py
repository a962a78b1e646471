"""`python -m dlion_worker.supervisor --config FILE`: keep the trainer running.

Writes one JSON line per event to stderr. Exits with OK after an orderly end (TRAINING_ENDED), else
with the trainer's last exit code (`dlion_api.exit_codes`): 128 + n if signal n ended it,
INTERRUPTED if the supervisor had forwarded that signal, PROGRAM for 0.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dlion_api.errors import SpecError
from dlion_api.exit_codes import TRAINING_ENDED, ExitCode
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import load_job
from dlion_api.spec.failures import FailureRule
from dlion_worker.supervisor.output_copy import copied_output
from dlion_worker.supervisor.process import StartFunction, SupervisorProcess, spawn
from dlion_worker.supervisor.supervision import Supervision

LOCAL_GRACE_S = 4.0
"""Ctrl-C must end a local run within 5 s. In a pod: its grace period less a second."""


def main(arguments: Sequence[str] | None = None, *, start: StartFunction = spawn) -> int:
    """Supervise as the options say; return the exit code. `start` starts the trainer."""
    options = _parser().parse_args(arguments)
    try:
        max_restarts, rules, group = _restart_rules(options.config, options.max_restarts)
    except (SpecError, OSError, LookupError) as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.SPEC
    trainer = [sys.executable, "-P", "-m", "dlion_worker.trainer", "--config", options.config]
    if options.end_report:
        trainer += ["--end-report", options.end_report]
    command = options.command or trainer
    supervision = Supervision(
        max_restarts=max_restarts,
        grace_s=options.grace_s,
        ended_code=ExitCode.OK if options.command else TRAINING_ENDED,
        given_up_code=options.given_up_code,
        failure_rules=rules,
        group=group,
    )
    with copied_output(options.keep_output):
        return SupervisorProcess(command, supervision, start=start).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dlion_worker.supervisor", description=__doc__)
    parser.add_argument("--config", required=True, help="the worker's configuration file")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=LOCAL_GRACE_S,
        help="seconds from a forwarded SIGTERM or SIGINT to SIGKILL (default: %(default)s)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        help="replaces the manifest's spec.maxRestarts and spec.failureRules",
    )
    parser.add_argument(
        "--given-up-code",
        type=int,
        help="exit code after the last restart (default: the trainer's last exit code)",
    )
    parser.add_argument(
        "--end-report",
        metavar="FILE",
        help="file for the trainer's end report after an orderly end",
    )
    parser.add_argument(
        "--keep-output",
        type=Path,
        metavar="FILE",
        help="file for the end of the output of trainer and supervisor",
    )
    parser.add_argument(
        "--command",
        nargs=argparse.REMAINDER,
        help="must be last: a command to supervise instead of the trainer",
    )
    return parser


def _restart_rules(config_path: str, given: int | None) -> tuple[int, Sequence[FailureRule], str]:
    """The most restarts, the failure rules, and the worker's group, from its manifest.

    Raises: SpecError, OSError, LookupError: the manifest does not have the worker.
    """
    if given is not None:
        return given, (), ""
    config = WorkerConfig.load(config_path)
    job = load_job(config.job_document, source=config_path)
    return job.spec.max_restarts, job.spec.failure_rules, job.worker(config.rank).group


if __name__ == "__main__":
    sys.exit(main())
