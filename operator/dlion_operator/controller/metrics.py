"""The operator's own Prometheus metrics. docs/metrics.md lists them, and a test compares both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlion_api.names import JobKey, SiteName
from dlion_api.status import State
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
        self._restores = Counter(
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

    def restored(self) -> None:
        """Count a decrease of resource versions."""
        self._restores.inc()

    def api_error(self, code: int) -> None:
        """Count an error response, or no response (0)."""
        self._api_errors.labels(str(code)).inc()


class JobMetrics(Collector):
    """Read on request: the jobs' statuses, refusals, the freshness of watches."""

    def __init__(
        self,
        store: ClusterStore,
        *,
        site: SiteName,
        refusals: Callable[[], Mapping[str, int]],
        calls: Callable[[], Mapping[str, int]],
        keeper_refusals: Callable[[], Mapping[JobKey, Mapping[str, int]]],
        watch_age_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._site = site
        self._refusals = refusals
        self._calls = calls
        self._keeper_refusals = keeper_refusals
        self._watch_age_s = watch_age_s

    def collect(self) -> Iterator[Metric]:
        age = GaugeMetricFamily(
            "dlion_operator_watch_age_seconds",
            "Time since the watches were last confirmed by a list",
        )
        age.add_metric([], self._watch_age_s())
        yield age
        refused = CounterMetricFamily(
            "dlion_coordinator_refusals", "Refused calls of workers", labels=["reason"]
        )
        for reason, count in self._refusals().items():
            refused.add_metric([reason], count)
        yield refused
        called = CounterMetricFamily(
            "dlion_coordinator_calls", "Calls of workers and keepers", labels=["call"]
        )
        for call, count in self._calls().items():
            called.add_metric([call], count)
        yield called
        kept_off = CounterMetricFamily(
            "dlion_keeper_refusals",
            "Callers that the site's keeper refused",
            labels=["namespace", "job", "reason"],
        )
        for run, refusals in self._keeper_refusals().items():
            for reason, count in refusals.items():
                kept_off.add_metric([run.namespace, run.name, reason], count)
        yield kept_off
        yield from self._jobs()

    def _jobs(self) -> Iterator[Metric]:
        labels = ["namespace", "job"]
        state = GaugeMetricFamily(
            "dlion_job_state", "1 for the job's current state", labels=[*labels, "state"]
        )
        progress = GaugeMetricFamily(
            "dlion_job_progress_ratio", "Fraction of the training that is done", labels=labels
        )
        ready = GaugeMetricFamily(
            "dlion_job_ready_workers", "Training workers of this site", labels=labels
        )
        expected = GaugeMetricFamily(
            "dlion_job_expected_workers", "Desired workers of this site", labels=labels
        )
        for document in self._store.all(Kind.DLION_JOB):
            metadata, status = document["metadata"], document.get("status") or {}
            at = [str(metadata["namespace"]), str(metadata["name"])]
            for each in State:
                state.add_metric([*at, each.value], float(status.get("state") == each.value))
            percentage = (status.get("trainerStatus") or {}).get("progressPercentage")
            if percentage is not None:
                progress.add_metric(at, percentage / 100)
            for site in status.get("sites") or ():
                if site.get("name") == self._site:
                    ready.add_metric(at, site.get("readyWorkers") or 0)
                    expected.add_metric(at, site.get("workers") or 0)
        yield from (state, progress, ready, expected)


class LeaseMetrics(Collector):
    """In which namespaces this operator acts, read on request."""

    def __init__(self, held: Callable[[], Mapping[str, bool]]) -> None:
        self._held = held

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "dlion_lease_held",
            "1 where this operator acts on jobs, 0 where another one does",
            labels=["namespace"],
        )
        for namespace, is_held in self._held().items():
            family.add_metric([namespace], float(is_held))
        yield family


class FederationMetrics(Collector):
    """The state of the federation, read on request."""

    def __init__(self, node: FederationNode) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        labels = ["peer_site"]
        connected = GaugeMetricFamily(
            "dlion_federation_connected", "1 where that site's operator is connected", labels=labels
        )
        age = GaugeMetricFamily(
            "dlion_federation_heartbeat_age_seconds",
            "Time since the last message of that site's operator",
            labels=labels,
        )
        bundle = GaugeMetricFamily(
            "dlion_federation_bundle_valid", "1 where that site's bundle is valid", labels=labels
        )
        round_trip = GaugeMetricFamily(
            "dlion_federation_round_trip_seconds",
            "Round-trip time at the start of the latest stream to that site",
            labels=labels,
        )
        failures = CounterMetricFamily(
            "dlion_federation_dial_failures",
            "Failed connection attempts to that site's operator, and broken streams",
            labels=labels,
        )
        sent = CounterMetricFamily(
            "dlion_federation_sent_bytes", "Bytes sent to that site's operator", labels=labels
        )
        for site, client in self._node.clients.items():
            connected.add_metric([site], float(client.connected))
            bundle.add_metric([site], float(self._node.is_bundle_valid(site)))
            failures.add_metric([site], client.failures)
            sent.add_metric([site], client.sent_bytes)
            reachability = self._node.reachability(site)
            if reachability.heartbeat_age_s is not None:
                age.add_metric([site], reachability.heartbeat_age_s)
            if client.round_trip_s is not None:
                round_trip.add_metric([site], client.round_trip_s)
        yield from (connected, age, bundle, round_trip, failures, sent)
        yield from self._calls()

    def _calls(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "dlion_federation_refusals",
            "Refused streams of other sites' operators",
            labels=["reason"],
        )
        for reason, count in self._node.service.refusals.items():
            refused.add_metric([reason.value], count)
        handshakes = CounterMetricFamily(
            "dlion_federation_handshakes", "TLS handshakes started by other sites"
        )
        handshakes.add_metric([], self._node.credentials.handshakes)
        streams = CounterMetricFamily(
            "dlion_federation_streams", "Streams opened by other sites after a TLS handshake"
        )
        streams.add_metric([], self._node.service.streams)
        measured = CounterMetricFamily(
            "dlion_federation_measured_bytes", "Bytes received from other sites to measure links"
        )
        measured.add_metric([], self._node.service.measured_bytes)
        yield from (refused, handshakes, streams, measured)
