"""Requests to the testbed's API server as its administrator, by several connections at once.

This is not the operator's client: it has its own user agent, so that the API server's audit log
distinguishes both.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from dlion_api.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path
    from types import TracebackType

USER_AGENT = "dlion-scale"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_CHUNK_BYTES = 2**16


class ApiAccess:
    """An API server by a kubeconfig with a client certificate; an asynchronous context."""

    def __init__(self, kubeconfig: Path, *, connections: int = 16) -> None:
        config = json.loads(kubeconfig.read_text())  # the testbed's are JSON
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._server = cluster["server"]
        self._tls = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        with tempfile.NamedTemporaryFile() as pair:
            for part in ("client-certificate-data", "client-key-data"):
                pair.write(base64.b64decode(user[part]))
            pair.flush()
            self._tls.load_cert_chain(pair.name)
        self._connections = connections
        self._parts = AsyncExitStack()

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=self._connections)
        self._session = await self._parts.enter_async_context(
            aiohttp.ClientSession(
                self._server, connector=connector, headers={"User-Agent": USER_AGENT}
            )
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._parts.aclose()

    async def request(
        self, method: str, path: str, body: object = None, *, patch: bool = False
    ) -> dict[str, Any]:
        """Return the answer. Raises: UnavailableError with the API server's message."""
        content = "application/merge-patch+json" if patch else "application/json"
        async with self._session.request(
            method,
            path,
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": content},
        ) as answer:
            document: dict[str, Any] = await answer.json(content_type=None)
            if answer.status >= 300:
                raise UnavailableError(f"{method} {path}: {document.get('message', document)}")
            return document

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """Yield the metadata of each present and new object at every change, without end.

        A broken watch is opened again from the beginning.
        """
        params = {**query, "watch": "true"}
        while True:
            try:
                async for line in self._lines(path, params):
                    event = json.loads(line)
                    if event["type"] in ("ADDED", "MODIFIED"):
                        yield event["object"]["metadata"]
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.5)

    async def _lines(self, path: str, params: Mapping[str, str]) -> AsyncIterator[bytes]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with self._session.get(
            path, params=params, headers={"Accept": METADATA}, timeout=timeout
        ) as answer:
            rest = b""
            async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line
