"""Shell completion of what needs no cluster: environments, policies, fields of the manifest.

Each function has click's signature of `shell_complete`. A failure completes nothing. Every command
imports this module, so that it imports the manifest only to complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from dlion_api.errors import SpecError

if TYPE_CHECKING:
    from dlion_api.document import Explanation

Completions = list[str | CompletionItem]
_SPEC = "spec"


def complete_environments(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> Completions:
    """Names of published environments; else files."""
    from dlion_environments.loading import environment_names

    names: Completions = [name for name in environment_names() if name.startswith(begun)]
    return names or [CompletionItem(begun, type="file")]


def complete_policies(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> Completions:
    """Exchange policies; of a list with commas the last one."""
    before, comma, last = begun.rpartition(",")
    taken = set(before.split(","))
    return [f"{before}{comma}{n}" for n in _policies() if n.startswith(last) and n not in taken]


def complete_assignments(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> Completions:
    """Fields of the manifest for `--set PATH=`, with the values of a choice after `=`."""
    path, equals, value = begun.partition("=")
    if not equals:
        return _fields(path, is_setting=True)
    return [f"{path}={word}" for word in _values(path) if word.startswith(value)]


def _values(path: str) -> list[str]:
    """The values of a field that is a choice; empty for another."""
    from dlion_api import document
    from dlion_api.spec import Job

    full = path if path.startswith(f"{_SPEC}.") else f"{_SPEC}.{path}"
    if full == "spec.exchange.policy":
        return _policies()
    try:
        field = document.explain(Job, full)
    except SpecError:
        return []
    if field.type == "boolean":
        return ["true", "false"]
    return field.allowed.split(" | ") if " | " in field.allowed else []


def _policies() -> list[str]:
    from dlion_core.policies import catalogue

    return catalogue.names()


def complete_fields(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> Completions:
    """Fields of the manifest and of the status for `explain`."""
    return _fields(begun, is_setting=False)


def _fields(begun: str, *, is_setting: bool) -> Completions:
    """Fields one level below what was typed. A field with others below it ends in a dot."""
    parent, dot, last = begun.rpartition(".")
    return [
        _item(f"{parent}{dot}", child, is_setting=is_setting)
        for child in _children(parent)
        if child.name.startswith(last)
    ]


def _children(parent: str) -> tuple[Explanation, ...]:
    from dlion_api import document
    from dlion_api.spec import Job
    from dlion_api.status import Status

    first = parent.split(".", 1)[0]
    try:
        if first == "status":
            return document.explain(Status, parent.partition(".")[2]).children
        if first in ("spec", "metadata"):
            return document.explain(Job, parent).children
        return document.explain(Job, f"{_SPEC}.{parent}".rstrip(".")).children
    except SpecError:
        return ()


def _item(prefix: str, child: Explanation, *, is_setting: bool) -> CompletionItem:
    end = "." if child.children else "=" if is_setting else ""
    return CompletionItem(f"{prefix}{child.name}{end}", help=child.doc.split(". ")[0][:80])
