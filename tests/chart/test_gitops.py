"""Tests of the GitOps examples: each site gets its own part of one job and of one set of values.

Each site's overlay is a valid manifest of the same job and names the site. The chart accepts each
site's values. Argo CD, Flux and Fleet find the same overlays and values. With the page's
kustomization a program's name follows its content.

Left out: the verdicts of the tools on a job (test_gitops_verdicts); these systems themselves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from chart import Helm, merged
from dlion_api.spec import load_job
from dlion_cli.__main__ import main
from dlion_operator.model.settings import load_settings
from gitops.documents import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    Kustomize = Callable[..., list[dict[str, Any]]]

KIT = ROOT / "examples/gitops"
SITES = ("plant-a", "plant-b")
every_site = pytest.mark.parametrize("site", SITES)


def values_of(site: str) -> dict[str, Any]:
    """The shared values with the site's own values over them."""
    both = (KIT / "operator" / name for name in ("values.yaml", f"{site}.yaml"))
    return merged(*(yaml.safe_load(path.read_text(encoding="utf-8")) for path in both))


@every_site
def test_an_overlay_is_a_valid_manifest(site: str, kustomize: Kustomize, tmp_path: Path) -> None:
    (document,) = kustomize(KIT / "jobs/overlays" / site)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(document))
    assert main(["validate", str(manifest)]) == 0
    assert site in [each["name"] for each in document["spec"]["sites"]]


def test_all_overlays_are_one_job(kustomize: Kustomize) -> None:
    rendered = [kustomize(KIT / "jobs/overlays" / site)[0] for site in SITES]
    assert rendered[0] != rendered[1]
    assert len({load_job(document).hash() for document in rendered}) == 1


@every_site
def test_the_chart_accepts_the_values_of_a_site(site: str, helm: Helm, tmp_path: Path) -> None:
    values = values_of(site)
    helm.lint(values)
    config = tmp_path / "config.yaml"
    config.write_text(helm.one("ConfigMap", values, only="config.yaml")["data"]["config.yaml"])
    assert load_settings(config).site == site


@every_site
def test_flux_gets_the_same_values(site: str, kustomize: Kustomize) -> None:
    objects = {each["kind"]: each for each in kustomize(KIT / "flux" / site, anywhere=True)}
    data = objects["ConfigMap"]["data"]
    keys = [each["valuesKey"] for each in objects["HelmRelease"]["spec"]["valuesFrom"]]
    assert merged(*(yaml.safe_load(data[key]) for key in keys)) == values_of(site)
    path = ROOT / objects["Kustomization"]["spec"]["path"]
    assert path.resolve() == KIT / "jobs/overlays" / site


@every_site
def test_fleet_gets_the_same_values_and_overlays(site: str) -> None:
    operator = yaml.safe_load((KIT / "operator/fleet.yaml").read_text(encoding="utf-8"))
    jobs = yaml.safe_load((KIT / "jobs/fleet.yaml").read_text(encoding="utf-8"))
    (theirs,) = [e for e in operator["targetCustomizations"] if e["name"] == site]
    files = operator["helm"]["valuesFiles"] + theirs["helm"]["valuesFiles"]
    assert files == ["values.yaml", f"{site}.yaml"]
    (overlay,) = [e for e in jobs["targetCustomizations"] if e["name"] == site]
    assert (KIT / "jobs" / overlay["kustomize"]["dir"]) == KIT / "jobs/overlays" / site
    assert theirs["clusterSelector"] == overlay["clusterSelector"]


@every_site
def test_argo_cd_finds_the_same_values_and_overlays(site: str) -> None:
    text = (KIT / "argocd/applicationset.yaml").read_text(encoding="utf-8")
    operator, jobs = yaml.safe_load_all(text.replace("{{ .values.site }}", site))
    chart, _ = operator["spec"]["template"]["spec"]["sources"]
    files = [ROOT / name.removeprefix("$site/") for name in chart["helm"]["valueFiles"]]
    assert files == [KIT / "operator/values.yaml", KIT / "operator" / f"{site}.yaml"]
    assert (ROOT / chart["path"] / "Chart.yaml").exists()
    path = jobs["spec"]["template"]["spec"]["source"]["path"]
    assert ROOT / path == KIT / "jobs/overlays" / site


def test_a_program_is_named_after_its_content(kustomize: Kustomize, tmp_path: Path) -> None:
    page = (ROOT / "docs/gitops.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n# (\w+\.yaml)\n(.+?)^```", page, flags=re.MULTILINE | re.DOTALL)
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    job = yaml.safe_load((KIT / "jobs/base/job.yaml").read_text(encoding="utf-8"))
    job["spec"]["trainer"]["program"] = {"configMap": {"name": "our-program", "key": "program.py"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    names = set()
    for text in ("first", "second"):
        (tmp_path / "program.py").write_text(text)
        objects = {each["kind"]: each for each in kustomize(tmp_path)}
        name = objects["ConfigMap"]["metadata"]["name"]
        assert objects["DLionJob"]["spec"]["trainer"]["program"]["configMap"]["name"] == name
        names.add(name)
    assert len(names) == 2
