"""One Lease in each namespace with jobs: of several operators only its holder acts on them.

Two releases of the chart would else write one status in turn, wherever they are installed. The
rules are client-go's (leaderelection): a Lease is held as long as it is renewed, by a patch that
names the version that it changes; and taken over once it has stood unchanged for its duration by
the clock of whoever looks. Ours: a look that found the API server away begins that time anew, so
that an outage moves no Lease; a process with the holder's name goes on at once; a Lease that is let
go is deleted.

Owns when a Lease is asked for and whether it is held. `leased_cluster` refuses writes without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime

from dlion_api.cluster_names import MANAGED_BY_LABEL, MANAGER
from dlion_api.errors import DLionError
from dlion_operator.cluster import Cluster, ConflictError, Document, Kind, RefusedError

_LOG = logging.getLogger(__name__)

LEASE_NAME = "dlion-operator"
DURATION_S = 15
RENEWED_EVERY_S = 5.0
LOOKED_AT_EVERY_S = 2.0
"""By whoever does not hold it, or could not renew it."""
HELD_FOR_S = 12.0
"""After the last renewal began: what is on its way then is done before another may begin."""
SEEN_WITHOUT_A_BREAK_S = 5.0
"""A longer time between two looks is one in which nothing is known of the holder."""
ANSWER_WITHIN_S = 4.0
TERMINATED = "is being terminated"
"""In what an API server says of a namespace in which nothing is made any more."""


@dataclass
class _Standing:
    """What this operator knows of one namespace's Lease."""

    due_s: float = float("-inf")
    version: str = ""
    uid: str = ""
    seen_since_s: float = 0.0
    """Since when it has stood at that version, as seen here without a break."""
    looked_s: float = float("-inf")
    renewed_s: float = float("-inf")
    """When the last renewal by this operator began."""
    is_ours: bool = False
    was_held: bool = False
    told_of: str | None = None
    """The holder that the log names, or an error."""


class Leases:
    """The Leases of all namespaces in which this operator has something to do."""

    def __init__(
        self,
        cluster: Cluster,
        identity: str,
        *,
        wanted: Callable[[], Collection[str]],
        on_held: Callable[[str], None],
        now: Callable[[], datetime],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wanted`: the namespaces. `on_held` is told of one whose Lease is held from now on.

        `now` is written into Leases, for people; no decision depends on it.
        """
        self._cluster = cluster
        self._identity = identity
        self._wanted = wanted
        self._on_held = on_held
        self._now = now
        self._monotonic_s = monotonic_s
        self._standings: dict[str, _Standing] = {}
        self._woken = asyncio.Event()

    def holds(self, namespace: str) -> bool:
        """Whether this operator may write there now. Where it is not known yet it is looked up."""
        standing = self._standings.get(namespace)
        if standing is None:
            self._woken.set()
            return False
        is_recent = self._monotonic_s() - standing.renewed_s < HELD_FOR_S
        return standing.is_ours and is_recent

    def held(self) -> dict[str, bool]:
        """Of each namespace whether its Lease is held."""
        return {namespace: self.holds(namespace) for namespace in tuple(self._standings)}

    async def run(self) -> None:
        """Holds and renews, for ever."""
        while True:
            self._woken.clear()
            try:
                await self.round()
            except Exception:  # noqa: BLE001 - without its Leases the operator would do nothing
                _LOG.exception("Leases could not be looked at: a defect of ours")
                await asyncio.sleep(LOOKED_AT_EVERY_S)
            waits = [each.due_s - self._monotonic_s() for each in self._standings.values()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min([LOOKED_AT_EVERY_S, *waits]))):
                    await self._woken.wait()

    async def round(self) -> None:
        """Everything that is due now."""
        wanted = set(self._wanted())
        for namespace in wanted - self._standings.keys():
            self._standings[namespace] = _Standing()
        unwanted = self._standings.keys() - wanted
        due = [n for n in wanted if self._standings[n].due_s <= self._monotonic_s()]
        await asyncio.gather(*map(self._look, due), *map(self._release, unwanted))

    async def release(self) -> None:
        """Lets others go on at once. Nothing is written after this."""
        await asyncio.gather(*map(self._release, tuple(self._standings)))

    async def _look(self, namespace: str) -> None:
        standing = self._standings[namespace]
        began_s = self._monotonic_s()
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._hold(namespace, standing)
        except ConflictError:
            standing.is_ours = False  # somebody else was quicker: it is looked at anew
        except (DLionError, TimeoutError) as error:
            self._tell(namespace, standing, f"{type(error).__name__} {error}", "cannot be had")
        held = self.holds(namespace)
        if standing.was_held and not held:
            _LOG.warning("namespace %s: its Lease is held no more", namespace)
        if held and not standing.was_held:
            standing.told_of = None
            _LOG.info("namespace %s: this operator (%s) acts there", namespace, self._identity)
        is_new, standing.was_held = held and not standing.was_held, held
        is_renewed = held and standing.renewed_s >= began_s
        every_s = RENEWED_EVERY_S if is_renewed else LOOKED_AT_EVERY_S
        standing.due_s = self._monotonic_s() + every_s
        if is_new:
            self._on_held(namespace)

    async def _hold(self, namespace: str, standing: _Standing) -> None:
        began_s = self._monotonic_s()
        if standing.is_ours:
            spec = {"renewTime": self._written_now()}
            with contextlib.suppress(ConflictError):  # its labels may have been changed
                if await self._patch(namespace, standing, spec, began_s):
                    return
            standing.is_ours = False
        lease = await self._cluster.get(Kind.LEASE, namespace, LEASE_NAME)
        if lease is None:
            await self._make(namespace, standing, began_s)
            return
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        if self._may_take(standing, lease, holder):
            spec = self._taken(lease, holder)
            await self._patch(namespace, standing, spec, began_s)
        else:
            self._tell(namespace, standing, holder, "is held by another operator")

    async def _make(self, namespace: str, standing: _Standing, began_s: float) -> None:
        try:
            made = await self._cluster.create(self._lease(namespace))
        except RefusedError as error:
            if TERMINATED not in str(error):
                raise
            # Nobody can hold one there; what is left to do is to let pods of dead nodes go.
            standing.renewed_s, standing.is_ours = began_s, True
        else:
            self._note(standing, made, renewed_s=began_s)

    def _may_take(self, standing: _Standing, lease: Document, holder: str) -> bool:
        """Whether it is nobody's; notes what it looks like."""
        now_s, version = self._monotonic_s(), str(lease["metadata"]["resourceVersion"])
        is_broken = now_s - standing.looked_s > SEEN_WITHOUT_A_BREAK_S
        if version != standing.version or is_broken:
            standing.seen_since_s = now_s
        standing.version, standing.looked_s = version, now_s
        standing.uid = str(lease["metadata"]["uid"])
        duration_s = (lease.get("spec") or {}).get("leaseDurationSeconds") or DURATION_S
        return holder in ("", self._identity) or now_s - standing.seen_since_s >= duration_s

    async def _patch(
        self, namespace: str, standing: _Standing, spec: Document, began_s: float
    ) -> bool:
        """Whether it is there and is ours now. Raises: ConflictError where it is at another version
        than the one that is known, and what else comes in the way."""
        metadata = {"resourceVersion": standing.version, "uid": standing.uid}
        patch: Document = {"metadata": metadata, "spec": spec}
        patched = await self._cluster.patch(Kind.LEASE, namespace, LEASE_NAME, patch)
        if patched is None:
            standing.is_ours = False
            return False
        self._note(standing, patched, renewed_s=began_s)
        return True

    def _note(self, standing: _Standing, lease: Document, *, renewed_s: float) -> None:
        metadata = lease["metadata"]
        standing.version, standing.uid = str(metadata["resourceVersion"]), str(metadata["uid"])
        standing.renewed_s, standing.is_ours = renewed_s, True

    async def _release(self, namespace: str) -> None:
        """It is deleted, if it is as this operator left it."""
        standing = self._standings.pop(namespace)
        if not standing.is_ours:
            return
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._cluster.delete(
                    Kind.LEASE,
                    namespace,
                    LEASE_NAME,
                    uid=standing.uid,
                    resource_version=standing.version,
                )
        except (DLionError, TimeoutError) as error:
            _LOG.info("namespace %s: its Lease is left to run out: %s", namespace, error)

    def _tell(self, namespace: str, standing: _Standing, of: str, words: str) -> None:
        if standing.told_of != of:
            standing.told_of = of
            _LOG.warning("namespace %s: Lease %s %s: %s", namespace, LEASE_NAME, words, of)

    def _written_now(self) -> str:
        return self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _taken(self, lease: Document, holder: str) -> Document:
        transitions = int((lease.get("spec") or {}).get("leaseTransitions") or 0)
        at = self._written_now()
        spec: Document = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_S,
            "renewTime": at,
        }
        if holder != self._identity:
            spec |= {"acquireTime": at, "leaseTransitions": transitions + 1}
        return spec

    def _lease(self, namespace: str) -> Document:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": LEASE_NAME,
                "namespace": namespace,
                "labels": {MANAGED_BY_LABEL: MANAGER},
            },
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": DURATION_S,
                "acquireTime": self._written_now(),
                "renewTime": self._written_now(),
                "leaseTransitions": 0,
            },
        }
