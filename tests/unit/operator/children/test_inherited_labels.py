"""Test the labels that children inherit from a DLionJob.

Every child and every pod template has the labels of the job. Our labels take precedence. The user's
pod template takes precedence over the job. No selector names an inherited label. Labels of
Kubernetes and of GitOps tools are not copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.names import WorkerIdentity
from dlion_api.spec import Job, load_job
from dlion_operator.children.exposed_workers import worker_routes, worker_service
from dlion_operator.children.keeper import keeper_objects
from dlion_operator.children.run_objects import authority_certificate, config_map, headless_service
from dlion_operator.children.worker_jobs import worker_job
from dlion_operator.model.settings import Gateway
from operator_world import SETTINGS, dlion_job

if TYPE_CHECKING:
    from collections.abc import Iterator

GIVEN = {"team": "vision", "cost.example/centre": "7"}
NEVER = (
    "app.kubernetes.io/instance",
    "app.kubernetes.io/part-of",
    "dlion.dev/site",
    "kueue.x-k8s.io/queue-name",
    "helm.sh/chart",
    "argocd.argoproj.io/instance",
    "kustomize.toolkit.fluxcd.io/name",
    "helm.fluxcd.io/antecedent",
    "objectset.rio.cattle.io/hash",
    "fleet.cattle.io/bundle-id",
    "kubectl.kubernetes.io/default-container",
    "batch.kubernetes.io/job-name",
    "kubernetes.io/metadata.name",
    "topology.k8s.io/zone",
)


def all_children(job: Job) -> list[dict[str, Any]]:
    """Return one child of each kind that the operator creates."""
    owner = {"uid": "u"}
    (group,) = job.spec.sites[0].groups
    worker = next(iter(job.workers()))
    assert isinstance(worker, WorkerIdentity)
    service = worker_service(job, worker, {}, SETTINGS, owner)
    routed = {"metadata": {**service["metadata"], "uid": "s"}}
    return [
        config_map(job, SETTINGS, owner, authority_pem="PEM"),
        headless_service(job, SETTINGS, owner),
        *keeper_objects(job, SETTINGS, owner),
        worker_job(job, group, SETTINGS, owner),
        service,
        *worker_routes(job, worker, Gateway(address="gateway.example:443"), routed),
        authority_certificate(job, SETTINGS, owner),
    ]


def labelled(labels: dict[str, str], **spec: Any) -> Job:
    document = dlion_job(**spec)
    document["metadata"]["labels"] = labels
    return load_job(document)


def templates(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [d["spec"]["template"] for d in documents if "template" in d["spec"]]


def selectors(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every selector of a document."""
    if isinstance(value, dict):
        yield from (each for name, each in value.items() if name in ("selector", "matchLabels"))
        for each in value.values():
            yield from selectors(each)
    elif isinstance(value, list):
        for each in value:
            yield from selectors(each)


def test_all_children_and_their_pods_have_the_jobs_labels() -> None:
    documents = all_children(labelled(GIVEN))
    bare = all_children(labelled({}))
    with_spec = [each for each in documents if "spec" in each]
    assert len(templates(with_spec)) == 2
    both = zip([*documents, *templates(with_spec)],
               [*bare, *templates([b for b in bare if "spec" in b])], strict=True)  # fmt: skip
    for one, other in both:
        assert one["metadata"]["labels"] == other["metadata"]["labels"] | GIVEN


def test_no_selector_names_one() -> None:
    found = [each for document in all_children(labelled(GIVEN)) for each in selectors(document)]
    assert found
    assert found == [
        each for document in all_children(labelled({})) for each in selectors(document)
    ]


@pytest.mark.parametrize("name", NEVER)
def test_labels_of_others_are_never_copied(name: str) -> None:
    before, after = all_children(labelled({})), all_children(labelled({name: "x"}))
    changed = [d for one, d in zip(before, after, strict=True) if one != d]
    if name == "kueue.x-k8s.io/queue-name":
        (job,) = changed
        assert (job["kind"], job["spec"]["suspend"]) == ("Job", True)
        assert name not in job["metadata"]["labels"]
        assert name not in job["spec"]["template"]["metadata"]["labels"]
    else:
        assert changed == []


def test_the_pod_template_wins_over_the_job_and_ours_over_both() -> None:
    template = {"metadata": {"labels": {"team": "sound", "dlion.dev/site": "x"}}}
    (job,) = (d for d in all_children(labelled(GIVEN, podTemplate=template)) if d["kind"] == "Job")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert (labels["team"], labels["cost.example/centre"]) == ("sound", "7")
    assert labels["dlion.dev/site"] == "plant-a"
