"""kubectl's options that choose an API server, before and after the command.

Their completion reads the kubeconfig and sends no request, except for namespaces.
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Final

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from dlion_api.errors import DLionError
from dlion_cli.cluster.connection_settings import (
    MAX_TIMEOUT_S,
    ConnectionSettings,
    header_value,
    server_url,
)

Completions = list[str | CompletionItem]
Completer = Callable[[click.Context, click.Parameter, str], Completions]
ONE_SERVER: Final = frozenset(
    {"cluster", "server", "token", "certificate_authority", "tls_server_name"}
)
"""Settings of one server, which several contexts cannot share."""
_NAMES: Final = tuple(each.name for each in fields(ConnectionSettings))
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)"
_SHORT_NAMES: Final = {"impersonated_user": "--as", "impersonated_groups": "--as-group"}


class DurationType(click.ParamType[float]):
    """A duration as kubectl takes it, in seconds: `90s`, `1m30s`, or a whole number."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds. Raises: BadParameter."""
        if isinstance(value, float):
            return value
        text = str(value)
        if re.fullmatch(r"\d{1,9}", text):
            seconds = float(text)
        elif re.fullmatch(f"(?:{_PART})+", text):
            seconds = sum(float(n) * _UNITS_S[unit] for n, unit in re.findall(_PART, text))
        else:
            self.fail(f"{text!r} is not a duration: write 30s, 1m30s or 0 (no limit)", param, ctx)
        if seconds > MAX_TIMEOUT_S:
            self.fail(f"{text!r} is longer than 24h: 0 means no limit", param, ctx)
        return seconds


class ServerUrlType(click.ParamType[str]):
    """The URL of an API server, without credentials."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As `server_url`. Raises: BadParameter, which prints no password."""
        try:
            return server_url(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _header_value(
    _context: click.Context, parameter: click.Parameter, value: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """The value or values. Raises: BadParameter, without the value, which may be a token."""
    try:
        for each in (value,) if isinstance(value, str) else value or ():
            header_value(each)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from None
    return value


def connection_flags(
    command: Callable[..., Any],
    *,
    namespace: str | None = None,
    of_namespace: str = "Namespace",
    without: Collection[str] = (),
    complete_namespaces: Completer | None = None,
    hidden: bool = False,
) -> Callable[..., Any]:
    """Add the options, except those of the settings `without`.

    The command receives each as an argument; `pop_settings` takes them. `namespace`: the default
    of `-n` if it is not the context's. `of_namespace`: what its help calls it.
    """
    usual = namespace or "the context's"
    of_default = f"{of_namespace}. Default: {usual}."
    options = {
        **_entry_options(namespace, of_default, complete_namespaces, hidden=hidden),
        **_server_options(hidden=hidden),
    }
    for name, option in reversed(options.items()):  # click lists the last one first
        command = command if name in without else option(command)
    return command


_Options = dict[str, Callable[..., Any]]
"""Decorators by the name of the setting."""


def _entry_options(
    namespace: str | None, of_namespace: str, complete_namespaces: Completer | None, *, hidden: bool
) -> _Options:
    """The options that choose entries of the kubeconfig."""
    return {
        "namespace": click.option(
            "-n", "--namespace", metavar="NAME", default=namespace, hidden=hidden,
            help=of_namespace, shell_complete=complete_namespaces,
        ),
        "context": click.option(
            "--context", metavar="NAME", hidden=hidden, shell_complete=complete_contexts,
            help="Context. Default: the current context.",
        ),
        "kubeconfig": click.option(
            "--kubeconfig", metavar="FILE", hidden=hidden,
            help="Default: $KUBECONFIG, ~/.kube/config, or the pod's service account.",
        ),
        "cluster": click.option(
            "--cluster", metavar="NAME", hidden=hidden,
            shell_complete=functools.partial(_complete_entries, "clusters"),
            help="Cluster of the kubeconfig.",
        ),
        "user": click.option(
            "--user", metavar="NAME", hidden=hidden,
            shell_complete=functools.partial(_complete_entries, "users"),
            help="User of the kubeconfig.",
        ),
    }  # fmt: skip


def _server_options(*, hidden: bool) -> _Options:
    """The options that replace the kubeconfig's server, credentials and user."""
    return {
        "server": click.option(
            "-s", "--server", metavar="URL", type=ServerUrlType(), hidden=hidden,
            help="API server, not the kubeconfig's.",
        ),
        "token": click.option(
            "--token", metavar="TOKEN", callback=_header_value, hidden=hidden,
            help="Bearer token, not the user's credentials.",
        ),
        "certificate_authority": click.option(
            "--certificate-authority", metavar="FILE", hidden=hidden,
            type=click.Path(exists=True, dir_okay=False),
            help="Authority of the server's certificate (PEM).",
        ),
        "insecure_skip_tls_verify": click.option(
            "--insecure-skip-tls-verify", is_flag=True, hidden=hidden,
            help="Do not verify the server's certificate.",
        ),
        "tls_server_name": click.option(
            "--tls-server-name", metavar="NAME", callback=_header_value, hidden=hidden,
            help="Name in the server's certificate.",
        ),
        "request_timeout_s": click.option(
            "--request-timeout", "request_timeout_s", metavar="DURATION", type=DurationType(),
            hidden=hidden,
            help="Longest silence of the server, e.g. 30s; 0: no limit.",
        ),
        "impersonated_user": click.option(
            "--as", "impersonated_user", metavar="USER", callback=_header_value, hidden=hidden,
            help="Act as this user (impersonation).",
        ),
        "impersonated_groups": click.option(
            "--as-group", "impersonated_groups", metavar="GROUP", multiple=True, hidden=hidden,
            callback=_header_value, help="Act as in this group, with --as. Repeatable.",
        ),
    }  # fmt: skip


def pop_settings(given: dict[str, Any]) -> ConnectionSettings:
    """Take the settings out of a command's arguments.

    Raises: UsageError for options that contradict each other.
    """
    settings = ConnectionSettings(**{name: given.pop(name) for name in _NAMES if name in given})
    try:
        settings.check(_option)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return settings


def _option(setting: str) -> str:
    return _SHORT_NAMES.get(setting) or f"--{setting.replace('_', '-')}"


def given_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are settings and that the user gave."""
    present = {name: given[name] for name in _NAMES if name in given}
    return {
        name: value
        for name, value in present.items()
        if value not in (None, "", ()) and value is not False
    }


def given_options(context: click.Context) -> list[str]:
    """The options of a connection that the user gave the command, as they are written."""
    return [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name in given_settings(context.params)
        and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
    ]


class ConnectionGroup(click.Group):
    """A group whose subcommands receive the options before it as their defaults."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The subcommand. Raises: UsageError for an option before it that it does not have."""
        name, command, others = super().resolve_command(ctx, args)
        known = {} if command is None else {each.name for each in command.params}
        given = (ctx.default_map or {}).get(name or "", {})
        for each in ctx.find_root().command.params:
            if each.name in given and each.name not in known:
                path = f"{self.name} {name}"
                raise click.UsageError(f"{path} does not use {each.opts[-1]}: remove it")
        return name, command, others


def selects_cluster() -> bool:
    """Whether an option of the running command selects a cluster or a connection."""
    return bool(given_settings(click.get_current_context().params))


def given_so_far(context: click.Context) -> dict[str, Any]:
    """The settings before and after the command and its groups, to complete others."""
    before = {} if context.parent is None else given_so_far(context.parent)
    return {**before, **given_settings(context.params)}


def complete_contexts(
    context: click.Context, parameter: click.Parameter, begun: str
) -> Completions:
    """Contexts of the kubeconfig; of a list with commas the last one."""
    before, comma, last = begun.rpartition(",")
    taken = set(before.split(","))
    names = _complete_entries("contexts", context, parameter, last)
    return [f"{before}{comma}{name}" for name in names if name not in taken]


def _complete_entries(
    kind: str, context: click.Context, _parameter: click.Parameter, begun: str
) -> Completions:
    """Names of the kubeconfig's `contexts`, `clusters` or `users`."""
    from dlion_cli.cluster.kubeconfig import entry_names

    try:
        names = entry_names(kind, given_so_far(context).get("kubeconfig"))
    except DLionError:
        return []
    return [name for name in names if name.startswith(begun)]
