"""Reads the metrics of workers' sidecars (docs/metrics.md) through the API server's pod proxy."""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dlion_api import cluster_names
from dlion_api.errors import AbsentError, DataError, UnavailableError
from dlion_cli.cluster.client import ClusterClient
from dlion_results.summary.link_use import KINDS

MAX_METRICS_BYTES: Final = 1 << 18
"""Maximum bytes of a response, to bound the time of parsing. A sidecar serves some kilobytes."""
MAX_VALUE: Final = 1e15
"""Larger values are not measurements, and their sums may not be finite."""
MAX_PEER_SITES: Final = 256
PREFIX: Final = "dlion_"
_SENT_METRIC: Final = "link_sent_bytes_total"
_LINK_METRICS: Final = (
    "link_budget_bytes", "link_bandwidth_bytes_per_second", "link_round_trip_seconds",
    "link_min_round_trip_seconds", "link_sent_segments_total", "link_retransmitted_segments_total",
)  # fmt: skip


@dataclass(frozen=True)
class WorkerMetrics:
    """One response of a sidecar. Names are without `dlion_`; values are at most MAX_VALUE."""

    time_s: float
    """Monotonic time at which it was requested."""
    values: Mapping[str, float] = field(default_factory=dict)
    by_site: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of links, by the site that they lead to."""
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics with a label `part`, by its value."""
    sent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Bytes sent so far, by the site of the peer and by kind."""


def read_metrics(cluster: ClusterClient, pod: str, within_s: float) -> WorkerMetrics:
    """The present metrics of that pod's sidecar.

    Raises: DeniedError without the right to `pods/proxy`; UnavailableError if the sidecar does not
    answer; DataError for an invalid response.
    """
    target = f"{pod}:{cluster_names.METRICS_PORT}"
    path = cluster.core_path("pods", target, "proxy", "metrics")
    at_s = time.monotonic()
    try:
        text = cluster.read_text(path, max_bytes=MAX_METRICS_BYTES, within_s=within_s)
    except AbsentError:  # of the pod, or of what listens there
        raise UnavailableError("its sidecar serves no /metrics, or the pod is gone") from None
    return parse_metrics(text, at_s)


def parse_metrics(text: str, time_s: float) -> WorkerMetrics:
    """The sidecar's own metrics in Prometheus' text format. Raises: DataError."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    by_site: dict[str, dict[str, float]] = {}
    parts: dict[str, dict[str, float]] = {}
    sent: dict[str, defaultdict[str, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                if name == sample.name or not abs(sample.value) <= MAX_VALUE:
                    continue
                if (part := sample.labels.get("part")) is not None:
                    parts.setdefault(name, {})[part] = sample.value
                elif (kind := sample.labels.get("kind")) is not None:
                    site = sample.labels.get("peer_site", "")
                    if name == _SENT_METRIC and kind in KINDS and _has_room(sent, site):
                        sent.setdefault(site, defaultdict(float))[kind] += sample.value
                elif name not in _LINK_METRICS:
                    values[name] = sample.value
                elif _has_room(by_site, site := sample.labels.get("peer_site", "")):
                    by_site.setdefault(site, {})[name] = sample.value
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        # The parser has no error class of its own for malformed input.
        raise DataError(f"its metrics are not in Prometheus' format: {str(error)[:100]}") from None
    return WorkerMetrics(time_s, values, by_site, parts, sent)


def _has_room(known: Mapping[str, object], site: str) -> bool:
    return site in known or len(known) < MAX_PEER_SITES
