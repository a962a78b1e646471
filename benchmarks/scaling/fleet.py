"""Simulate workers: join the coordinator for every pod that is reported as running.

    python benchmarks/scaling/fleet.py KUBECONFIG SERVICE_ACCOUNT_KEY AUTHORITY ADDRESS PROGRESS

As a real worker, each has its own connection with TLS and the worker's pings, and a token of its
pod. Its join stays open and is opened again when it breaks, and it reports one step, by which the
job trains. Unlike a real worker, it requests no certificate, sends no proof and no further records
(a training worker sends four reports a second), and has no peers. The script mints the pods' tokens
with the testbed's key, as the API server does, so that these requests do not count. The keepers'
pods are reported as ready and never call.

Progress is a file with one JSON object, rewritten each second: the number of joined workers.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import jwt
from api_access import ApiAccess
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from dlion_api import cluster_names as names
from dlion_api.atomic_file import write_atomically
from dlion_api.names import Rank
from dlion_api.protocol.progress import StepRecord
from dlion_api.protocol.records import record_to_json
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME
from dlion_api.wire import coordination_pb2, coordination_pb2_grpc
from dlion_worker.coordination.channel import CHANNEL_OPTIONS

SITE = "plant-a"
AT_ONCE = 100
"""Concurrent joins: all have one address, of which the coordinator lets 256 wait."""
_ISSUER = "https://kubernetes.default.svc.cluster.local"
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", COORDINATOR_DNS_NAME))
"""The channel options of a worker."""


@dataclass
class Fleet:
    """All workers of all jobs of the cluster."""

    key: Any
    key_id: str
    credentials: grpc.ChannelCredentials
    address: str
    joined: set[str] = field(default_factory=set)
    """UIDs of pods."""
    refused: int = 0
    hashes: defaultdict[str, asyncio.Future[str]] = field(
        default_factory=lambda: defaultdict(asyncio.get_running_loop().create_future)
    )
    """Futures by the Job's name."""
    workers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def follow_jobs(self, api: ApiAccess) -> None:
        """Record the manifest of each Job."""
        async for metadata in api.watch("/apis/batch/v1/jobs", {"labelSelector": names.JOB_LABEL}):
            known = self.hashes[metadata["name"]]
            if not known.done():
                known.set_result(metadata["annotations"][names.SPEC_HASH_ANNOTATION])

    async def follow_pods(self, api: ApiAccess) -> None:
        """Start a worker for every pod that is reported as running."""
        query = {
            "labelSelector": f"{names.COMPONENT_LABEL}={names.WORKER}",
            "fieldSelector": "status.phase=Running",
        }
        async for metadata in api.watch("/api/v1/pods", query):
            if metadata["uid"] not in self.workers:
                task = asyncio.create_task(self._work(metadata))
                self.workers[metadata["uid"]] = task

    async def _work(self, pod: dict[str, Any]) -> None:
        labels, uid = pod["labels"], pod["uid"]
        spec_hash = await self.hashes[pod["ownerReferences"][0]["name"]]
        index = int(labels[names.INDEX_LABEL])
        # Ranks depend on the group, and a job of this benchmark has one group.
        worker = coordination_pb2.Worker(
            rank=index, site=SITE, group=labels[names.GROUP_LABEL], index=index
        )
        run = f"{pod['namespace']}/{labels[names.JOB_LABEL]}#{labels[names.RUN_LABEL]}"
        request = coordination_pb2.JoinRequest(
            run=run,
            worker=worker,
            incarnation=int(time.time()),
            exchange_address="127.0.0.1:1",
            measuring_address="127.0.0.1:2",
            token=self._token(pod),
            spec_hash=spec_hash,
        )
        channel = grpc.aio.secure_channel(self.address, self.credentials, options=_OPTIONS)
        stub = coordination_pb2_grpc.CoordinationStub(channel)  # type: ignore[no-untyped-call]
        has_reported = False
        while True:
            try:
                async with self.turn:
                    stream = stub.Join(request)
                    await stream.read()
                    self.joined.add(uid)
                    if not has_reported or index == 0:
                        await stub.Report(_report(request))
                        has_reported = True
                while await stream.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                self.refused += error.code() is not grpc.StatusCode.UNAVAILABLE
            self.joined.discard(uid)
            await asyncio.sleep(random.uniform(0.5, 2.0))

    def _token(self, pod: dict[str, Any]) -> str:
        """Return a token as the API server gives a kubelet for that pod."""
        now_s = int(time.time())
        account = {"name": "default", "uid": "0"}
        about = {"name": pod["name"], "uid": pod["uid"]}
        return jwt.encode(
            {
                "aud": [names.TOKEN_AUDIENCE],
                "exp": now_s + 7200,
                "iat": now_s,
                "nbf": now_s,
                "iss": _ISSUER,
                "sub": f"system:serviceaccount:{pod['namespace']}:default",
                "kubernetes.io": {
                    "namespace": pod["namespace"], "pod": about, "serviceaccount": account,
                },
            },
            self.key,
            algorithm="ES256",
            headers={"kid": self.key_id},
        )  # fmt: skip


def _report(joined: coordination_pb2.JoinRequest) -> coordination_pb2.ProgressReport:
    step = StepRecord(
        1.0, Rank(joined.worker.rank), joined.incarnation, 1, 2.3, 32, 160, 0.05, 0.1, 0.1, 0.1,
        0.0, 0.0, 32,
    )  # fmt: skip
    return coordination_pb2.ProgressReport(
        run=joined.run,
        worker=joined.worker,
        incarnation=joined.incarnation,
        token=joined.token,
        records_json=[record_to_json(step)],
        sequence=int(time.time()),
    )


async def _run(kubeconfig: Path, key: bytes, authority: bytes, address: str, to: Path) -> None:
    async with ApiAccess(kubeconfig) as api:
        keys = (await api.request("GET", "/openid/v1/jwks"))["keys"]
        fleet = Fleet(
            load_pem_private_key(key, None),
            keys[0]["kid"],
            grpc.ssl_channel_credentials(authority),
            address,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.follow_jobs(api))
            tasks.create_task(fleet.follow_pods(api))
            while True:
                known = {"pods": len(fleet.workers), "joined": len(fleet.joined)}
                text = json.dumps(known | {"refused": fleet.refused})
                write_atomically(to, text.encode())
                await asyncio.sleep(0.5)


if __name__ == "__main__":
    kubeconfig, key, authority, address, progress = sys.argv[1:]
    read = (Path(key).read_bytes(), Path(authority).read_bytes())
    asyncio.run(_run(Path(kubeconfig), *read, address, Path(progress)))
