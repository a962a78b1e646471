"""The operator of one site as a process, from its flags to its exit code.

A watch error that kopf cannot handle ends this process, which must then be restarted. `__main__`
imports this module late.
"""

import argparse
import asyncio
import logging
import os
import socket
from pathlib import Path

import kopf

from dlion_api.errors import DLionError, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_operator.controller.handlers import build_registry
from dlion_operator.controller.site_operator import SiteOperator
from dlion_operator.kubernetes.log_context import add_job_to_logs
from dlion_operator.model.settings import Settings, load_settings

_LOG = logging.getLogger("dlion_operator")

NAMESPACE_VARIABLE = "POD_NAMESPACE"
IDENTITY_VARIABLE = "DLION_OPERATOR_IDENTITY"
"""The operator's identity (`lease`): the pod's name, so that a restarted container continues at
once. Without it every process has its own."""


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal ends the process. Return the exit code."""
    options = _parser().parse_args(arguments)
    kopf.configure(
        debug=options.log_level == "DEBUG",
        quiet=options.log_level == "WARNING",
        log_format=kopf.LogFormat.JSON if options.log_format == "json" else kopf.LogFormat.FULL,
    )
    add_job_to_logs()
    if options.log_level != "DEBUG":
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # a line for every event
    if options.kubeconfig is not None:
        os.environ["KUBECONFIG"] = str(options.kubeconfig)
    try:
        settings = load_settings(options.config)
        asyncio.run(_run(settings, options))
    except SpecError as error:
        _LOG.error("%s", error)
        return ExitCode.SPEC
    except (DLionError, OSError) as error:
        _LOG.error("%s", error)
        return ExitCode.UNAVAILABLE
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dlion_operator", description="The operator of one site."
    )
    parser.add_argument("--config", type=Path, required=True, help="the site's settings (YAML)")
    parser.add_argument(
        "--kubeconfig", type=Path, help="a cluster to work with from outside (default: this pod's)"
    )
    parser.add_argument(
        "--namespace",
        default=os.environ.get(NAMESPACE_VARIABLE, "default"),
        help=f"the operator's own namespace (default: ${NAMESPACE_VARIABLE})",
    )
    parser.add_argument("--log-format", choices=["json", "text"], default="text")
    parser.add_argument("--log-level", choices=["DEBUG", "INFO", "WARNING"], default="INFO")
    return parser


async def _run(settings: Settings, options: argparse.Namespace) -> None:
    operator = SiteOperator(
        settings,
        namespace=options.namespace,
        identity=os.environ.get(IDENTITY_VARIABLE) or f"{socket.gethostname()}-{os.getpid()}",
        kubeconfig=options.kubeconfig,
    )
    try:
        await kopf.operator(
            registry=build_registry(operator),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=list(settings.namespaces),
        )
    except Exception:
        if operator.failure is None:
            raise
        raise operator.failure from None  # kopf's own error has less detail
