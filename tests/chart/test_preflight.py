"""What `dlion preflight --contexts` makes of the chart's own objects.

Proves: installed from one list, each site's objects pass, by the names and labels that the chart
gives them; a site that was installed from an earlier list is told what it lacks.
Leaves out: what is wrong in other ways (tests/unit/cli/test_preflight_clusters.py).
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
    """That site's cluster, with a pod of the operator that is ready."""
    values = merged(
        {"sites": entries},
        nested("site.name", site),
        nested("federation.service", {"type": "NodePort", "nodePort": PORTS[site]}),
    )
    answers: dict[str, Answer] = {"version": told({"gitVersion": "v1.34.0"})}
    for each in helm.objects(values, release=release):
        if each["kind"] == "Deployment":
            ready = each | {"status": {"readyReplicas": 1}}
            answers["deployments"] = told({"items": [ready]})
        elif each["kind"] in ("ConfigMap", "Service"):
            # A server tells by the last part of a path: the operator's Service is not asked for.
            answers.setdefault(each["metadata"]["name"], told(each))
            if "config.yaml" in (each.get("data") or {}):
                answers[each["metadata"]["name"]] = told(each)
    definition = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]
    kind = definition["openAPIV3Schema"] | {"x-kubernetes-group-version-kind": KINDS}
    answers["v1alpha1"] = told({"components": {"schemas": {"dev.dlion.v1alpha1.DLionJob": kind}}})
    return Server(answers)


def told(document: Mapping[str, Any]) -> Answer:
    return 200, json.dumps(document)


def test_the_charts_objects_are_understood(
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
    assert "other-dlion-operator" in found["plant-b", "operator"]["seen"]
    assert "no plant-c" in found["plant-b", "list"]["seen"]
    assert "no bundle of plant-c" in found["plant-b", "trust"]["seen"]
