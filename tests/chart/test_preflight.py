"""Tests of `dlion preflight --contexts` with the chart's own objects.

Installed from one list, each site's objects pass, with the names and labels of the chart. For a
site installed from an earlier list, the missing parts are named.

Left out: other faults (tests/unit/cli/test_preflight_clusters.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from chart import Helm, entry, merged, nested
from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from scripted_servers import Server, served

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

    from scripted_servers import Answer

PORTS = {"plant-a": 30446, "plant-b": 30447, "plant-c": 30448}
ENTRIES = [entry(name, address=f"127.0.0.1:{port}") for name, port in PORTS.items()]
CRD = Path(__file__).parents[2] / "crds" / "dlionjob.yaml"
KINDS = [{"group": "dlion.dev", "kind": "DLionJob", "version": "v1alpha1"}]


def installed(helm: Helm, site: str, entries: list[dict[str, Any]], release: str) -> Server:
    """The site's cluster, with a ready pod of the operator."""
    values = merged(
        {"sites": entries},
        nested("site.name", site),
        nested("federation.service", {"type": "NodePort", "nodePort": PORTS[site]}),
    )
    answers: dict[str, Answer] = {"version": answer({"gitVersion": "v1.34.0"})}
    for each in helm.objects(values, release=release):
        if each["kind"] == "Deployment":
            ready = each | {"status": {"readyReplicas": 1}}
            answers["deployments"] = answer({"items": [ready]})
        elif each["kind"] in ("ConfigMap", "Service"):
            # A server answers by the last part of a path, so the operator's Service is
            # omitted.
            answers.setdefault(each["metadata"]["name"], answer(each))
            if "config.yaml" in (each.get("data") or {}):
                answers[each["metadata"]["name"]] = answer(each)
    definition = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]
    kind = definition["openAPIV3Schema"] | {"x-kubernetes-group-version-kind": KINDS}
    answers["v1alpha1"] = answer({"components": {"schemas": {"dev.dlion.v1alpha1.DLionJob": kind}}})
    return Server(answers)


def answer(document: Mapping[str, Any]) -> Answer:
    return 200, json.dumps(document)


def test_the_charts_objects_pass(
    helm: Helm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = {
        "a": installed(helm, "plant-a", ENTRIES, "dlion"),
        "b": installed(helm, "plant-b", ENTRIES[:2], "other"),
    }
    file = tmp_path / "sites.yaml"
    file.write_text(yaml.safe_dump({"sites": ENTRIES}))
    with served(tmp_path / "kubeconfig", servers) as config:
        command = ["preflight", str(file), "--kubeconfig", config, "--contexts", "a,b"]
        assert main([*command, "-o", "json"]) == ExitCode.UNAVAILABLE
    checks = json.loads(capsys.readouterr().out)["checks"]
    found = {(each["site"], each["check"]): each for each in checks}
    for name in ("definition", "operator", "service", "list", "trust"):
        assert found["plant-a", name]["outcome"] == "ok", found["plant-a", name]
    for name in ("definition", "operator", "service"):
        assert found["plant-b", name]["outcome"] == "ok", found["plant-b", name]
    assert "other-dlion-operator" in found["plant-b", "operator"]["observed"]
    assert "no plant-c" in found["plant-b", "list"]["observed"]
    assert "no bundle of plant-c" in found["plant-b", "trust"]["observed"]
