"""Tests of the kustomize bases: they are the chart's objects, and overlays can change what values
change.

The bases equal the chart's present output, with and without a ClusterRole. An overlay that replaces
the settings gives the operator a ConfigMap of another name, whose content the operator accepts.

Left out: an API server, whose verdict equals that on the chart's objects.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chart import NAMESPACE, SITE, Helm, merged, nested
from dlion_operator.model.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "generate_kustomize_bases.py"
BASES = {
    "cluster": SITE,
    "namespaced": merged(SITE, nested("namespaces", [NAMESPACE]), nested("crds.enabled", False)),
}


def test_the_bases_equal_the_output_of_the_chart(helm: Helm) -> None:
    command = [sys.executable, str(TOOL), "--check", "--helm", str(helm.program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("base", BASES)
def test_a_base_makes_the_objects_of_the_chart(
    helm: Helm, kustomize: Callable[[Path], list[dict[str, Any]]], base: str
) -> None:
    made = kustomize(ROOT / "config" / base)
    charts = [each for each in helm.objects(BASES[base]) if each["kind"] != "Pod"]

    def named(objects: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
        return {(e["kind"], e["metadata"].get("namespace", ""),
                 e["metadata"]["name"] if e["kind"] != "ConfigMap" else "")
                for e in objects}  # fmt: skip

    assert named(made) == named(charts)
    assert ("ClusterRole" in {each["kind"] for each in made}) == (base == "cluster")
    assert "Helm" not in json.dumps([each["metadata"] for each in made])


def test_an_overlay_replaces_the_settings(
    kustomize: Callable[[Path], list[dict[str, Any]]], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.symlink_to(ROOT / "config" / "namespaced")
    settings = (ROOT / "config" / "namespaced" / "config.yaml").read_text()
    (tmp_path / "overlay").mkdir()
    config = tmp_path / "overlay" / "config.yaml"
    config.write_text(settings.replace("site-a", "plant-a"))
    (tmp_path / "overlay" / "kustomization.yaml").write_text(
        "resources: [../base]\n"
        "configMapGenerator:\n- {name: dlion-operator, namespace: dlion-system,"
        " behavior: replace, files: [config.yaml]}\n"
        "images:\n- {name: dlion-operator, newName: mirror.example/dlion-operator}\n"
    )
    before = _used(kustomize(base.resolve()))
    after = _used(kustomize(tmp_path / "overlay"))
    assert before[0] != after[0]
    assert after[1] == "mirror.example/dlion-operator:0.1.0"
    config.write_text(after[2])
    assert load_settings(config).site == "plant-a"


def _used(objects: list[dict[str, Any]]) -> tuple[str, str, str]:
    """The name of the ConfigMap that the operator mounts, its image, its settings."""
    (pod,) = (e["spec"]["template"]["spec"] for e in objects if e["kind"] == "Deployment")
    name = next(v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v)
    data = {e["metadata"]["name"]: e["data"] for e in objects if e["kind"] == "ConfigMap"}
    return name, pod["containers"][0]["image"], data[name]["config.yaml"]
