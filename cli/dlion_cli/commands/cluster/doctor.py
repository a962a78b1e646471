"""`dlion doctor`: find what is wrong with this machine and, if there is one, with the cluster."""

import functools
import json
from collections.abc import Sequence
from typing import Any, Final

import click
from rich.text import Text

from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster.cluster_options import complete_namespaces
from dlion_cli.cluster.connection_flags import connection_flags, pop_settings
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.cluster.kubeconfig import is_configured
from dlion_cli.commands.cluster.get import output_console
from dlion_cli.commands.cluster.trust import OPERATOR_NAMESPACE
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.timed_checks import TimedCheck, run_checks
from dlion_cli.terminal import options
from dlion_cli.terminal.failures import install_advice
from dlion_cli.terminal.formatting import printable
from dlion_cli.terminal.plain_table import plain_table

_WORDS: Final = {
    CheckOutcome.OK: ("ok", "green"),
    CheckOutcome.WARN: ("warning", "yellow"),
    CheckOutcome.FAIL: ("failed", "bold red"),
    CheckOutcome.UNKNOWN: ("unknown", "dim"),
}
MAX_TIMEOUT_S: Final = 28.0
"""The whole command ends within 30 s."""
_MAX_RESPONSE_S: Final = 8.0


@click.command()
@click.option(
    "--operator-namespace", metavar="NAME", default=OPERATOR_NAMESPACE, show_default=True,
    help="Namespace of the operator.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s",
    type=options.FiniteFloatRange(min=0, min_open=True, max=MAX_TIMEOUT_S),
    metavar="SECONDS", default=MAX_TIMEOUT_S, show_default=True, help="Limit for all checks.",
)  # fmt: skip
@options.output
@functools.partial(
    connection_flags, complete_namespaces=complete_namespaces, of_namespace="Namespace of jobs"
)
def doctor(operator_namespace: str, timeout_s: float, output: str, **given: Any) -> int:
    """Check this machine, and the cluster if there is a kubeconfig or an option of a connection.

    Each line has the result, what was observed and what to do. The exit code is 69 if a check
    failed.

    \b
    dlion doctor -o json | jq '.checks[] | select(.outcome == "failed")'
    """
    from dlion_cli.preflight_checks.machine_checks import machine_checks
    from dlion_cli.preflight_checks.software_checks import software_checks

    connection = pop_settings(given)
    checks = [*software_checks(), *machine_checks()]
    if connection != ConnectionSettings() or is_configured():
        checks += _cluster_checks(connection, operator_namespace, timeout_s)
    results = run_checks(checks, timeout_s)
    _show(results, output)
    failed = any(check.outcome is CheckOutcome.FAIL for check in results)
    return ExitCode.UNAVAILABLE if failed else ExitCode.OK


def _cluster_checks(
    connection: ConnectionSettings, operator_namespace: str, timeout_s: float
) -> list[TimedCheck]:
    try:
        from dlion_cli.preflight_checks.cluster_health import ClusterAccess, ClusterHealth
    except ModuleNotFoundError as error:
        absent = f"the extra is not installed ({error})"
        missing = Check(
            "cluster", "kubeconfig", CheckOutcome.FAIL, absent, install_advice("cluster")
        )
        return [TimedCheck(missing.site, missing.name, lambda: missing)]
    access = ClusterAccess(
        connection=connection,
        operator_namespace=operator_namespace,
        within_s=min(timeout_s, _MAX_RESPONSE_S),
    )
    return ClusterHealth(access).checks()


def _show(checks: Sequence[Check], output: str) -> None:
    if output == "json":
        outcomes = {check.outcome for check in checks}
        worst = [each for each in (CheckOutcome.FAIL, CheckOutcome.WARN) if each in outcomes]
        document = {
            "outcome": _WORDS[worst[0] if worst else CheckOutcome.OK][0],
            "checks": [_json(check) for check in checks],
        }
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    table = plain_table("RESULT", "CHECK", folded="DETAIL")
    for check in checks:
        word, style = _WORDS[check.outcome]
        detail = Text(printable(check.observed))
        if check.advice and check.outcome is not CheckOutcome.OK:
            detail.append(f" → {printable(check.advice)}", style="bold")
        table.add_row(Text(word, style=style), check.name, detail)
    output_console().print(table)


def _json(check: Check) -> dict[str, Any]:
    return {
        "where": check.site,
        "check": check.name,
        "outcome": _WORDS[check.outcome][0],
        "observed": check.observed,
        "advice": check.advice,
        "figures": dict(check.figures),
    }
