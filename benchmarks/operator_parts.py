"""Measure the parts of an operator with many jobs, each alone: CPU and memory.

    python benchmarks/operator_parts.py [store|pass|event|connection]

No cluster is needed. `store`: memory of the objects of a thousand jobs with five workers, each
decoded separately, as events of a watch are. `pass`: CPU of a pass over a job that trains without
changes. `event`: CPU of an event of a pod in kopf, with the operator's settings. `connection`:
memory of a connection with TLS and an open stream in a gRPC server, as of a joined worker. Each
part runs in a separate process; with PYTHONPATH of another tree's packages it measures those.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

JOBS, WORKERS = 1000, 5
REPEATS = 300
CONNECTIONS = 400
Document = dict[str, Any]


def main() -> None:
    parts = {"store": store, "pass": a_pass, "event": event, "connection": connection}
    if len(sys.argv) > 1:
        print(parts[sys.argv[1]](), flush=True)
        return
    print("| part | cost |\n|---|---|", flush=True)
    for part in parts:
        subprocess.run([sys.executable, __file__, part], check=True)


def rss_mb(pid: int | str = "self") -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1000


def objects_of_a_job() -> list[Document]:
    """Return an operator's objects of a job, and its pods with a kubelet's status."""
    from dlion_operator.kubernetes.client import Kind
    from operator_in_memory import Site
    from operator_world import dlion_job

    site = Site(dlion_job({"small": WORKERS}))
    site.look()
    kept = site.cluster.objects.items()
    made = [document for (kind, _), document in kept if kind is not Kind.EVENT]
    (job,) = (document for (kind, _), document in kept if kind is Kind.JOB)
    template = job["spec"]["template"]
    running = {"running": {"startedAt": "2026-01-31T12:00:00Z"}}
    container = {"name": "trainer", "image": "dlion/worker:1", "ready": True, "state": running}
    condition = {"status": "True", "lastTransitionTime": "2026-01-31T12:00:00Z"}
    types = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    for index in range(WORKERS + 1):
        metadata = {**template["metadata"], "name": f"pod-{index}", "namespace": "default"}
        made.append({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**metadata, "uid": f"pod-{index}", "resourceVersion": "1"},
            "spec": {**template["spec"], "nodeName": f"node-{index}"},
            "status": {
                "phase": "Running",
                "conditions": [condition | {"type": each} for each in types],
                "containerStatuses": [container, container],
            },
        })  # fmt: skip
    for document in made:
        fields = {f"f:{number}": {"f:field": {}} for number in range(40)}
        document["metadata"]["managedFields"] = [{"manager": "m", "fieldsV1": fields}] * 2
    return made


def store() -> str:
    from dlion_operator.kubernetes.client import Kind
    from dlion_operator.kubernetes.store import ClusterStore

    kept, texts = ClusterStore(), [json.dumps(each) for each in objects_of_a_job()]
    gc.collect()
    before_mb = rss_mb()
    for number in range(JOBS):
        for text in texts:
            document = json.loads(text)
            metadata = document["metadata"]
            metadata["name"] += f"-{number}"
            metadata["uid"] = f"{metadata['name']}-{document['kind']}"
            metadata["resourceVersion"] = str(1 + number)
            kept.put(Kind.of(document), document)
    gc.collect()
    size_kb = sum(map(len, texts)) // 1000
    what = f"store of {JOBS} jobs, {len(texts)} objects and {size_kb} kB each"
    return f"| {what} | {rss_mb() - before_mb:.0f} MB |"


def a_pass() -> str:
    from dlion_operator.plan.observed import RunView
    from operator_in_memory import NAME, Site
    from operator_world import dlion_job

    site = Site(dlion_job({"small": WORKERS}))
    site.look()
    site.start_pods()
    ready: Any = {"plant-a": WORKERS}
    site.runs.current_view = RunView(open_s=3600.0, ready=ready, training=True)
    for site.time_s in (30.0, 60.0):
        site.look()

    async def passes() -> None:
        for _ in range(REPEATS):
            await site._reconciler.reconcile(NAME)  # noqa: SLF001 - `look` starts a loop each time

    return f"| a pass in which nothing changes | {_cpu_ms(passes):.2f} ms CPU |"


def event() -> str:
    import kopf
    from kopf._cogs.configs.configuration import OperatorSettings
    from kopf._cogs.structs.ephemera import Memo
    from kopf._cogs.structs.references import Resource
    from kopf._core.engines.indexing import OperatorIndexers
    from kopf._core.reactor.inventory import ResourceMemories
    from kopf._core.reactor.processing import process_resource_event

    from dlion_operator.controller.handlers import _configure
    from dlion_operator.kubernetes.resync import watched_kinds

    registry, settings, memories = kopf.OperatorRegistry(), OperatorSettings(), ResourceMemories()
    _configure(settings, watched_kinds(queues_jobs=False))
    pod = Resource(group="", version="v1", plural="pods", kind="Pod", namespaced=True)
    text = json.dumps(objects_of_a_job()[-1])

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def happened(**_: Any) -> None: ...

    async def events() -> None:
        for _ in range(REPEATS):
            await process_resource_event(
                lifecycle=kopf.lifecycles.all_at_once,
                indexers=OperatorIndexers(),
                registry=registry,
                settings=settings,
                memories=memories,
                memobase=Memo(),
                resource=pod,
                raw_event={"type": "MODIFIED", "object": json.loads(text)},
                event_queue=asyncio.Queue(),
            )

    return f"| an event of a pod of {len(text) // 1000} kB in kopf | {_cpu_ms(events):.2f} ms CPU |"


def _cpu_ms(what: Any) -> float:
    began_s = time.process_time()
    asyncio.run(what())
    return (time.process_time() - began_s) / REPEATS * 1e3


def connection() -> str:
    import grpc

    from testbed.certificates import Authority

    with tempfile.TemporaryDirectory(prefix="dlion-parts-") as folder:
        authority = Authority.make(Path(folder), "ca")
        authority.issue("server", "server", hosts=("localhost",))
        credentials = grpc.ssl_channel_credentials((Path(folder) / "ca.crt").read_bytes())
        command = [sys.executable, "-c", _SERVER, folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port, before_mb = int(server.stdout.readline()), rss_mb(server.pid)

            async def connect() -> float:
                kept = []
                for _ in range(CONNECTIONS):
                    options = (("grpc.use_local_subchannel_pool", 1),)
                    channel = grpc.aio.secure_channel(f"localhost:{port}", credentials, options)
                    stream = channel.unary_stream("/S/Join")(b"request" * 100)
                    await stream.read()
                    kept.append((channel, stream))
                return rss_mb(server.pid) - before_mb

            try:
                grown_mb = asyncio.run(connect())
            finally:
                server.kill()
    return f"| a connection with an open stream | {grown_mb / CONNECTIONS * 1e3:.0f} kB |"


_SERVER = """
import asyncio, pathlib, sys
import grpc
async def join(request, context):
    yield b"membership" * 20
    await asyncio.Event().wait()
async def main():
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(join)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", {"Join": handler}),))
    pair = tuple(pathlib.Path(sys.argv[1], f"server.{end}").read_bytes() for end in ("key", "crt"))
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    print(port, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


if __name__ == "__main__":
    main()
