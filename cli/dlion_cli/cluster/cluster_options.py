"""Options of all cluster commands, and shell completion of what clusters name."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from dlion_api.errors import DLionError
from dlion_cli.cluster.client import api_path, connect
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.connection_flags import (
    ONE_SERVER,
    complete_contexts,
    connection_flags,
    given_settings,
    given_so_far,
    pop_settings,
)
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.terminal.options import FiniteFloatRange

_COMPLETE_WITHIN_S: Final = 3.0


def cluster_options(
    command: Callable[..., Any], *, namespace: str | None = None
) -> Callable[..., Any]:
    """Add the options of a connection; the command receives `jobs`, a client of the namespace.

    Connects only when the command runs, so that `--help` needs no cluster. `namespace` is the
    default of `-n` if it is not the context's.
    """

    def connected(*, connect: Callable[[], JobClient], **others: Any) -> Any:
        return command(jobs=connect(), **others)

    functools.update_wrapper(connected, command)
    return connecting_options(connected, namespace=namespace)


def connecting_options(
    command: Callable[..., Any], *, namespace: str | None = None
) -> Callable[..., Any]:
    """As `cluster_options`; the command receives `connect`, which connects when it is called."""

    @functools.wraps(command)
    def connecting(**given: Any) -> Any:
        settings = pop_settings(given)
        with contextlib.ExitStack() as open_clients:

            def open_client() -> JobClient:
                jobs = JobClient(connect(settings))
                open_clients.callback(jobs.cluster.close)
                return jobs

            return command(connect=open_client, **given)

    return connection_flags(
        connecting, namespace=namespace, complete_namespaces=complete_namespaces
    )


def contexts_option(joined: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--contexts`, which calls `joined` instead of the command.

    `joined` receives the command's options, and `contexts` instead of `jobs`. Apply it above
    `cluster_options`.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            "--contexts", metavar="A,B,…", callback=context_names,
            shell_complete=complete_contexts,
            help="Query several contexts at once and combine the results.",
        )  # fmt: skip
        @functools.wraps(command)
        def chosen(*, contexts: tuple[str, ...], **given: Any) -> Any:
            if not contexts:
                return command(**given)
            if given["context"]:
                raise click.UsageError("--context and --contexts exclude each other")
            if of_one := [name for name in given_settings(given) if name in ONE_SERVER]:
                option = of_one[0].replace("_", "-")
                raise click.UsageError(f"--{option} is of one server: use it without --contexts")
            several = Contexts(contexts, pop_settings(given))
            with contextlib.closing(several):
                return joined(contexts=several, **given)

        return chosen

    return decorate


def context_names(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, ...]:
    """The distinct contexts of `--contexts`. Raises: BadParameter if there is none."""
    names = tuple(dict.fromkeys(filter(None, map(str.strip, (value or "").split(",")))))
    if value is not None and not names:
        raise click.BadParameter("names no context; separate several with commas")
    return names


def name_argument(**others: Any) -> Callable[..., Any]:
    """The argument NAME: a job of the cluster, with shell completion."""
    return click.argument("name", shell_complete=complete_names, **others)


def names_argument(*, required: bool) -> Callable[..., Any]:
    """The argument NAME…: jobs of the cluster, with shell completion."""
    metavar = "NAME…" if required else "[NAME…]"
    return click.argument(
        "names", nargs=-1, required=required, metavar=metavar, shell_complete=complete_names
    )


def complete_names(
    ctx: click.Context, _parameter: click.Parameter, begun: str
) -> list[str | CompletionItem]:
    """Job names with this prefix; none if the cluster does not respond soon."""
    try:
        items = _completing(ctx).list_jobs(timeout_s=_COMPLETE_WITHIN_S)["items"]
    except DLionError:
        return []
    return [name for item in items if (name := str(item["metadata"]["name"])).startswith(begun)]


def complete_namespaces(
    ctx: click.Context, _parameter: click.Parameter, begun: str
) -> list[str | CompletionItem]:
    """Namespaces with this prefix; none if the cluster does not list them soon."""
    try:
        path = api_path("api", "v1", "namespaces")
        answer = _completing(ctx).cluster.get(path, timeout_s=_COMPLETE_WITHIN_S)
    except DLionError:
        return []
    found = (mapping_of(each.get("metadata")) for each in mappings_in(answer.get("items")))
    return [name for each in found if (name := str(each.get("name", ""))).startswith(begun)]


def _completing(ctx: click.Context) -> JobClient:
    """The cluster of the command line so far. Raises: as `connect`."""
    return JobClient(connect(ConnectionSettings(**given_so_far(ctx))))


wait_timeout: Final = click.option(
    "--timeout", "timeout_s", type=FiniteFloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Stop waiting after this time (exit code 124); the job continues. Default: no limit.",
)  # fmt: skip
