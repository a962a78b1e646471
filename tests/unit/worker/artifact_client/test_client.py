"""Test of a client of the keeper after its end.

A call after `close` fails as one to a keeper that is away: the threads that upload logs and models
may begin one while they are asked to end.

Left out: calls that a keeper answers (tests/local/test_keeper.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlion_api.errors import UnavailableError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_worker.artifact_client import ArtifactClient
from dlion_worker.artifact_client.paths import log_path
from dlion_worker.security.credentials import WorkerCredentials

if TYPE_CHECKING:
    from pathlib import Path

PATH = log_path(Rank(0))


def test_a_call_after_the_end_fails_as_one_to_a_keeper_that_is_away(tmp_path: Path) -> None:
    client = ArtifactClient(
        "127.0.0.1:1",
        job=JobKey("default", "job", "1"),
        worker=WorkerIdentity(Rank(0), SiteName("a"), "small", 0),
        incarnation=1,
        credentials=WorkerCredentials.insecure(),
    )
    file = tmp_path / "log"
    file.write_bytes(b"a line\n")
    client.close()
    with pytest.raises(UnavailableError, match="the connection to the keeper is closed"):
        client.put(PATH, file)
    with pytest.raises(UnavailableError, match="the connection to the keeper is closed"):
        client.get(PATH, tmp_path / "earlier")
