"""Test `dlion preflight` against the federation ports of operators.

Correct sites pass, with the end of their certificates. A site with a new authority, with another
site's address, or without an operator fails with what to do. Operators still hear each other after
the checks.

Left out: ports that are not an operator's (tests/unit/cli/test_preflight.py).
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dlion_api.exit_codes import ExitCode
from dlion_api.names import SiteName
from dlion_cli.__main__ import main
from dlion_operator.pki.authority import CertificateAuthority
from federated import FederatedSite, federated_sites, until

if TYPE_CHECKING:
    from pathlib import Path

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")


def entry(site: FederatedSite, **changes: Any) -> dict[str, Any]:
    made = {
        "name": str(site.name),
        "address": f"127.0.0.1:{site.port}",
        "bundle": site.authority.bundle_pem.decode(),
    }
    return made | changes


async def looked_at(
    folder: Path, capture: pytest.CaptureFixture[str], *entries: dict[str, Any]
) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """Return the exit code, and the results by site and check."""
    file = folder / "sites.yaml"
    file.write_text(yaml.safe_dump({"sites": list(entries)}))
    code = await asyncio.to_thread(main, ["preflight", str(file), "-o", "json"])
    checks = json.loads(capture.readouterr().out)["checks"]
    return code, {(each["site"], each["check"]): each for each in checks}


def test_operators_are_found_or_faults_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        a, b, c = federated_sites(tmp_path, A, B, C)
        await a.start(b)
        await b.start(a)
        assert a.node is not None
        assert b.node is not None
        try:
            code, found = await looked_at(tmp_path, capsys, entry(a), entry(b))
            assert code == 0
            for name in (A, B):
                assert [each["check"] for (site, _), each in found.items() if site == name] == [
                    "bundle", "dns", "port", "tls", "clock",
                ]  # fmt: skip
                assert found[name, "tls"]["observed"].startswith(f"operator.{name}.dlion by its")
                least, most = found[name, "clock"]["figures"].values()
                assert -60 < least <= 0 < most < a.life.total_seconds()
            new_bundle = CertificateAuthority(A).bundle_pem.decode()
            wrong = entry(a, bundle=new_bundle), entry(c, address=entry(b)["address"])
            code, found = await looked_at(tmp_path, capsys, *wrong)
            assert code == ExitCode.UNAVAILABLE
            assert "by another authority" in found[A, "tls"]["observed"]
            assert "certificate for operator.plant-b.dlion" in found[C, "tls"]["observed"]
            code, found = await looked_at(tmp_path, capsys, entry(a), entry(c))
            assert code == ExitCode.UNAVAILABLE
            assert found[A, "tls"]["outcome"] == "ok"
            assert found[C, "port"]["outcome"] == "fail"
            for node, other in ((a.node, B), (b.node, A)):
                assert await until(lambda n=node, o=other: n.reachability(o).reachable)  # type: ignore[misc]
                assert not node.service.refusals
        finally:
            await a.node.close()
            await b.node.close()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await run()

    asyncio.run(bounded())
