"""API client on top of the `kubernetes` package, which only this module imports.

Documents stay plain mappings: the package's models would cost memory and drop unknown fields. The
package reads the token again every minute.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import yaml
from kubernetes.aio import client, config

from dlion_api.cluster_names import MANAGER
from dlion_api.errors import UnavailableError
from dlion_operator.kubernetes.client import (
    ConflictError,
    Document,
    Kind,
    Listing,
    RequestRefusedError,
    ServerError,
    SigningKeys,
)

_WHOLE_SECONDS = timedelta(seconds=1)
"""A `Date` has no fractions: the real time is later by less than this."""


class ServerClock:
    """Continues from the latest `Date`, by the monotonic clock."""

    def __init__(
        self,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        local: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._monotonic_s = monotonic_s
        self._local = local
        self._epoch: datetime | None = None
        """The server's time at monotonic time 0. None: no `Date` was received yet."""

    def update(self, date: str | None) -> None:
        """Take the `Date` of a response (RFC 9110). An invalid one is ignored."""
        try:
            received = parsedate_to_datetime(date or "")
        except (ValueError, TypeError):
            return
        if received.tzinfo is None:
            return
        earliest = received - timedelta(seconds=self._monotonic_s())
        # Between two responses the time must not jump back by the missing fraction.
        kept = earliest if self._epoch is None else self._epoch
        self._epoch = min(max(kept, earliest), earliest + _WHOLE_SECONDS)

    def now(self) -> datetime:
        """The API server's time; before any response, the local time."""
        if self._epoch is None:
            return self._local()
        return self._epoch + timedelta(seconds=self._monotonic_s())


REQUEST_TIMEOUT_S = 30.0
PAGE = 500
ACCEPTED = "application/json, application/jwk-set+json;q=0.9"
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
_REFUSED = frozenset({400, 403, 404, 405, 413, 415, 422})
"""Not 401: an expired token is read again."""
_UNUSABLE = (
    config.ConfigException, yaml.YAMLError, OSError, ValueError, LookupError, TypeError,
    AttributeError, RecursionError,
)  # fmt: skip
"""What a kubeconfig raises: the library checks neither its shape nor its values."""


async def connect(kubeconfig: str | None = None) -> client.ApiClient:
    """Return a client for the cluster of this process, or of a kubeconfig file.

    Raises: UnavailableError if that is not configured, or is invalid.
    """
    configuration = client.Configuration()
    if kubeconfig is not None:
        load: Any = config.load_kube_config  # untyped
        try:
            await load(config_file=kubeconfig, client_configuration=configuration)
        except _UNUSABLE as error:
            why = f"{type(error).__name__}: {_one_line(error)}"
            raise UnavailableError(f"no cluster: {kubeconfig}: cannot be used: {why}") from error
        return client.ApiClient(configuration)
    try:
        config.load_incluster_config(  # type: ignore[no-untyped-call]
            client_configuration=configuration
        )
    except config.ConfigException as error:
        why = _one_line(error)
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            why += ". Set automountServiceAccountToken: true for this pod"
        else:
            why = f"this process runs in no pod: {why}. Give --kubeconfig FILE"
        raise UnavailableError(f"no cluster: {why}") from error
    return client.ApiClient(configuration)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


class KubernetesApi:
    """Implements `dlion_operator.kubernetes.client.KubernetesClient`."""

    def __init__(
        self,
        api: client.ApiClient,
        on_error: Callable[[int], None],
        *,
        clock: ServerClock | None = None,
    ) -> None:
        """`on_error` is called with each error's HTTP status; 0: no answer."""
        self._api = api
        self._on_error = on_error
        self._clock = clock or ServerClock()

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    def now(self) -> datetime:
        """Return the API server's time from its answers; before the first one, the local time."""
        return self._clock.now()

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        return await self._send("GET", _path(kind, namespace, name), absent_ok=True)

    async def serves(self, kind: Kind) -> bool:
        api_version, _, plural = kind.value
        found = await self._send("GET", f"/apis/{api_version}", absent_ok=True) or {}
        return any(each.get("name") == plural for each in found.get("resources") or ())

    async def list(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        selector: str = "",
        metadata_only: bool = False,
    ) -> Listing:
        items: list[Document] = []
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        accept = METADATA if metadata_only else ACCEPTED
        while True:
            page = await self._request("GET", _path(kind, namespace), query=query, accept=accept)
            for item in page.get("items") or ():
                # Thousands of objects are in memory at once: drop what is not read.
                item["metadata"].pop("managedFields", None)
                items.append(_identity(item) if metadata_only else item)
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return Listing(items, str(metadata.get("resourceVersion", "")))
            query["continue"] = metadata["continue"]

    async def create(self, document: Document, *, dry_run: bool = False) -> Document:
        kind, namespace = Kind.of(document), document["metadata"]["namespace"]
        query = {"fieldManager": MANAGER} | ({"dryRun": "All"} if dry_run else {})
        return await self._request("POST", _path(kind, namespace), document, query=query)

    async def apply(self, document: Document) -> Document:
        metadata = document["metadata"]
        path = _path(Kind.of(document), metadata["namespace"], metadata["name"])
        query = {"fieldManager": MANAGER, "force": "true"}
        return await self._request("PATCH", path, document, query=query, content_type=APPLY)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Document, *, subresource: str = ""
    ) -> Document | None:
        path = _path(kind, namespace, name, subresource)
        query = {"fieldManager": MANAGER}
        return await self._send(
            "PATCH", path, patch, query=query, content_type=MERGE, absent_ok=True
        )

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        resource_version: str = "",
        grace_s: int | None = None,
    ) -> None:
        options: Document = {"propagationPolicy": "Background"}
        required = {"uid": uid, "resourceVersion": resource_version}
        if preconditions := {field: value for field, value in required.items() if value}:
            options["preconditions"] = preconditions
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        await self._send("DELETE", _path(kind, namespace, name), options, absent_ok=True)

    async def signing_keys(self) -> SigningKeys:
        jwks = await self._request("GET", "/openid/v1/jwks")
        issuer = (await self._request("GET", "/.well-known/openid-configuration"))["issuer"]
        return SigningKeys(json.dumps(jwks).encode(), str(issuer))

    async def _request(self, method: str, path: str, *args: Any, **keywords: Any) -> Document:
        document = await self._send(method, path, *args, **keywords)
        assert document is not None, path
        return document

    async def _send(
        self,
        method: str,
        path: str,
        body: Document | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = ACCEPTED,
        absent_ok: bool = False,
    ) -> Document | None:
        headers = {"Accept": accept, "Content-Type": content_type, "User-Agent": MANAGER}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._api.configuration.host}{path}"
        try:
            response = await self._api.rest_client.request(  # type: ignore[no-untyped-call]
                method,
                f"{url}?{urlencode(query)}" if query else url,
                headers=headers,
                body=body,
                _request_timeout=REQUEST_TIMEOUT_S,
            )
            data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._on_error(0)
            raise ServerError(f"{method} {path}: {type(error).__name__}: {error}") from error
        self._clock.update(response.headers.get("Date"))
        if response.status == 404 and absent_ok:
            return None
        return self._checked_response(response.status, data, f"{method} {path}")

    def _checked_response(self, code: int, data: bytes, what: str) -> Document:
        if 200 <= code < 300:
            with contextlib.suppress(ValueError, RecursionError):
                document = json.loads(data)
                if isinstance(document, dict):
                    return document
            self._on_error(code)
            raise ServerError(f"{what}: the answer is no JSON object: {data[:80]!r}")
        self._on_error(code)
        message = f"{what}: {code} {_error_text(data)}"
        if code == 409:
            raise ConflictError(message)
        if code in _REFUSED:
            raise RequestRefusedError(message, code)
        raise ServerError(message)


def _identity(item: Document) -> Document:
    """Which object that is, and in which version."""
    kept = ("namespace", "name", "uid", "resourceVersion", "labels")
    return {"metadata": {key: item["metadata"].get(key) for key in kept}}


def _path(kind: Kind, namespace: str | None, name: str = "", subresource: str = "") -> str:
    api_version, _, plural = kind.value
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    scope = "" if not namespace else f"/namespaces/{quote(namespace, safe='')}"
    suffix = "".join(f"/{quote(part, safe='')}" for part in (name, subresource) if part)
    return f"{root}{scope}/{plural}{suffix}"


def _error_text(data: bytes) -> str:
    """Return the API server's message, or the start of its answer."""
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data[:500].decode(errors="replace")
