"""`dlion explain`: what a field of the manifest means, may be, and is when left out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dlion_api import document
from dlion_api.errors import DLionError, SpecError
from dlion_api.names import API_VERSION, KIND
from dlion_api.spec import Job
from dlion_api.status import Status
from dlion_worker.policies import catalogue

if TYPE_CHECKING:
    from dlion_api.document import Explanation

ROOTS = ("apiVersion", "kind", "metadata", "spec")
STATUS = "status"
POLICY, PARAMETERS = "spec.exchange.policy", "spec.exchange.parameters"


@click.command()
@click.argument("field", default="", metavar="[FIELD]")
@click.option("--recursive", is_flag=True, help="Everything below the field, as a tree.")
@click.option("--policy", metavar="NAME", help="What exchange.parameters holds for that policy.")
def explain(field: str, recursive: bool, policy: str | None) -> None:
    """Say what FIELD of the manifest means: `dlion explain spec.trainer.stop`.

    `spec.` may be left out, and so may the FIELD: the whole manifest. `dlion explain status` says
    what a cluster tells of a job, `dlion explain exchange.parameters --policy ako` what that
    policy can be given, and `exchange.parameters.partitions --policy ako` one of these.
    """
    found = _find(field, policy)
    if policy is not None and found.path != PARAMETERS and not _below_parameters(found.path):
        raise click.UsageError("--policy goes with exchange.parameters alone")
    click.echo(f"KIND:    {KIND} ({API_VERSION})")
    if found.path:
        click.echo(f"FIELD:   {found.path} <{found.type}>{_facts(found)}")
    click.echo(f"\n{_paragraph(found.doc)}")
    for rule in found.rules:
        click.echo(_paragraph(f"Rule: {rule}."))
    if found.path == POLICY:
        _policies()
    if found.path == PARAMETERS:
        _parameters(policy)
    if found.children:
        click.echo("\nFIELDS:")
        _fields(found.children, depth=1, recursive=recursive)


def _policies() -> None:
    click.echo("\nPOLICIES:")
    for name in catalogue.names():
        try:
            summary = catalogue.find(name).summary
        except DLionError as error:
            summary = _unreadable(error)
        click.echo(f"  {name}\n{_paragraph(summary, '    ')}\n")


def _parameters(policy: str | None) -> None:
    if policy is not None:
        children = _parameters_of(policy).children
        click.echo(f"\nPARAMETERS OF {policy}:" + ("" if children else " none"))
        _fields(children, depth=1, recursive=False)
        return
    click.echo("\nPARAMETERS (say --policy NAME for what they mean):")
    for name in catalogue.names():
        try:
            words = ", ".join(child.name for child in _parameters_of(name).children) or "none"
        except DLionError as error:
            words = _unreadable(error)
        click.echo(f"  {name}: {words}")


def _parameters_of(policy: str, below: str = "") -> Explanation:
    parameters = catalogue.find(policy).parameters
    with catalogue.border(policy, "declaring its parameters"):
        return document.explain(parameters, below)


def _unreadable(error: DLionError) -> str:
    """What stands for an installed package's policy, so that the others are explained."""
    return f"cannot be read: {' '.join(str(error).split())}"


def _below_parameters(path: str) -> bool:
    return path.startswith(f"{PARAMETERS}.")


def _find(field: str, policy: str | None) -> Explanation:
    first = field.split(".", 1)[0].split("[", 1)[0]
    path = field if first in ROOTS else f"spec.{field}"
    if policy is not None and (path == PARAMETERS or _below_parameters(path)):
        catalogue.find(policy)  # said before anything else where there is none
    if _below_parameters(path):
        return _find_parameter(path.removeprefix(f"{PARAMETERS}."), policy)
    try:
        if first == STATUS:
            told = document.explain(Status, field.partition(".")[2])
            return replace(told, path=f"{STATUS}.{told.path}".rstrip("."), required=False)
        return document.explain(Job, path if field else "")
    except SpecError as error:
        raise SpecError(error.problems, source="explain") from None


def _find_parameter(name: str, policy: str | None) -> Explanation:
    """A field of what that policy can be given."""
    if policy is None:
        raise click.UsageError(f"{PARAMETERS}.{name} is each policy's own: give --policy NAME")
    try:
        found = _parameters_of(policy, name)
    except SpecError as error:
        problems = [replace(one, path=f"{PARAMETERS}.{one.path}") for one in error.problems]
        raise SpecError(problems, source=f"explain --policy {policy}") from None
    return replace(found, path=f"{PARAMETERS}.{found.path}")


def _fields(children: tuple[Explanation, ...], *, depth: int, recursive: bool) -> None:
    indent = "  " * depth
    for child in children:
        click.echo(f"{indent}{child.name} <{child.type}>{_facts(child)}")
        if not recursive:
            click.echo(_paragraph(child.doc, indent + "  ") + "\n")
        else:
            _fields(child.children, depth=depth + 1, recursive=True)


def _facts(field: Explanation) -> str:
    said = ["required"] if field.required else []
    if field.default is not None and not isinstance(field.default, dict):
        said.append(f"default {_shown(field.default)}")
    if field.allowed:
        said.append(field.allowed)
    return f" ({'; '.join(said)})" if said else ""


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _paragraph(text: str, indent: str = "") -> str:
    return click.wrap_text(
        text, width=88, initial_indent=indent, subsequent_indent=indent, preserve_paragraphs=True
    )
