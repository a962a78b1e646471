"""Tests of the kit's ApplicationSets with Argo CD's own Go code.

Each cluster with a site's label gets two Applications: the operator with the site's files of
values, and the jobs from its overlay. Other clusters get none. Sets that Argo CD would refuse are
refused.

Left out: the state of the job in Argo CD (tests/contract/test_gitops_health.py), and Argo CD
itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gitops.argo_cd import APPLICATIONS, Cluster, applications
from gitops.documents import ROOT

pytestmark = pytest.mark.slow

KIT = ROOT / "examples/gitops"
SETS = KIT / "argocd/applicationset.yaml"
SITES = ("plant-a", "plant-b")
CLUSTERS = (
    Cluster("factory-1", {"dlion.dev/site": "plant-a"}),
    Cluster("factory-2", {"dlion.dev/site": "plant-b", "tier": "edge"}),
    Cluster("office", {"tier": "central"}),
)


@pytest.fixture(scope="module")
def program() -> Path:
    """Argo CD's code around ApplicationSets."""
    found = APPLICATIONS.built()
    if found is None:
        missing = "what renders ApplicationSets is not built: run `tools/testbed build-argo-cd`"
        if os.environ.get("DLION_REQUIRE_TESTBED"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


@pytest.fixture(scope="module")
def made(program: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Specs of Applications by their set, then their name."""
    sets = applications(program, [SETS], CLUSTERS)
    return {
        name: {each["metadata"]["name"]: each["spec"] for each in those}
        for name, those in sets.items()
    }


def test_exactly_the_labelled_clusters_get_both(
    made: dict[str, dict[str, dict[str, Any]]],
) -> None:
    assert {name: set(those) for name, those in made.items()} == {
        what: {f"{what}-{site}" for site in SITES} for what in ("dlion-operator", "dlion-jobs")
    }
    for those in made.values():
        clusters = {name: spec["destination"]["name"] for name, spec in those.items()}
        assert sorted(clusters.values()) == ["factory-1", "factory-2"]
        assert all(name.endswith("-a") == (to == "factory-1") for name, to in clusters.items())


@pytest.mark.parametrize("site", SITES)
def test_the_operator_comes_with_the_sites_values(
    site: str, made: dict[str, dict[str, dict[str, Any]]]
) -> None:
    spec = made["dlion-operator"][f"dlion-operator-{site}"]
    chart, values = spec["sources"]
    assert (ROOT / chart["path"] / "Chart.yaml").exists()
    prefix = f"${values['ref']}/"
    files = [ROOT / name.removeprefix(prefix) for name in chart["helm"]["valueFiles"]]
    assert files == [KIT / "operator/values.yaml", KIT / "operator" / f"{site}.yaml"]
    assert all(path.exists() for path in files)
    assert spec["syncPolicy"]["automated"] == {"prune": True, "selfHeal": True}


@pytest.mark.parametrize("site", SITES)
def test_the_jobs_come_from_the_sites_overlay(
    site: str, made: dict[str, dict[str, dict[str, Any]]]
) -> None:
    spec = made["dlion-jobs"][f"dlion-jobs-{site}"]
    assert ROOT / spec["source"]["path"] == KIT / "jobs/overlays" / site
    assert (ROOT / spec["source"]["path"] / "kustomization.yaml").exists()
    assert "selfHeal" not in spec["syncPolicy"]["automated"]


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("goTemplate: true", "goTemplates: true", 'unknown field "goTemplates"'),
        ("automated: {prune: true}", "automated: [prune]", "cannot unmarshal array"),
        ("{{ .values.site }}", "{{ .values.plant }}", 'no entry for key "plant"'),
    ],
)
def test_a_set_that_argo_cd_would_refuse_is_refused(
    right: str, wrong: str, message: str, program: Path, tmp_path: Path
) -> None:
    file = tmp_path / "applicationset.yaml"
    text = SETS.read_text(encoding="utf-8")
    assert right in text
    file.write_text(text.replace(right, wrong))
    with pytest.raises(ValueError, match=message):
        applications(program, [file], CLUSTERS)
