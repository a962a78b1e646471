"""Test `dlion trust restore` and `revoke`.

A quarantine is lifted, and stays lifted if the command is repeated. A revocation that would leave
no worker is refused.

Left out: a real API server (tests/cluster/test_cli.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dlion_api.cluster_names import REVOKED_ANNOTATION
from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from local_run import job_document
from scripted_servers import PATCHES, Server, served

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_repeated_restore_keeps_a_quarantine_lifted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = "plant-a/g-0"
    lifted = [{"name": worker, "trusted": True}]
    quarantine = {"name": worker, "by": "plant-a", "effective": True, "automatic": True}
    job = job_document()
    answer = 200, json.dumps(job | {"status": {"revoked": [quarantine]}})
    first = Server({"test": answer, PATCHES: answer})
    command = ["trust", "restore", "test", worker, "--kubeconfig"]
    with served(tmp_path / "kubeconfig", {"a": first}) as file:
        assert main([*command, file]) == 0
    ((_, _, body),) = first.patches
    assert json.loads(json.loads(body)["metadata"]["annotations"][REVOKED_ANNOTATION]) == lifted
    assert "is trusted again" in capsys.readouterr().out
    job["metadata"]["annotations"] = {REVOKED_ANNOTATION: json.dumps(lifted)}
    for revoked in ([quarantine], []):  # before and after the operator writes its status
        status = {"status": {"revoked": revoked}}
        later = Server({"test": (200, json.dumps(job | status)), PATCHES: answer})
        with served(tmp_path / "kubeconfig", {"a": later}) as file:
            assert main([*command, file]) == 0
        assert later.patches == []
        expected = f"test: {worker} is not revoked here; nothing changed\n"
        assert capsys.readouterr().out == expected


def test_the_last_worker_is_not_revoked_although_others_are_revoked_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_document(workers=2)
    revoked = {"name": "plant-a/g-0", "by": "plant-b", "effective": True}
    command = ["trust", "revoke", "test", "plant-a/g-1", "--kubeconfig"]
    for effective, code in ((True, ExitCode.SPEC), (False, ExitCode.OK)):
        status = {"revoked": [revoked | {"effective": effective}]}
        answer = 200, json.dumps(job | {"status": status})
        server = Server({"test": answer, PATCHES: answer})
        with served(tmp_path / "kubeconfig", {"a": server}) as file:
            assert main([*command, file]) == code
        assert ("no worker of the job would be left" in capsys.readouterr().err) == effective
        assert len(server.patches) == (not effective)
