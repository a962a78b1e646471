"""`dlion render`: print the objects that an operator makes of a job, without a cluster."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import click

from dlion_api import cluster_names as names
from dlion_api.document import parse
from dlion_api.errors import Problem, SpecError
from dlion_api.spec import Job, Runtime, load_job
from dlion_api.status_names import ConditionType
from dlion_cli.cluster.kubeconfig import DEFAULT_NAMESPACE
from dlion_cli.cluster.submission import valid_manifest
from dlion_cli.inputs.chart_values import read_values, settings_of
from dlion_cli.inputs.manifests import read_document, source_of
from dlion_cli.inputs.program_files import PackedProgram
from dlion_cli.terminal import options
from dlion_environments.yaml_text import YamlDocument, to_yaml
from dlion_operator.model.job_view import condition
from dlion_operator.model.settings import Settings
from dlion_operator.model.site_runtime import RuntimeState, SiteRuntime
from dlion_operator.model.workload_view import QueueState
from dlion_operator.pki.named_authority import NamedAuthority
from dlion_operator.plan.decide import MANAGED_BY, decide, is_managed_here
from dlion_operator.plan.decisions import Apply, Create
from dlion_operator.plan.observed import Observed

Document = dict[str, Any]
_NOW: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""Nothing that is rendered depends on the time."""


@dataclass(frozen=True)
class RenderedJob:
    """The objects of a job at a site, and what they lack."""

    objects: list[Document]
    notes: list[str]
    """What only a cluster knows, and what others create."""


@dataclass(frozen=True)
class RenderedManifest:
    """A manifest as `dlion submit` would send it."""

    source: str
    document: Document
    job: Job
    program: PackedProgram | None


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--site", metavar="NAME", help="Site of the operator. Default: the job's only site.")
@click.option(
    "-n", "--namespace", metavar="NAME", help="Namespace. Default: the manifest's, or default."
)
@click.option(
    "--values", "values_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="The site's values of the chart. Default: the chart's own.",
)  # fmt: skip
@click.option(
    "--runtime", "runtime_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="The site's DLionRuntime (spec.runtime, or runtimes.default).",
)  # fmt: skip
@options.assignments("the manifest, e.g. exchange.policy=full")
@click.option(
    "-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", help="Output format."
)
def render(
    file: Path,
    site: str | None,
    namespace: str | None,
    values_file: Path | None,
    runtime_file: Path | None,
    assignments: tuple[str, ...],
    output: str,
) -> None:
    """Print the Kubernetes objects that an operator of this release makes of the job in FILE.

    Asks no cluster, as `helm template`. Comments name what is missing, such as Secrets' contents.

    \b
    dlion render job.yaml --site plant-a -n ml --values plant-a.yaml | kubectl diff -f -
    dlion render job.yaml --runtime edge.yaml
    """
    values = read_values(values_file)
    manifest = _manifest(file, namespace, assignments)
    site = _chosen_site(manifest.job, site or values["site"]["name"], manifest.source)
    settings = settings_of(values, site, source=source_of(values_file or "the chart's values"))
    runtime = _runtime(runtime_file, manifest.job, settings)
    rendered = render_job(manifest, settings, runtime)
    if output == "json":
        items = {"apiVersion": "v1", "kind": "List", "items": rendered.objects}
        click.echo(json.dumps(items, indent=2, ensure_ascii=False))
        return
    given = f"values of {values_file}" if values_file else "default values of the chart"
    click.echo(f"# By dlion {version('dlion')} for site {site}, with the {given}.")
    for note in rendered.notes:
        click.echo(f"# {note}")
    for each in rendered.objects:
        click.echo(f"---\n{to_yaml(each)}", nl=False)


def render_job(
    manifest: RenderedManifest, settings: Settings, runtime: SiteRuntime | None = None
) -> RenderedJob:
    """What an operator with these settings decides to create for a new job with that runtime.

    Raises: SpecError if it would create nothing, with its reason.
    """
    spec = {**manifest.document["spec"], "suspend": False}
    document = {
        **manifest.document,
        "metadata": {**manifest.document["metadata"], "uid": "", "generation": 1},
        "spec": spec,
    }
    notes = [
        f"The operator adds owner references, and {names.AUTHORITY_KEY}: its public certificates",
    ]
    objects = _decided(document, settings, [], runtime)
    if settings.gateway is not None:  # routes follow the Services that exist
        services = [each for each in objects if each["kind"] == "Service"]
        objects = _decided(document, settings, services, runtime)
    if manifest.document["spec"].get("suspend"):
        notes.append("spec.suspend is true: nothing of this is created until it is false")
    job = manifest.job
    if (name := job.spec.runtime or settings.default_runtime) and runtime is None:
        notes.append(f"DLionRuntime {name} of the site is left out: give it by --runtime FILE")
    if job.spec.network.exposure == "LoadBalancer" and len(job.spec.sites) > 1:
        notes.append("The workers' Services become LoadBalancers once they have node ports")
    if any(each["kind"] == "Workload" for each in objects):
        notes.append("Kueue admits the Workload; only then the Jobs start, and the keeper is made")
    elif names.QUEUE_LABEL in job.metadata.labels:
        notes.append("kueue.enabled is false: the job waits for it, because it has a queue's label")
    if job.spec.tls.secret_name:
        notes.append(f"Secret {job.spec.tls.secret_name}: yours, with the job's authority")
    if any(each["kind"] == "Certificate" for each in objects):
        notes.append("cert-manager creates the Secret that the Certificate names")
    notes += [f"Secret {name}: yours, of a registry" for name in settings.images.pull_secrets]
    rendered = [_without_unknown(each) for each in objects]
    if (program := manifest.program) is not None:
        notes.append(f"`dlion submit` creates ConfigMap {program.name}, with the program")
        rendered.insert(0, program.document(job.metadata.namespace, None))
    return RenderedJob(rendered, notes)


def _decided(
    document: Document,
    settings: Settings,
    services: list[Document],
    runtime: SiteRuntime | None,
) -> list[Document]:
    observed = Observed(
        document=document,
        jobs=(),
        pods=(),
        services=services,
        now=_NOW,
        authority_pem="",
        authority=NamedAuthority(None),  # as if it could sign
        queue=_queue(document, settings),
        runtime=RuntimeState(runtime),
    )
    decision = decide(observed, settings)
    objects = [
        {**action.document, "metadata": {**action.document["metadata"], "uid": ""}}
        for action in decision.actions
        if isinstance(action, Apply | Create)
    ]
    if not any(each["kind"] == "Job" for each in objects):
        status = {"status": dict(decision.status or {})}
        message = condition(status, ConditionType.READY).get("message")
        if not is_managed_here(document):
            message = f"spec.managedBy names another controller than {MANAGED_BY}"
        raise SpecError([Problem("spec", f"the operator creates no workers: {message}")])
    return objects


def _runtime(file: Path | None, job: Job, settings: Settings) -> SiteRuntime | None:
    """The runtime in that file. Raises: SpecError if it is not the one that the job names."""
    if file is None:
        return None
    source = source_of(file)
    document, lines = read_document(file)
    found = parse(Runtime, document, source=source, lines=lines)
    wanted = job.spec.runtime or settings.default_runtime
    if found.metadata.name != wanted:
        problem = Problem(
            "metadata.name", "is not the runtime of the job", found.metadata.name,
            allowed=wanted or "none: neither spec.runtime nor runtimes.default names one",
        )  # fmt: skip
        raise SpecError([problem], source=source)
    return SiteRuntime(found.metadata.name, found.spec)


def _queue(document: Document, settings: Settings) -> QueueState | None:
    """The state of a queue that the job has just been put into. None: it has none."""
    if not (document["metadata"].get("labels") or {}).get(names.QUEUE_LABEL):
        return None
    return QueueState(problem="" if settings.kueue else "kueue.enabled is false")


def _without_unknown(document: Document) -> Document:
    """The object without what only a cluster knows."""
    hidden = ("ownerReferences", "uid")
    metadata = {key: value for key, value in document["metadata"].items() if key not in hidden}
    made = {**document, "metadata": metadata}
    if "data" in made:
        made["data"] = {k: v for k, v in made["data"].items() if k != names.AUTHORITY_KEY}
    return made


def _manifest(file: Path, namespace: str | None, assignments: tuple[str, ...]) -> RenderedManifest:
    """The manifest as `dlion submit` would send it. Raises: SpecError, DataError."""
    source = source_of(file)
    text = YamlDocument(*read_document(file))
    sent = valid_manifest(text, source, file, assignments, namespace)
    namespace = namespace or sent.namespace or DEFAULT_NAMESPACE
    document = {
        **sent.document,
        "metadata": {**sent.document["metadata"], "namespace": namespace},
    }
    return RenderedManifest(source, document, load_job(document, source=source), sent.program)


def _chosen_site(job: Job, site: str | None, source: str) -> str:
    known = [each.name for each in job.spec.sites]
    if site is None or site == "":
        if len(known) == 1:
            return known[0]
        raise click.UsageError(f"{source} has several sites: give --site {' or '.join(known)}")
    if site not in known:
        problem = Problem("spec.sites", "has no such site", site, allowed=", ".join(known))
        raise SpecError([problem], source=source)
    return site
