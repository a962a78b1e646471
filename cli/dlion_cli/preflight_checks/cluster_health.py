"""Checks of a cluster for `dlion doctor`: its API server, its operator and what jobs need there.

Each check runs in its own thread. All wait for the first answer of the API server; without one they
are not made. Only reads, except for the reviews of the user's own rights.
`cluster_objects` judges what is read.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from dlion_api.errors import AbsentError, DeniedError, DLionError
from dlion_cli.cluster.api_errors import CredentialsRejectedError
from dlion_cli.cluster.client import ClusterClient, api_path, connect
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.cluster.documents import OPERATOR_SELECTOR, mapping_of
from dlion_cli.cluster.rights import COMMAND_RIGHTS, is_allowed
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.client_credentials import credentials_check
from dlion_cli.preflight_checks.cluster_objects import (
    CLUSTER,
    events_check,
    image_check,
    lease_check,
    nodes_check,
    quota_check,
    rights_check,
    storage_check,
)
from dlion_cli.preflight_checks.site_checks import (
    clock_check,
    definition_check,
    operator_check,
    query_error_check,
)
from dlion_cli.preflight_checks.site_cluster import (
    find_operator,
    items_of,
    operator_settings,
    parse_date,
    read_clock,
    read_schema,
)
from dlion_cli.preflight_checks.timed_checks import TimedCheck
from dlion_operator.kubernetes.lease import LEASE_NAME


@dataclass(frozen=True)
class ClusterAccess:
    """The options that select a cluster."""

    connection: ConnectionSettings
    """Its namespace is that of jobs."""
    operator_namespace: str
    within_s: float
    """Limit of each response."""


class ClusterHealth:
    """The checks of one cluster."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._client: Future[ClusterClient] = Future()
        self._answering: Future[ClusterClient] = Future()

    def checks(self) -> list[TimedCheck]:
        """The checks, which have not run yet."""
        first = [
            TimedCheck(
                CLUSTER, "kubeconfig", self._connect,
                late_advice="Its credential plugin does not end: run kubectl version",
            ),
            TimedCheck(CLUSTER, "credentials", self._credentials, CheckOutcome.UNKNOWN),
            TimedCheck(CLUSTER, "api server", self._api_server),
        ]  # fmt: skip
        queries: dict[str, Callable[[ClusterClient], Check]] = {
            "clock": self._clock,
            "definition": self._definition,
            "operator": self._operator,
            "lease": self._lease,
            "operator events": self._events,
            "storage": self._storage,
            "nodes": self._nodes,
            "quota": self._quota,
            "rights": self._rights,
        }
        return [
            *first,
            *(
                TimedCheck(CLUSTER, name, partial(self._query, name, query), CheckOutcome.UNKNOWN)
                for name, query in queries.items()
            ),
        ]

    def _connect(self) -> Check:
        try:
            client = connect(self._access.connection)
        except Exception as error:
            self._client.set_exception(error)
            raise
        self._client.set_result(client)
        observed = f"context {client.context}, namespace {client.namespace}, {client.server}"
        return Check(CLUSTER, "kubeconfig", CheckOutcome.OK, observed)

    def _credentials(self) -> Check:
        if self._client.exception() is not None:
            return _not_made("credentials", "there is no usable kubeconfig")
        client = self._client.result()
        token, certificate = client.bearer_token(), client.client_certificate()
        return credentials_check(CLUSTER, token, certificate, datetime.now(UTC))

    def _api_server(self) -> Check:
        if (failed := self._client.exception()) is not None:
            self._answering.set_exception(failed)
            return _not_made("api server", "there is no usable kubeconfig")
        client = self._client.result()
        began_s = time.monotonic()
        try:
            answer = client.get("/version", timeout_s=self._access.within_s)
        except CredentialsRejectedError as error:
            self._answering.set_exception(error)
            raise
        except DeniedError:  # it answers; other requests may be allowed
            answer = {}
        except Exception as error:
            self._answering.set_exception(error)
            raise
        took_s = time.monotonic() - began_s
        self._answering.set_result(client)
        release = answer.get("gitVersion") or "of an unknown version"
        observed = f"Kubernetes {release} answers in {took_s * 1e3:.0f} ms"
        return Check(
            CLUSTER, "api server", CheckOutcome.OK, observed, figures={"response_s": took_s}
        )

    def _query(self, name: str, query: Callable[[ClusterClient], Check]) -> Check:
        if self._answering.exception() is not None:
            return _not_made(name, "the API server does not answer us")
        try:
            return query(self._answering.result())
        except DLionError as error:
            return query_error_check(CLUSTER, name, error)

    def _clock(self, client: ClusterClient) -> Check:
        _, bounds = read_clock(client, self._access.within_s)
        if bounds is None:
            return Check(CLUSTER, "clock", CheckOutcome.UNKNOWN, "its answers have no usable Date")
        return clock_check(CLUSTER, bounds)

    def _definition(self, client: ClusterClient) -> Check:
        return definition_check(CLUSTER, read_schema(client, self._access.within_s))

    def _operators(self, client: ClusterClient) -> ClusterClient:
        return client.in_namespace(self._access.operator_namespace)

    def _operator(self, client: ClusterClient) -> Check:
        there = self._operators(client)
        try:
            deployment = find_operator(there, self._access.within_s)
        except AbsentError:
            observed = f"there is none in namespace {there.namespace}"
            advice = "Install it (helm install dlion helm/dlion), or give --operator-namespace"
            return Check(CLUSTER, "operator", CheckOutcome.FAIL, observed, advice)
        found = operator_check(CLUSTER, deployment, there.context, there.namespace)
        return image_check(deployment) if found.outcome is CheckOutcome.OK else found

    def _lease(self, client: ClusterClient) -> Check:
        path = api_path(
            "apis", "coordination.k8s.io", "v1", "namespaces", client.namespace, "leases",
            LEASE_NAME,
        )  # fmt: skip
        try:
            answer = client.request("GET", path, timeout_s=self._access.within_s)
        except AbsentError:
            observed = f"none in namespace {client.namespace}: it has had no job yet"
            return Check(CLUSTER, "lease", CheckOutcome.OK, observed)
        now = parse_date(answer.date) or datetime.now(UTC)  # holders' clocks follow that server's
        return lease_check(mapping_of(answer.document.get("spec")), now)

    def _events(self, client: ClusterClient) -> Check:
        there, within_s = self._operators(client), self._access.within_s
        query = {"labelSelector": OPERATOR_SELECTOR}
        pods = items_of(there.get(there.core_path("pods"), query, timeout_s=within_s))
        query = {"fieldSelector": "type=Warning"}
        events = items_of(there.get(there.core_path("events"), query, timeout_s=within_s))
        return events_check(pods, events, datetime.now(UTC))

    def _storage(self, client: ClusterClient) -> Check:
        there, within_s = self._operators(client), self._access.within_s
        try:
            deployment = find_operator(there, within_s)
        except AbsentError:
            return _not_made("storage", "there is no operator")
        name = str(mapping_of(deployment.get("metadata")).get("name"))
        keeper = mapping_of(operator_settings(there, name, within_s).get("keeper"))
        if claim := keeper.get("claimName"):
            path = client.core_path("persistentvolumeclaims", str(claim))
            phase = mapping_of(client.get(path, timeout_s=within_s).get("status")).get("phase")
            observed = f"claim {claim} is {phase}"
            if phase == "Bound":
                return Check(CLUSTER, "storage", CheckOutcome.OK, observed)
            advice = f"kubectl -n {client.namespace} describe pvc {claim} shows the cause"
            return Check(CLUSTER, "storage", CheckOutcome.WARN, observed, advice)
        if not keeper.get("size"):
            observed = "keepers have no claim: a job's data is lost with its keeper's pod"
            advice = "Set keeper.size in the chart's values"
            return Check(CLUSTER, "storage", CheckOutcome.WARN, observed, advice)
        path = api_path("apis", "storage.k8s.io", "v1", "storageclasses")
        classes = items_of(client.get(path, timeout_s=within_s))
        return storage_check(str(keeper.get("storageClassName") or ""), classes)

    def _nodes(self, client: ClusterClient) -> Check:
        nodes = items_of(client.get("/api/v1/nodes", timeout_s=self._access.within_s))
        return nodes_check(nodes)

    def _quota(self, client: ClusterClient) -> Check:
        path = client.core_path("resourcequotas")
        return quota_check(
            client.namespace, items_of(client.get(path, timeout_s=self._access.within_s))
        )

    def _rights(self, client: ClusterClient) -> Check:
        distinct = dict.fromkeys(each for rights in COMMAND_RIGHTS.values() for each in rights)
        allowed = {right for right in distinct if is_allowed(client, right, self._access.within_s)}
        missing = {
            command: [right.text for right in rights if right not in allowed]
            for command, rights in COMMAND_RIGHTS.items()
        }
        return rights_check(client.namespace, missing)


def _not_made(name: str, why: str) -> Check:
    return Check(CLUSTER, name, CheckOutcome.UNKNOWN, f"not checked: {why}")
