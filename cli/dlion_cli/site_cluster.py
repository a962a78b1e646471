"""What one site's cluster says of its operator, its list of sites and its machines.

Called by `preflight` for each context; sends reads only, and none for a Secret. Judges nothing:
`site_checks` does. What may not be read, or does not answer, stands where the answer would.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlion_api import cluster_names
from dlion_api.errors import AbsentError, DataError, DLionError
from dlion_api.names import GROUP, KIND, VERSION
from dlion_cli.cluster import path_of
from dlion_worker.yaml_text import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from dlion_cli.cluster import Cluster

T = TypeVar("T")
Document = dict[str, Any]
_OPERATOR: Final = (
    f"{cluster_names.NAME_LABEL}={cluster_names.NAME},{cluster_names.COMPONENT_LABEL}=operator"
)
_CLOCK_READINGS: Final = 4
_BETWEEN_READINGS_S: Final = 0.23
"""A `Date` has whole seconds: readings at other parts of a second bound it to about a fourth."""
_MOST_METRICS_BYTES: Final = 4 * 1024 * 1024
_MOST_FIGURE_BYTES: Final = 4096
_SAMPLE = re.compile(
    r"dlion_federation_(connected|heartbeat_age_seconds|bundle_valid|round_trip_seconds)"
    r'\{peer_site="([-a-z0-9]{1,63})"\} (\S{1,32})'
)


@dataclass(frozen=True)
class ClockBounds:
    """How far a clock is ahead of this machine's, in seconds."""

    at_least_s: float
    at_most_s: float


@dataclass(frozen=True)
class Operator:
    """A site's operator as its objects say, in the operator's namespace."""

    deployment: Document
    settings: Document
    """What it is told by the chart (`dlion_operator.settings`)."""
    trust: Mapping[str, str] | DLionError
    """The bundles of other sites by name, PEM."""
    service: Document | DLionError | None
    """The federation Service; None: there is none."""
    streams: Mapping[str, Mapping[str, float]] | DLionError
    """Of each other site the samples of its metrics by name, without `dlion_federation_`."""

    @property
    def gateway(self) -> Document:
        """The proxy before its workers and itself, as the settings have it; empty without one."""
        return _mapping(self.settings.get("gateway"))


@dataclass(frozen=True)
class SiteCluster:
    """All that was asked for."""

    context: str
    namespace: str
    version: str
    """Of its API server."""
    clock: ClockBounds | None
    """Of its API server; None: it does not tell the time."""
    schema: Document | DLionError
    """Of a DLionJob's spec, as it is served."""
    operator: Operator | DLionError
    nodes: list[Document] | DLionError | None
    """None: not asked for."""


def ask(cluster: Cluster, *, with_nodes: bool, within_s: float) -> SiteCluster:
    """What that cluster says. Raises: DLionError where its API server does not answer at all."""
    version, clock = _clock(cluster, within_s)
    nodes = None
    if with_nodes:
        nodes = _or_error(lambda: _items(cluster.get("/api/v1/nodes", timeout_s=within_s)))
    return SiteCluster(
        context=cluster.context,
        namespace=cluster.namespace,
        version=version,
        clock=clock,
        schema=_or_error(lambda: _spec_schema(cluster, within_s)),
        operator=_or_error(lambda: _operator(cluster, within_s)),
        nodes=nodes,
    )


def _or_error(question: Callable[[], T]) -> T | DLionError:
    try:
        return question()
    except DLionError as error:
        return error


def _clock(cluster: Cluster, within_s: float) -> tuple[str, ClockBounds | None]:
    """Kubernetes' version, and what the `Date` of several answers leaves possible."""
    least, most = -float("inf"), float("inf")
    for reading in range(_CLOCK_READINGS):
        if reading:
            time.sleep(_BETWEEN_READINGS_S)
        before_s = time.time()
        answer = cluster.request("GET", "/version", timeout_s=within_s)
        after_s = time.time()
        said = _date(answer.date)
        if said is None:
            return str(answer.document.get("gitVersion", "")), None
        # It was said between the two, by a clock that stood at `said` or less than 1 s behind it.
        least = max(least, said.timestamp() - after_s)
        most = min(most, said.timestamp() + 1.0 - before_s)
    bounds = ClockBounds(least, most) if least <= most else None  # else a clock was set meanwhile
    return str(answer.document.get("gitVersion", "")), bounds


def _date(text: str) -> datetime | None:
    try:
        return parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None


def _spec_schema(cluster: Cluster, within_s: float) -> Document:
    """From the API server's own description, which whoever has logged in may read."""
    document = cluster.get(f"/openapi/v3/apis/{GROUP}/{VERSION}", timeout_s=within_s)
    for schema in _mapping(_mapping(document.get("components")).get("schemas")).values():
        kinds = _mapping(schema).get("x-kubernetes-group-version-kind")
        if {"group": GROUP, "kind": KIND, "version": VERSION} in (kinds or []):
            return _mapping(_mapping(schema.get("properties")).get("spec"))
    raise AbsentError(
        f"this cluster does not know {KIND}s of version {VERSION}: install this release's chart"
    )


def _operator(cluster: Cluster, within_s: float) -> Operator:
    """Raises: AbsentError without one, DataError where there are several; as `Cluster.get`."""

    def named(api: tuple[str, ...], kind: str, *name: str, **query: str) -> Document:
        path = path_of(*api, "namespaces", cluster.namespace, kind, *name)
        return cluster.get(path, query, timeout_s=within_s)

    found = _items(named(("apis", "apps", "v1"), "deployments", labelSelector=_OPERATOR))
    if not found:
        raise AbsentError(
            f"there is no operator in namespace {cluster.namespace}: install it there (helm "
            "install dlion helm/dlion), or name its namespace with -n"
        )
    if len(found) > 1:
        raise DataError(
            f"there are {len(found)} operators in namespace {cluster.namespace}: leave one, or "
            "install each in a namespace of its own (-n names it)"
        )
    (deployment,) = found
    name = str(_mapping(deployment.get("metadata")).get("name"))
    return Operator(
        deployment=deployment,
        settings=settings_of(cluster, name, within_s),
        trust=_or_error(lambda: _bundles(named(("api", "v1"), "configmaps", f"{name}-trust"))),
        service=_service(lambda: named(("api", "v1"), "services", f"{name}-federation")),
        streams=_or_error(lambda: _streams(cluster, name, within_s)),
    )


def settings_of(cluster: Cluster, operator: str, within_s: float) -> Document:
    """What the operator of that name is told by the chart.

    Raises: SpecError where that is no YAML; and as `Cluster.get` does.
    """
    path = path_of("api", "v1", "namespaces", cluster.namespace, "configmaps", operator)
    data = _mapping(cluster.get(path, timeout_s=within_s).get("data"))
    source = f"ConfigMap {cluster.namespace}/{operator}"
    texts = read_text(str(data.get("config.yaml", "")), source=source)
    return _mapping(texts[0].value) if texts else {}


def _bundles(document: Document) -> dict[str, str]:
    data = _mapping(document.get("data"))
    return {key.removesuffix(".pem"): str(value) for key, value in data.items()}


def _service(question: Callable[[], Document]) -> Document | DLionError | None:
    try:
        return question()
    except AbsentError:
        return None
    except DLionError as error:
        return error


def _streams(cluster: Cluster, name: str, within_s: float) -> dict[str, dict[str, float]]:
    service = f"{name}:metrics"
    path = path_of(
        "api", "v1", "namespaces", cluster.namespace, "services", service, "proxy", "metrics"
    )
    text = cluster.text(path, most_bytes=_MOST_METRICS_BYTES, within_s=within_s)
    samples: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if (found := _SAMPLE.fullmatch(line)) is not None:
            with contextlib.suppress(ValueError):
                samples.setdefault(found[2], {})[found[1]] = float(found[3])
    return samples


def measured(cluster: Cluster, operator: Operator, site: str, within_s: float) -> float:
    """Bytes per second from that operator's site to the other one, which it measures now.

    Raises: DataError where what it says is no figure; and as `Cluster.text`.
    """
    service = f"{operator.deployment['metadata']['name']}:metrics"
    path = path_of(
        "api", "v1", "namespaces", cluster.namespace,
        "services", service, "proxy", "bandwidth", site,
    )  # fmt: skip
    try:
        text = cluster.text(path, most_bytes=_MOST_FIGURE_BYTES, within_s=within_s)
    except AbsentError as error:
        words = (
            f"its operator may not measure (federation.measureOnDemand in the chart's values), does"
            f" not know {site}, or is of a release that does not measure"
        )
        raise AbsentError(words) from error
    try:
        rate = float(json.loads(text)["bytesPerSecond"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"what its operator says of the link to {site} is no figure") from error
    if not math.isfinite(rate) or rate <= 0.0:
        raise DataError(f"its operator says {rate} bytes/s of the link to {site}")
    return rate


def _items(document: Document) -> list[Document]:
    return [each for each in document.get("items") or () if isinstance(each, dict)]


def _mapping(value: object) -> Document:
    return value if isinstance(value, dict) else {}
