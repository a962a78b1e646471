"""Reads a site's operator, settings and nodes from its cluster, for `dlion preflight`.

Only reads, and no Secrets. An object that cannot be read is replaced by its error. `site_checks`
evaluates the result.
"""

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeVar

from dlion_api.errors import AbsentError, DataError, DLionError
from dlion_api.names import GROUP, KIND, VERSION
from dlion_api.spec import Job
from dlion_cli.cluster.client import ClusterClient, api_path
from dlion_cli.cluster.documents import OPERATOR_SELECTOR, mapping_of
from dlion_environments.yaml_text import parse_any_documents

T = TypeVar("T")
Document = dict[str, Any]
_CLOCK_READINGS: Final = 4
_CLOCK_READING_INTERVAL_S: Final = 0.23
"""`Date` has whole seconds. Readings at other fractions of a second bound it to about 0.25 s."""
_MAX_METRICS_BYTES: Final = 4 * 1024 * 1024
_MAX_MEASUREMENT_BYTES: Final = 4096
_SAMPLE = re.compile(
    r"dlion_federation_(connected|heartbeat_age_seconds|bundle_valid|round_trip_seconds)"
    r'\{peer_site="([-a-z0-9]{1,63})"\} (\S{1,32})'
)


@dataclass(frozen=True)
class ClockBounds:
    """Seconds by which a clock is ahead of this machine's."""

    at_least_s: float
    at_most_s: float


@dataclass(frozen=True)
class OperatorSnapshot:
    """A site's operator, from the objects in its namespace."""

    deployment: Document
    settings: Document
    """Its settings from the chart (`dlion_operator.model.settings`)."""
    trust: Mapping[str, str] | DLionError
    """Other sites' PEM bundles by site name."""
    service: Document | DLionError | None
    """The federation Service; None if there is none."""
    streams: Mapping[str, Mapping[str, float]] | DLionError
    """Per other site, samples of `dlion_federation_` metrics by name without this prefix."""

    @property
    def gateway(self) -> Document:
        """The gateway of workers and operator; empty without one."""
        return mapping_of(self.settings.get("gateway"))

    def runtime_of(self, named: str) -> str:
        """Name of the DLionRuntime of a job that names this one, or none. Empty: it uses none."""
        return named or str(self.settings.get("defaultRuntime") or "")


@dataclass(frozen=True)
class SiteCluster:
    """The state of one cluster."""

    context: str
    namespace: str
    version: str
    """The API server's version."""
    clock: ClockBounds | None
    """The API server's clock; None if it is unknown."""
    schema: Document | DLionError
    """The served schema of a DLionJob's spec."""
    operator: OperatorSnapshot | DLionError
    nodes: list[Document] | DLionError | None
    """None if not requested."""
    runtime: Document | DLionError | None = None
    """The DLionRuntime of the job in question. None: it uses none there, or is not requested."""


def query_site(cluster: ClusterClient, job: Job | None, *, within_s: float) -> SiteCluster:
    """Read the cluster's state, and what concerns that job.

    Raises: DLionError if its API server does not respond.
    """
    version, clock = read_clock(cluster, within_s)
    operator = _or_error(lambda: _operator(cluster, within_s))
    nodes, runtime = None, None
    if job is not None:
        nodes = _or_error(lambda: items_of(cluster.get("/api/v1/nodes", timeout_s=within_s)))
    if job is not None and not isinstance(operator, DLionError):
        runtime = _runtime(cluster, operator.runtime_of(job.spec.runtime), within_s)
    return SiteCluster(
        context=cluster.context,
        namespace=cluster.namespace,
        version=version,
        clock=clock,
        schema=_or_error(lambda: read_schema(cluster, within_s)),
        operator=operator,
        nodes=nodes,
        runtime=runtime,
    )


def _or_error(query: Callable[[], T]) -> T | DLionError:
    try:
        return query()
    except DLionError as error:
        return error


def read_clock(cluster: ClusterClient, within_s: float) -> tuple[str, ClockBounds | None]:
    """The Kubernetes version, and the clock bounds from several `Date` headers."""
    least, most = -float("inf"), float("inf")
    for reading in range(_CLOCK_READINGS):
        if reading:
            time.sleep(_CLOCK_READING_INTERVAL_S)
        before_s = time.time()
        answer = cluster.request("GET", "/version", timeout_s=within_s)
        after_s = time.time()
        server_time = parse_date(answer.date)
        if server_time is None:
            return str(answer.document.get("gitVersion", "")), None
        # Between the two readings, the server's clock was in [server_time, server_time + 1 s).
        least = max(least, server_time.timestamp() - after_s)
        most = min(most, server_time.timestamp() + 1.0 - before_s)
    bounds = ClockBounds(least, most) if least <= most else None  # None: a clock was adjusted
    return str(answer.document.get("gitVersion", "")), bounds


def parse_date(text: str) -> datetime | None:
    """The time in a `Date` header; None if it is none."""
    try:
        return parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None


def read_schema(cluster: ClusterClient, within_s: float) -> Document:
    """Read the schema from the OpenAPI document, which any authenticated user may read."""
    document = cluster.get(f"/openapi/v3/apis/{GROUP}/{VERSION}", timeout_s=within_s)
    for schema in mapping_of(mapping_of(document.get("components")).get("schemas")).values():
        kinds = mapping_of(schema).get("x-kubernetes-group-version-kind")
        if {"group": GROUP, "kind": KIND, "version": VERSION} in (kinds or []):
            return mapping_of(mapping_of(schema.get("properties")).get("spec"))
    raise AbsentError(
        f"this cluster does not know {KIND}s of version {VERSION}: install this release's chart"
    )


def _operator(cluster: ClusterClient, within_s: float) -> OperatorSnapshot:
    """Raises: AbsentError without an operator; DataError if there are several; as `get`."""

    def named(kind: str, name: str) -> Document:
        return cluster.get(cluster.core_path(kind, name), timeout_s=within_s)

    deployment = find_operator(cluster, within_s)
    name = str(mapping_of(deployment.get("metadata")).get("name"))
    service = _or_error(lambda: named("services", f"{name}-federation"))
    return OperatorSnapshot(
        deployment=deployment,
        settings=operator_settings(cluster, name, within_s),
        trust=_or_error(lambda: _bundles(named("configmaps", f"{name}-trust"))),
        service=None if isinstance(service, AbsentError) else service,
        streams=_or_error(lambda: _streams(cluster, name, within_s)),
    )


def find_operator(cluster: ClusterClient, within_s: float) -> Document:
    """The operator's Deployment. Raises: AbsentError without one; DataError if there are several;
    as `get`."""
    path = api_path("apis", "apps", "v1", "namespaces", cluster.namespace, "deployments")
    selector = {"labelSelector": OPERATOR_SELECTOR}
    deployments = items_of(cluster.get(path, selector, timeout_s=within_s))
    if not deployments:
        raise AbsentError(
            f"there is no operator in namespace {cluster.namespace}: install it (helm "
            "install dlion helm/dlion), or select its namespace with -n"
        )
    if len(deployments) > 1:
        raise DataError(
            f"there are {len(deployments)} operators in namespace {cluster.namespace}: keep one, "
            "or install each in its own namespace (-n selects it)"
        )
    return deployments[0]


def operator_settings(cluster: ClusterClient, operator: str, within_s: float) -> Document:
    """The settings that the chart gives to that operator.

    Raises: SpecError if they are not YAML; and as `ClusterClient.get`.
    """
    answer = cluster.get(cluster.core_path("configmaps", operator), timeout_s=within_s)
    data = mapping_of(answer.get("data"))
    source = f"ConfigMap {cluster.namespace}/{operator}"
    texts = parse_any_documents(str(data.get("config.yaml", "")), source=source)
    return mapping_of(texts[0].value) if texts else {}


def _runtime(cluster: ClusterClient, name: str, within_s: float) -> Document | DLionError | None:
    """The DLionRuntime of this name in the operator's namespace. None: the name is empty."""
    if not name:
        return None
    parts = ("apis", GROUP, VERSION, "namespaces", cluster.namespace, "dlionruntimes", name)
    return _or_error(lambda: cluster.get(api_path(*parts), timeout_s=within_s))


def _bundles(document: Document) -> dict[str, str]:
    data = mapping_of(document.get("data"))
    return {key.removesuffix(".pem"): str(value) for key, value in data.items()}


def _streams(cluster: ClusterClient, name: str, within_s: float) -> dict[str, dict[str, float]]:
    path = cluster.core_path("services", f"{name}:metrics", "proxy", "metrics")
    text = cluster.read_text(path, max_bytes=_MAX_METRICS_BYTES, within_s=within_s)
    samples: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if (match := _SAMPLE.fullmatch(line)) is not None:
            with contextlib.suppress(ValueError):
                samples.setdefault(match[2], {})[match[1]] = float(match[3])
    return samples


def measure_link(
    cluster: ClusterClient, operator: OperatorSnapshot, site: str, within_s: float
) -> float:
    """Let the operator measure the bandwidth to the other site, in bytes per second.

    Raises: DataError if the response is invalid; and as `ClusterClient.read_text`.
    """
    service = f"{operator.deployment['metadata']['name']}:metrics"
    path = cluster.core_path("services", service, "proxy", "bandwidth", site)
    try:
        text = cluster.read_text(path, max_bytes=_MAX_MEASUREMENT_BYTES, within_s=within_s)
    except AbsentError as error:
        raise AbsentError(
            "its operator does not allow measurements (federation.measureOnDemand in the chart's "
            f"values), does not know {site}, or is an earlier release without them"
        ) from error
    try:
        rate = float(json.loads(text)["bytesPerSecond"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"its operator's measurement of the link to {site} is invalid") from error
    if not math.isfinite(rate) or rate <= 0.0:
        raise DataError(f"its operator reports {rate} bytes/s for the link to {site}")
    return rate


def items_of(document: Document) -> list[Document]:
    """The objects of a list."""
    return [each for each in document.get("items") or () if isinstance(each, dict)]
