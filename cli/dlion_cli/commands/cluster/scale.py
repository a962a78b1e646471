"""`dlion scale`: change the number of workers of one group of a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from dlion_api.bounds import MAX_WORKERS_PER_GROUP
from dlion_api.errors import DeniedError, Problem, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.cluster_options import cluster_options, contexts_option, name_argument
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.views.job_status import JobStatus, text


@dataclass(frozen=True)
class GroupPlace:
    """One group in a manifest: its place and its number of workers."""

    site: str
    group: str
    site_index: int
    group_index: int
    workers: object

    @property
    def path(self) -> str:
        """The path as in error messages."""
        return f"spec.sites[{self.site}].groups[{self.group}].workers"

    def patch(self, workers: int) -> list[dict[str, Any]]:
        """The JSON patch, which fails if the group moved or its number changed meanwhile."""
        site = f"/spec/sites/{self.site_index}"
        group = f"{site}/groups/{self.group_index}"
        return [
            {"op": "test", "path": f"{site}/name", "value": self.site},
            {"op": "test", "path": f"{group}/name", "value": self.group},
            {"op": "test", "path": f"{group}/workers", "value": self.workers},
            {"op": "replace", "path": f"{group}/workers", "value": workers},
        ]


def scale_contexts(contexts: Contexts, name: str, site: str, group: str, workers: int) -> int:
    """`scale` in several contexts: first a dry run in all, so that a refusal changes none."""
    contexts.query(lambda jobs: _scale(jobs, name, site, group, workers, dry_run=True))
    if contexts.errors:
        code = contexts.report_errors()
        click.echo("dlion: nothing was changed in any context", err=True)
        return code
    results = contexts.query(lambda jobs: _scale(jobs, name, site, group, workers))
    for context, (before, after) in results.items():
        click.echo(f"{context}  {_result(before, after, workers)}")
    for note in {note: None for _, after in results.values() for note in _growth(after)}:
        click.echo(f"dlion: {note}", err=True)
    return contexts.report_errors()


@click.command()
@name_argument()
@click.option("--site", required=True, metavar="NAME", help="The group's site, as in spec.sites.")
@click.option("--group", required=True, metavar="NAME", help="The group.")
@click.option(
    "--workers", required=True, type=click.IntRange(1, MAX_WORKERS_PER_GROUP), metavar="N",
    help="Its new number of workers.",
)  # fmt: skip
@contexts_option(scale_contexts)
@cluster_options
def scale(jobs: JobClient, name: str, site: str, group: str, workers: int) -> int:
    """Set the number of workers of one group of job NAME, also while it trains.

    The manifest must be the same at every site: give --contexts with all of them. If one refuses,
    none is changed. Change the file that you submit, too: `dlion submit` refuses the old number.

    \b
    dlion scale cifar10 --site plant-a --group small --workers 5 --contexts plant-a,plant-b
    """
    before, after = _scale(jobs, name, site, group, workers)
    click.echo(_result(before, after, workers))
    others = [text(each.get("name")) for each in _sites(after) if each.get("name") != site]
    if others:
        click.echo(
            "dlion: the manifest must be the same at every site: scale it there, too "
            f"(--contexts), with {', '.join(others)}",
            err=True,
        )
    for note in _growth(after):
        click.echo(f"dlion: {note}", err=True)
    return ExitCode.OK


def _scale(
    jobs: JobClient, name: str, site: str, group: str, workers: int, *, dry_run: bool = False
) -> tuple[GroupPlace, Document]:
    """The group before, and the stored job.

    Raises: AbsentError if there is no such job; SpecError if there is no such group, or a rule
    refuses the number, or the run has ended; DeniedError if another client changed it meanwhile.
    """
    document = jobs.get(name)
    outcome = JobStatus(document).outcome
    if outcome is not None:
        problem = Problem(
            name,
            f"its run has ended ({outcome.type}): there is nothing to scale",
            advice="Change the manifest and submit it with another runId",
        )
        raise SpecError([problem])
    before = find_group(document, site, group)
    try:
        return before, jobs.scale(name, before.patch(workers), dry_run=dry_run)
    except SpecError as error:
        now = jobs.get(name)
        if _is_moved(now, before):
            raise DeniedError(
                f"another client changed {before.path} of {name} at the same time. See `dlion get "
                f"{name} -o yaml`, then retry"
            ) from error
        raise


def find_group(document: Mapping[str, Any], site: str, group: str) -> GroupPlace:
    """The group's place. Raises: SpecError with the known names if there is none."""
    sites = _sites(document)
    names = [text(each.get("name")) for each in sites]
    if site not in names:
        raise _unknown("--site", site, names)
    groups = mappings_in(sites[names.index(site)].get("groups"))
    group_names = [text(each.get("name")) for each in groups]
    if group not in group_names:
        raise _unknown("--group", group, group_names)
    place = group_names.index(group)
    return GroupPlace(site, group, names.index(site), place, groups[place].get("workers"))


def _unknown(option: str, given: str, known: list[str]) -> SpecError:
    problem = Problem(
        option, "the manifest has no such name", value=given, allowed=", ".join(known) or "none"
    )
    return SpecError([problem], source="scale")


def _is_moved(document: Mapping[str, Any], before: GroupPlace) -> bool:
    try:
        return find_group(document, before.site, before.group) != before
    except SpecError:
        return True


def _sites(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return mappings_in(mapping_of(document.get("spec")).get("sites"))


def _result(before: GroupPlace, after: Document, workers: int) -> str:
    name = text(mapping_of(after.get("metadata")).get("name"))
    if before.workers == workers:
        return f"dlionjob.dlion.dev/{name} unchanged: {before.site}/{before.group} has {workers}"
    change = f"{before.site}/{before.group} {text(before.workers)} → {workers}"
    return f"dlionjob.dlion.dev/{name} scaled: {change}"


def _growth(document: Mapping[str, Any]) -> list[str]:
    """A note if the job's policy or topology must know its workers beforehand."""
    from dlion_api.spec import load_job  # it takes longer to import than all else here

    try:
        exchange = load_job(dict(document)).spec.exchange
    except SpecError:
        return []
    if exchange.allows_new_workers:
        return []
    kind = f"exchange policy {exchange.policy} with topology {exchange.topology}"
    limit = "a group grows to the size that the run began with, and further from the next run on"
    return [f"{kind} must know its workers beforehand: {limit}"]
