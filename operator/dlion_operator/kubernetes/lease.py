"""One Lease in each namespace with jobs: of several operators only its holder acts there.

Otherwise two releases of the chart would write the same status in turn. The rules are client-go's
(leaderelection): a holder renews its Lease by a patch that names the old version. Another operator
takes over a Lease that has not changed for its duration, by its own clock.

Ours: a pause without answers from the API server restarts that time, so an outage moves no Lease. A
process with the holder's name continues at once. A released Lease is deleted, and `LeasedCluster`
blocks writes without a Lease.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dlion_api.cluster_names import MANAGED_BY_LABEL, MANAGER
from dlion_api.errors import DLionError
from dlion_operator.kubernetes.client import (
    ConflictError,
    Document,
    Kind,
    KubernetesClient,
    RequestRefusedError,
    ServerError,
)
from dlion_operator.kubernetes.store import as_number, version_of

_LOG = logging.getLogger(__name__)

LEASE_NAME = "dlion-operator"
DURATION_S = 15
RENEW_INTERVAL_S = 5.0
POLL_INTERVAL_S = 2.0
"""Interval for a Lease that is not held or could not be renewed."""
HOLD_TIMEOUT_S = 12.0
"""Counted from the start of the last renewal. Pending requests then finish before another operator
may begin."""
MAX_POLL_GAP_S = 5.0
"""After a longer gap between two polls the time since the last change is unknown."""
REQUEST_TIMEOUT_S = 4.0
NAMESPACE_TERMINATING = "is being terminated"
"""Part of the API server's message for a namespace in which nothing can be created any more."""


@dataclass
class _LeaseState:
    due_s: float = float("-inf")
    version: str = ""
    uid: str = ""
    unchanged_since_s: float = 0.0
    """The start of its present version, as observed without a gap."""
    checked_s: float = float("-inf")
    renewed_s: float = float("-inf")
    """When the last renewal by this operator began."""
    is_ours: bool = False
    was_held: bool = False
    logged: str | None = None
    """The holder or the error that was logged last."""


class Leases:
    """The Leases of all namespaces in which this operator has work."""

    def __init__(
        self,
        cluster: KubernetesClient,
        identity: str,
        *,
        wanted: Callable[[], Collection[str]],
        on_held: Callable[[str], None],
        on_older: Callable[[], None] = lambda: None,
        now: Callable[[], datetime],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wanted` returns the namespaces. `on_held` is called when a namespace's Lease becomes
        held. `on_older` is called when a Lease is older than this operator left it: only a restore
        of etcd does that, and a renewal finds it within seconds.

        `now` is written into Leases, for users only; no decision depends on it.
        """
        self._cluster = cluster
        self._identity = identity
        self._wanted = wanted
        self._on_held = on_held
        self._on_older = on_older
        self._now = now
        self._monotonic_s = monotonic_s
        self._states: dict[str, _LeaseState] = {}
        self._wake = asyncio.Event()

    def holds(self, namespace: str) -> bool:
        """Whether this operator may write there now. An unknown namespace is looked up soon."""
        state = self._states.get(namespace)
        if state is None:
            self._wake.set()
            return False
        is_recent = self._monotonic_s() - state.renewed_s < HOLD_TIMEOUT_S
        return state.is_ours and is_recent

    def held(self) -> dict[str, bool]:
        return {namespace: self.holds(namespace) for namespace in tuple(self._states)}

    async def run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.run_once()
            except Exception:  # noqa: BLE001 - without its Leases the operator would do nothing
                _LOG.exception("Leases could not be checked: a defect in DLion")
                await asyncio.sleep(POLL_INTERVAL_S)
            waits = [each.due_s - self._monotonic_s() for each in self._states.values()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min([POLL_INTERVAL_S, *waits]))):
                    await self._wake.wait()

    async def run_once(self) -> None:
        wanted = set(self._wanted())
        for namespace in wanted - self._states.keys():
            self._states[namespace] = _LeaseState()
        unwanted = self._states.keys() - wanted
        due = {n for n, state in self._states.items() if state.due_s <= self._monotonic_s()}
        # One that is no longer wanted is released at once, and again when due.
        released = {n for n in unwanted if n in due or self._states[n].is_ours}
        checks = map(self._check, due & wanted)
        await asyncio.gather(*checks, *map(self._release, released))

    async def release(self) -> None:
        """Release all Leases, so that another operator can continue at once. Write nothing
        afterwards."""
        await asyncio.gather(*map(self._release, tuple(self._states)))

    async def _check(self, namespace: str) -> None:
        state = self._states[namespace]
        began_s = self._monotonic_s()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._hold(namespace, state)
        except ConflictError:
            state.is_ours = False  # another operator was faster: check again
        except (DLionError, TimeoutError) as error:
            self._log_once(namespace, state, f"{type(error).__name__} {error}", "is unavailable")
        held = self.holds(namespace)
        if state.was_held and not held:
            _LOG.warning("namespace %s: its Lease is no longer held", namespace)
        if held and not state.was_held:
            state.logged = None
            _LOG.info("namespace %s: this operator (%s) acts there", namespace, self._identity)
        is_new, state.was_held = held and not state.was_held, held
        is_renewed = held and state.renewed_s >= began_s
        every_s = RENEW_INTERVAL_S if is_renewed else POLL_INTERVAL_S
        state.due_s = self._monotonic_s() + every_s
        if is_new:
            self._on_held(namespace)

    async def _hold(self, namespace: str, state: _LeaseState) -> None:
        began_s = self._monotonic_s()
        if state.is_ours:
            spec = {"renewTime": self._written_now()}
            with contextlib.suppress(ConflictError):  # its labels may have been changed
                if await self._patch(namespace, state, spec, began_s):
                    return
            state.is_ours = False
        lease = await self._cluster.get(Kind.LEASE, namespace, LEASE_NAME)
        if lease is None:
            await self._make(namespace, state, began_s)
            return
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        if lease["metadata"]["uid"] == state.uid and version_of(lease) < as_number(state.version):
            self._on_older()
        if self._may_take(state, lease, holder):
            spec = self._takeover_spec(lease, holder)
            await self._patch(namespace, state, spec, began_s)
        else:
            self._log_once(namespace, state, holder, "is held by another operator")

    async def _make(self, namespace: str, state: _LeaseState, began_s: float) -> None:
        try:
            made = await self._cluster.create(self._lease(namespace))
        except RequestRefusedError as error:
            if NAMESPACE_TERMINATING not in str(error):
                raise
            # No operator can hold a Lease there. Pods on lost nodes must still be released.
            state.renewed_s, state.is_ours = began_s, True
        else:
            self._record_renewal(state, made, renewed_s=began_s)

    def _may_take(self, state: _LeaseState, lease: Document, holder: str) -> bool:
        """Whether the Lease is free. Records its version."""
        now_s, version = self._monotonic_s(), str(lease["metadata"]["resourceVersion"])
        is_broken = now_s - state.checked_s > MAX_POLL_GAP_S
        if version != state.version or is_broken:
            state.unchanged_since_s = now_s
        state.version, state.checked_s = version, now_s
        state.uid = str(lease["metadata"]["uid"])
        duration_s = (lease.get("spec") or {}).get("leaseDurationSeconds") or DURATION_S
        return holder in ("", self._identity) or now_s - state.unchanged_since_s >= duration_s

    async def _patch(
        self, namespace: str, state: _LeaseState, spec: Document, began_s: float
    ) -> bool:
        """Patch the Lease. Return whether it exists and is ours now.

        Raises: ConflictError if its version is not the known one, and other request errors.
        """
        metadata = {"resourceVersion": state.version, "uid": state.uid}
        patch: Document = {"metadata": metadata, "spec": spec}
        patched = await self._cluster.patch(Kind.LEASE, namespace, LEASE_NAME, patch)
        if patched is None:
            state.is_ours = False
            return False
        self._record_renewal(state, patched, renewed_s=began_s)
        return True

    def _record_renewal(self, state: _LeaseState, lease: Document, *, renewed_s: float) -> None:
        metadata = lease["metadata"]
        state.version, state.uid = str(metadata["resourceVersion"]), str(metadata["uid"])
        state.renewed_s, state.is_ours = renewed_s, True

    async def _release(self, namespace: str) -> None:
        """Delete the Lease, if this operator holds it. A failed deletion is repeated when due."""
        state = self._states[namespace]
        # From here on nothing is written there.
        was_ours, state.is_ours, state.was_held = state.is_ours, False, False
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._delete(namespace, state, was_ours=was_ours)
        except (DLionError, TimeoutError) as error:
            self._log_once(namespace, state, str(error), "could not be deleted")
            state.due_s = self._monotonic_s() + POLL_INTERVAL_S
        else:
            del self._states[namespace]

    async def _delete(self, namespace: str, state: _LeaseState, *, was_ours: bool) -> None:
        if was_ours:
            with contextlib.suppress(ConflictError):
                await self._delete_version(namespace, state.uid, state.version)
                return
        # A request without an answer may have created or renewed it.
        lease = await self._cluster.get(Kind.LEASE, namespace, LEASE_NAME)
        if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
            metadata = lease["metadata"]
            await self._delete_version(namespace, metadata["uid"], metadata["resourceVersion"])

    async def _delete_version(self, namespace: str, uid: str, version: str) -> None:
        await self._cluster.delete(
            Kind.LEASE, namespace, LEASE_NAME, uid=uid, resource_version=version
        )

    def _log_once(self, namespace: str, state: _LeaseState, subject: str, message: str) -> None:
        if state.logged != subject:
            state.logged = subject
            _LOG.warning("namespace %s: Lease %s %s: %s", namespace, LEASE_NAME, message, subject)

    def _written_now(self) -> str:
        return self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _takeover_spec(self, lease: Document, holder: str) -> Document:
        transitions = int((lease.get("spec") or {}).get("leaseTransitions") or 0)
        if holder == self._identity:
            return self._holder_spec()
        new = {"acquireTime": self._written_now(), "leaseTransitions": transitions + 1}
        return self._holder_spec() | new

    def _lease(self, namespace: str) -> Document:
        labels = {MANAGED_BY_LABEL: MANAGER}
        metadata = {"name": LEASE_NAME, "namespace": namespace, "labels": labels}
        spec = self._holder_spec() | {"acquireTime": self._written_now(), "leaseTransitions": 0}
        return Kind.LEASE.document(metadata, spec=spec)

    def _holder_spec(self) -> Document:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_S,
            "renewTime": self._written_now(),
        }


class LeasedCluster:
    """A `KubernetesClient` that writes only where this operator holds the Lease.

    Reads and dry runs always pass. A write without the Lease raises ServerError: the Lease may be
    acquired again.
    """

    def __init__(self, cluster: KubernetesClient, leases: Leases) -> None:
        self._cluster = cluster
        self._leases = leases
        self.get, self.list, self.serves = cluster.get, cluster.list, cluster.serves

    def _check(self, namespace: str, what: str) -> None:
        if not self._leases.holds(namespace):
            why = f"Lease {LEASE_NAME} of namespace {namespace} is not held"
            raise ServerError(f"{what} is not written: {why}")

    async def create(self, document: Document, *, dry_run: bool = False) -> Document:
        if not dry_run:
            self._check(document["metadata"]["namespace"], f"{document['kind']}")
        return await self._cluster.create(document, dry_run=dry_run)

    async def apply(self, document: Document) -> Document:
        self._check(document["metadata"]["namespace"], f"{document['kind']}")
        return await self._cluster.apply(document)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Document, **options: Any
    ) -> Document | None:
        self._check(namespace, f"{kind.name} {name}")
        return await self._cluster.patch(kind, namespace, name, patch, **options)

    async def delete(self, kind: Kind, namespace: str, name: str, **options: Any) -> None:
        self._check(namespace, f"{kind.name} {name}")
        await self._cluster.delete(kind, namespace, name, **options)
