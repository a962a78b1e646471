"""Test what the operator's client does with answers that are no Kubernetes API server's.

A proxy, or a load balancer in front of the API server, may answer 200 with a page of its own. It is
an error of the server, which callers retry.

Left out: errors of a real API server (tests/cluster).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlion_operator.kubernetes.api import KubernetesApi, connect
from dlion_operator.kubernetes.client import Kind, ServerError
from scripted_servers import Server, served

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("content", ["<html>busy</html>", "", '{"items": [', "[]", "[" * 100_000])
def test_an_answer_that_is_no_json_object_is_an_error_of_the_server(
    tmp_path: Path, content: str
) -> None:
    errors: list[int] = []

    async def ask(kubeconfig: str) -> None:
        api = KubernetesApi(await connect(kubeconfig), errors.append)
        try:
            with pytest.raises(ServerError, match="GET /api/v1/pods: the answer is no JSON object"):
                await api.list(Kind.POD, None)
        finally:
            await api.close()

    with served(tmp_path / "kubeconfig", {"a": Server({"pods": (200, content)})}) as kubeconfig:
        asyncio.run(ask(kubeconfig))
    assert errors == [200]
