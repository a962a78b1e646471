"""Options that every command against a cluster has, and the names that the shell completes.

The decorator hands the command a function that connects, so that `--help` needs no cluster.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Final

import click

from dlion_api.errors import DLionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    from dlion_cli.cluster_jobs import Jobs

_COMPLETE_WITHIN_S: Final = 3.0


def cluster_options(
    command: Callable[..., Any], *, namespace: str | None = None
) -> Callable[..., Any]:
    """Adds `--kubeconfig`, `--context` and `-n`; the command gets `jobs`, its namespace's jobs.

    `namespace` is the default of `-n` where that is not the context's.
    """
    usual = namespace or "the context's"

    @click.option(
        "-n", "--namespace", metavar="NAME", default=namespace,
        help=f"Default: {usual}.",
    )  # fmt: skip
    @click.option("--context", metavar="NAME", help="Default: the kubeconfig's current one.")
    @click.option(
        "--kubeconfig", metavar="FILE", help="Default: $KUBECONFIG, ~/.kube/config, or the pod's."
    )
    @functools.wraps(command)
    def connected(
        *,
        kubeconfig: str | None,
        context: str | None,
        namespace: str | None,
        **others: Any,
    ) -> Any:
        jobs = _connected(kubeconfig, context, namespace)
        try:
            return command(jobs=jobs, **others)
        finally:
            jobs.cluster.close()

    return connected


def contexts_option(joined: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--contexts` above `cluster_options`: with it `joined` is called instead of the command.

    It gets the command's own options, and `contexts` for `jobs`.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            "--contexts", metavar="A,B,…", callback=context_names,
            help="Ask several contexts at once and join what they say.",
        )  # fmt: skip
        @functools.wraps(command)
        def chosen(*, contexts: tuple[str, ...], **given: Any) -> Any:
            if not contexts:
                return command(**given)
            from dlion_cli.contexts import Contexts

            if given.pop("context"):
                raise click.UsageError("--context and --contexts exclude each other")
            several = Contexts(
                contexts, kubeconfig=given.pop("kubeconfig"), namespace=given.pop("namespace")
            )
            with contextlib.closing(several):
                return joined(contexts=several, **given)

        return chosen

    return decorate


def context_names(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, ...]:
    """The contexts of `--contexts`, each once. Raises: BadParameter where it names none."""
    names = tuple(dict.fromkeys(filter(None, map(str.strip, (value or "").split(",")))))
    if value is not None and not names:
        raise click.BadParameter("names no context; write it as a,b,c")
    return names


def name_argument(**others: Any) -> Callable[..., Any]:
    """The argument NAME: a job of the cluster, completed by the shell."""
    return click.argument("name", shell_complete=complete_names, **others)


def complete_names(
    ctx: click.Context, _parameter: click.Parameter, begun: str
) -> list[str | CompletionItem]:
    """Names of jobs that begin so; none where the cluster does not answer soon."""
    given = ctx.params
    try:
        jobs = _connected(given.get("kubeconfig"), given.get("context"), given.get("namespace"))
        items = jobs.listed(timeout_s=_COMPLETE_WITHIN_S)["items"]
    except DLionError:
        return []
    return [name for item in items if (name := str(item["metadata"]["name"])).startswith(begun)]


def _connected(kubeconfig: str | None, context: str | None, namespace: str | None) -> Jobs:
    from dlion_cli.cluster import connect
    from dlion_cli.cluster_jobs import Jobs

    return Jobs(connect(kubeconfig=kubeconfig, context=context, namespace=namespace))


wait_timeout: Final = click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Give up waiting after this time (exit code 124); the job goes on. Default: never.",
)  # fmt: skip
