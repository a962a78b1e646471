"""`python -m dlion_worker.pod ROLE`: PID 1 of a container.

`exec` replaces it by the trainer's supervisor or the sidecar, so signals reach them directly.
Keeper and initializers run in it.
SIGTERM stays blocked until the new process handles it, because the kernel discards signals that PID
1 does not handle. Containers start with it blocked (`HOLDING_BACK_SIGTERM`); otherwise this process
blocks it.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dlion_api import cluster_names as names
from dlion_api.errors import ContractError, DataError, SpecError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.port_limits import prepare_process
from dlion_worker.pod.pod_environment import Pod, under_root

_LOG = logging.getLogger("dlion_worker.pod")

TERMINATION_MESSAGE = "/dev/termination-log"
"""Kubernetes' default. The kubelet creates the file and keeps its content."""
_INITIALIZERS = (names.DATASET_INITIALIZER, names.MODEL_INITIALIZER)
GRACE_S = 29.0
"""The pod's terminationGracePeriodSeconds (30) less a second: the supervisor must end the trainer
before the kubelet kills both."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code, if no other program was executed."""
    prepare_process()
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        pod = Pod.read(options.root, os.environ)
        if options.role in _INITIALIZERS:
            return _initialize(pod, options)
        host = options.listen_host or pod.wildcard_host()
        if options.role == "keeper":
            return _keep(pod, host)
        command = _trainer(pod, host, options) if options.role == "trainer" else _sidecar(pod, host)
    except ContractError as error:
        _LOG.error("%s", error)
        return ExitCode.SPEC
    except (SpecError, UnavailableError, DataError) as error:
        _LOG.error("%s", error)
        return error.exit_code
    except OSError as error:
        _LOG.error("%s", error)
        return ExitCode.STORAGE
    return os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - no shell


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dlion_worker.pod", description=__doc__)
    parser.add_argument("role", choices=["trainer", "sidecar", "keeper", *_INITIALIZERS])
    parser.add_argument(
        "--root", type=Path, default=Path("/"), help="root of the pod's mounts (default: /)"
    )
    parser.add_argument(
        "--listen-host",
        default="",
        help="address to listen on (default: all of the pod IP's family)",
    )
    parser.add_argument(
        "--grace-s",
        type=float,
        default=GRACE_S,
        help="trainer: seconds from SIGTERM to SIGKILL (default: %(default)s)",
    )
    parser.add_argument(
        "--end-report",
        default=TERMINATION_MESSAGE,
        metavar="PATH",
        help="trainer, initializers: the container's terminationMessagePath (default: %(default)s)",
    )
    return parser


def _trainer(pod: Pod, host: str, options: argparse.Namespace) -> list[str]:
    """The command line of the supervisor, which starts and restarts the trainer."""
    state_dir = under_root(pod.root, names.STATE_DIR) / "worker"
    state_dir.mkdir(parents=True, exist_ok=True)
    config = pod.worker_config(listen_host=host, state_dir=state_dir)
    Path(config.results_dir).mkdir(parents=True, exist_ok=True)
    path = under_root(pod.root, names.SHARED_DIR) / "trainer.json"
    config.save(path)
    _LOG.info("worker %s of %s, rank %d", pod.worker().name, pod.job.key, config.rank)
    flags = ["--config", str(path), "--grace-s", str(options.grace_s)]
    # Kubernetes must not start another pod: it would count restarts from zero.
    flags += ["--given-up-code", str(ExitCode.RESTARTS.value)]
    flags += ["--end-report", str(under_root(pod.root, options.end_report))]
    flags += ["--keep-output", str(_output_path(pod))]
    return ["-m", "dlion_worker.supervisor", *flags]


def _sidecar(pod: Pod, host: str) -> list[str]:
    shared = under_root(pod.root, names.SHARED_DIR)
    state_dir = shared / "sidecar"  # the trainer's folder may not be mounted
    state_dir.mkdir(parents=True, exist_ok=True)
    path = shared / "sidecar.json"
    pod.worker_config(listen_host=host, state_dir=state_dir).save(path)
    flags = ["--config", str(path), "--metrics-port", str(names.METRICS_PORT)]
    flags += ["--trainer-output", str(_output_path(pod))]
    return ["-m", "dlion_worker.sidecar", *flags]


def _output_path(pod: Pod) -> Path:
    """The end of the trainer's output, which its supervisor writes and the sidecar uploads."""
    return under_root(pod.root, names.SHARED_DIR) / "output" / "trainer.log"


def _initialize(pod: Pod, options: argparse.Namespace) -> int:
    """Get a download in this process."""
    from dlion_worker.initializers.pod_process import initialize

    initialize(pod, options.role, under_root(pod.root, options.end_report))
    return ExitCode.OK


def _keep(pod: Pod, host: str) -> int:
    """Run the keeper in this process; its imports are local, because the others do not need
    them."""
    from dlion_worker.artifact_server.config import KeeperConfig
    from dlion_worker.artifact_server.process import run

    config = KeeperConfig(
        job=pod.job,
        site=pod.site,
        state_dir=under_root(pod.root, names.STATE_DIR),
        coordinator_address=pod.config.coordinator_address,
        authority_pem_path=pod.authority_path(),
        token_path=str(pod.token_path()),
        proof_dir=under_root(pod.root, names.SHARED_DIR),
        listen_host=host,
        port=names.KEEPER_PORT,
        job_uid=pod.job_uid,
    )
    run(config)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
