"""The operator's own Prometheus metrics. docs/metrics.md lists them, and a test compares both."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlion_api.names import SiteName
from dlion_api.status import State
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.federation.node import FederationNode
from dlion_operator.kubernetes.client import Kind
from dlion_operator.kubernetes.store import ClusterStore, name_of

BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 30.0)


class OperatorMetrics:
    """Counts events as they happen. `registry` holds all metrics."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._reconciles = Counter(
            "dlion_operator_reconciles",
            "Reconcile passes, by result",
            ["result"],
            registry=registry,
        )
        self._seconds = Histogram(
            "dlion_operator_reconcile_seconds",
            "Duration of a reconcile pass",
            buckets=BUCKETS,
            registry=registry,
        )
        self._api_errors = Counter(
            "dlion_operator_api_errors",
            "Error responses of the API server, by code; 0: no response",
            ["code"],
            registry=registry,
        )
        self.restores = Counter(
            "dlion_operator_restores",
            "Decreases of the API server's resource versions, as after a restore of etcd",
            registry=registry,
        )
        self.loop_lag_seconds = Gauge(
            "dlion_operator_loop_lag_seconds",
            "Latest lag of the operator's event loop",
            registry=registry,
        )

    def reconciled(self, result: str, seconds: float) -> None:
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def api_error(self, code: int) -> None:
        """Count an error response, or no response (0)."""
        self._api_errors.labels(str(code)).inc()


class JobMetrics(Collector):
    """Read on request: the jobs' statuses, refusals, Leases, the freshness of watches."""

    def __init__(
        self,
        store: ClusterStore,
        server: CoordinatorServer,
        *,
        site: SiteName,
        leases_held: Callable[[], Mapping[str, bool]],
        watch_age_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._server = server
        self._site = site
        self._leases_held = leases_held
        self._watch_age_s = watch_age_s

    def collect(self) -> Iterator[Metric]:
        service, runs = self._server.service, self._server.runs
        yield _gauge(
            "dlion_operator_watch_age_seconds",
            "Time since the watches were last confirmed by a list",
            self._watch_age_s(),
        )
        yield _counter(
            "dlion_coordinator_refusals", "Refused calls of workers", service.refusals, "reason"
        )
        yield _counter(
            "dlion_coordinator_calls", "Calls of workers and keepers", service.calls, "call"
        )
        refusals = {
            (key.namespace, key.name, reason): count
            for key, run in runs.items()
            for reason, count in run.keeper_refusals.items()
        }
        text = "Callers that the site's keeper refused"
        yield _counter("dlion_keeper_refusals", text, refusals, "namespace", "job", "reason")
        yield _gauge(
            "dlion_lease_held",
            "1 where this operator acts on jobs, 0 where another one does",
            self._leases_held(),
            "namespace",
        )
        yield from self._jobs()

    def _jobs(self) -> Iterator[Metric]:
        labels = ("namespace", "job")
        statuses = {
            tuple(name_of(each)): each.get("status") or {}
            for each in self._store.all(Kind.DLION_JOB)
        }
        here = {
            at: site
            for at, status in statuses.items()
            for site in status.get("sites") or ()
            if site.get("name") == self._site
        }
        progress = {
            at: percentage / 100
            for at, status in statuses.items()
            if (percentage := (status.get("trainerStatus") or {}).get("progressPercentage"))
            is not None
        }
        states = {
            (*at, each.value): status.get("state") == each.value
            for at, status in statuses.items()
            for each in State
        }
        text = "1 for the job's current state"
        yield _gauge("dlion_job_state", text, states, *labels, "state")
        text = "Fraction of the training that is done"
        yield _gauge("dlion_job_progress_ratio", text, progress, *labels)
        ready, expected = (
            {at: site.get(field) or 0 for at, site in here.items()}
            for field in ("readyWorkers", "workers")
        )
        text = "Training workers of this site"
        yield _gauge("dlion_job_ready_workers", text, ready, *labels)
        text = "Desired workers of this site"
        yield _gauge("dlion_job_expected_workers", text, expected, *labels)
        revoked = {
            (*at, cause): sum(
                bool(each.get("effective")) and bool(each.get("automatic")) == is_automatic
                for each in status.get("revoked") or ()
            )
            for at, status in statuses.items()
            for cause, is_automatic in (("Revoked", False), ("Quarantined", True))
        }
        text = "Workers and sites that this site refuses"
        yield _gauge("dlion_job_revocations", text, revoked, *labels, "cause")


class FederationMetrics(Collector):
    """The state of the federation, read on request."""

    def __init__(self, node: FederationNode) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        node, label = self._node, "peer_site"

        def of_sites(value: Callable[[SiteName], float | None]) -> dict[SiteName, float]:
            values = {site: value(site) for site in node.clients}
            return {site: figure for site, figure in values.items() if figure is not None}

        yield _gauge(
            "dlion_federation_connected",
            "1 where that site's operator is connected",
            of_sites(lambda site: node.clients[site].connected),
            label,
        )
        yield _gauge(
            "dlion_federation_heartbeat_age_seconds",
            "Time since the last message of that site's operator",
            of_sites(lambda site: node.reachability(site).heartbeat_age_s),
            label,
        )
        yield _gauge(
            "dlion_federation_bundle_valid",
            "1 where that site's bundle is valid",
            of_sites(node.is_bundle_valid),
            label,
        )
        yield _gauge(
            "dlion_federation_round_trip_seconds",
            "Round-trip time at the start of the latest stream to that site",
            of_sites(lambda site: node.clients[site].round_trip_s),
            label,
        )
        yield _counter(
            "dlion_federation_dial_failures",
            "Failed connection attempts to that site's operator, and broken streams",
            of_sites(lambda site: node.clients[site].failures),
            label,
        )
        yield _counter(
            "dlion_federation_sent_bytes",
            "Bytes sent to that site's operator",
            of_sites(lambda site: node.clients[site].sent_bytes),
            label,
        )
        yield from self._calls()

    def _calls(self) -> Iterator[Metric]:
        service, handshakes = self._node.service, self._node.credentials.handshakes
        text = "Refused streams of other sites' operators"
        yield _counter("dlion_federation_refusals", text, service.refusals, "reason")
        text = "TLS handshakes started by other sites"
        yield _counter("dlion_federation_handshakes", text, handshakes)
        text = "Streams opened by other sites after a TLS handshake"
        yield _counter("dlion_federation_streams", text, service.streams)
        text = "Bytes received from other sites to measure links"
        yield _counter("dlion_federation_measured_bytes", text, service.measured_bytes)


_Values = float | Mapping[Any, float]
"""A metric's value, or its values by its label's value or by the tuple of its labels' values."""


def _gauge(name: str, text: str, values: _Values, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _counter(name: str, text: str, values: _Values, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: _Values) -> Metric:
    for at, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric([at] if isinstance(at, str) else at, value)
    return family
