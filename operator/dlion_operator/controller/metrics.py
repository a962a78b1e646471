"""The operator's own Prometheus metrics. docs/metrics.md lists them, and a test compares both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlion_api.names import SiteName
from dlion_api.status import State
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.federation.node import FederationNode
from dlion_operator.kubernetes.client import Kind
from dlion_operator.kubernetes.store import ClusterStore

BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 30.0)


class OperatorMetrics:
    """Counts events as they happen. `registry` holds all metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._reconciles = Counter(
            "dlion_operator_reconciles",
            "Reconcile passes, by result",
            ["result"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "dlion_operator_reconcile_seconds",
            "Duration of a reconcile pass",
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._api_errors = Counter(
            "dlion_operator_api_errors",
            "Error responses of the API server, by code; 0: no response",
            ["code"],
            registry=self.registry,
        )
        self.restores = Counter(
            "dlion_operator_restores",
            "Decreases of the API server's resource versions, as after a restore of etcd",
            registry=self.registry,
        )
        self.loop_lag_seconds = Gauge(
            "dlion_operator_loop_lag_seconds",
            "Latest lag of the operator's event loop",
            registry=self.registry,
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
            [],
            [([], self._watch_age_s())],
        )
        yield _counter(
            "dlion_coordinator_refusals",
            "Refused calls of workers",
            ["reason"],
            [([reason.value], count) for reason, count in service.refusals.items()],
        )
        yield _counter(
            "dlion_coordinator_calls",
            "Calls of workers and keepers",
            ["call"],
            [([call], count) for call, count in service.calls.items()],
        )
        yield _counter(
            "dlion_keeper_refusals",
            "Callers that the site's keeper refused",
            ["namespace", "job", "reason"],
            [
                ([key.namespace, key.name, reason], count)
                for key, run in runs.items()
                for reason, count in run.keeper_refusals.items()
            ],
        )
        yield _gauge(
            "dlion_lease_held",
            "1 where this operator acts on jobs, 0 where another one does",
            ["namespace"],
            [([namespace], float(is_held)) for namespace, is_held in self._leases_held().items()],
        )
        yield from self._jobs()

    def _jobs(self) -> Iterator[Metric]:
        labels = ["namespace", "job"]
        statuses = [
            (
                [str(each["metadata"][key]) for key in ("namespace", "name")],
                each.get("status") or {},
            )
            for each in self._store.all(Kind.DLION_JOB)
        ]
        here = [
            (at, site)
            for at, status in statuses
            for site in status.get("sites") or ()
            if site.get("name") == self._site
        ]
        progress = [
            (at, (status.get("trainerStatus") or {}).get("progressPercentage"))
            for at, status in statuses
        ]
        yield _gauge(
            "dlion_job_state",
            "1 for the job's current state",
            [*labels, "state"],
            [
                ([*at, each.value], float(status.get("state") == each.value))
                for at, status in statuses
                for each in State
            ],
        )
        yield _gauge(
            "dlion_job_progress_ratio",
            "Fraction of the training that is done",
            labels,
            [(at, percentage / 100) for at, percentage in progress if percentage is not None],
        )
        yield _gauge(
            "dlion_job_ready_workers",
            "Training workers of this site",
            labels,
            [(at, site.get("readyWorkers") or 0) for at, site in here],
        )
        yield _gauge(
            "dlion_job_expected_workers",
            "Desired workers of this site",
            labels,
            [(at, site.get("workers") or 0) for at, site in here],
        )


class FederationMetrics(Collector):
    """The state of the federation, read on request."""

    def __init__(self, node: FederationNode) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        node, labels = self._node, ["peer_site"]

        def of_sites(value: Callable[[SiteName], float | None]) -> list[_Sample]:
            values = {site: value(site) for site in node.clients}
            return [([site], figure) for site, figure in values.items() if figure is not None]

        yield _gauge(
            "dlion_federation_connected",
            "1 where that site's operator is connected",
            labels,
            of_sites(lambda site: float(node.clients[site].connected)),
        )
        yield _gauge(
            "dlion_federation_heartbeat_age_seconds",
            "Time since the last message of that site's operator",
            labels,
            of_sites(lambda site: node.reachability(site).heartbeat_age_s),
        )
        yield _gauge(
            "dlion_federation_bundle_valid",
            "1 where that site's bundle is valid",
            labels,
            of_sites(lambda site: float(node.is_bundle_valid(site))),
        )
        yield _gauge(
            "dlion_federation_round_trip_seconds",
            "Round-trip time at the start of the latest stream to that site",
            labels,
            of_sites(lambda site: node.clients[site].round_trip_s),
        )
        yield _counter(
            "dlion_federation_dial_failures",
            "Failed connection attempts to that site's operator, and broken streams",
            labels,
            of_sites(lambda site: node.clients[site].failures),
        )
        yield _counter(
            "dlion_federation_sent_bytes",
            "Bytes sent to that site's operator",
            labels,
            of_sites(lambda site: node.clients[site].sent_bytes),
        )
        yield from self._calls()

    def _calls(self) -> Iterator[Metric]:
        node, service = self._node, self._node.service
        yield _counter(
            "dlion_federation_refusals",
            "Refused streams of other sites' operators",
            ["reason"],
            [([reason.value], count) for reason, count in service.refusals.items()],
        )
        yield _counter(
            "dlion_federation_handshakes",
            "TLS handshakes started by other sites",
            [],
            [([], node.credentials.handshakes)],
        )
        yield _counter(
            "dlion_federation_streams",
            "Streams opened by other sites after a TLS handshake",
            [],
            [([], service.streams)],
        )
        yield _counter(
            "dlion_federation_measured_bytes",
            "Bytes received from other sites to measure links",
            [],
            [([], service.measured_bytes)],
        )


_Sample = tuple[list[str], float]
"""Values of the labels, and of the metric."""


def _gauge(name: str, text: str, labels: list[str], samples: list[_Sample]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for at, value in samples:
        family.add_metric(at, value)
    return family


def _counter(name: str, text: str, labels: list[str], samples: list[_Sample]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for at, value in samples:
        family.add_metric(at, value)
    return family
