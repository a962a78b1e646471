"""Test the init containers that download for a job.

They stand before the sidecar, with the trainer's image and resources but without a device. Their
volume is bounded and read-only for the trainer; a claim may replace it. Each has its own Secret. An
exit that a retry cannot cure is final. A site that does not allow the Secret names the job's field.
A job without downloads has no init container.

Left out: that Kubernetes accepts them (tests/cluster/test_initializers.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dlion_api.spec import RuntimeSpec, load_job
from dlion_operator.children.worker_jobs import missing_parts, refused_by_site, worker_job
from dlion_operator.model.settings import Settings
from dlion_operator.model.site_runtime import SiteRuntime
from dlion_operator.model.tenancy import ScratchSizes
from operator_world import SETTINGS, dlion_job

SHA256 = "0123456789abcdef" * 4
DATASET = {"url": "https://example.com/d.zip", "sha256": SHA256}
MODEL = {"url": "https://example.com/m.keras", "sha256": SHA256, "secretName": "hub"}
TRAINER = {
    "program": {"builtin": "digits"},
    "dataset": {"path": "d.npz", "format": "npz"},
    "startFrom": "m.keras",
    "initializer": {"dataset": DATASET, "model": MODEL},
    "stop": {"maxSteps": 1},
}
RESOURCES = {"limits": {"cpu": "2", "nvidia.com/gpu": 1}, "requests": {"memory": "1Gi"}}


def rendered_job(
    trainer: dict[str, Any] = TRAINER, settings: Settings = SETTINGS, **group: Any
) -> dict[str, Any]:
    """Return the Job of the group."""
    document = dlion_job(trainer=trainer)
    document["spec"]["sites"][0]["groups"][0] |= group
    job = load_job(document)
    return worker_job(job, job.spec.sites[0].groups[0], settings, {"uid": "u", "name": "digits"})


def pod(*given: Any, **group: Any) -> dict[str, Any]:
    spec: dict[str, Any] = rendered_job(*given, **group)["spec"]["template"]["spec"]
    return spec


def byte_limits(spec: dict[str, Any]) -> list[str | None]:
    """Return the limit of each initializer in bytes."""
    variables = [{each["name"]: each.get("value") for each in one["env"]}
                 for one in spec["initContainers"][:2]]  # fmt: skip
    return [each.get("DLION_DOWNLOAD_BYTES") for each in variables]


def test_initializers_come_before_the_sidecar() -> None:
    spec = pod(image="own/image:1", resources=RESOURCES)
    assert [each["name"] for each in spec["initContainers"]] == [
        "dataset-initializer", "model-initializer", "sidecar"
    ]  # fmt: skip
    for one in spec["initContainers"][:2]:
        assert one["image"] == "own/image:1"
        assert one["resources"] == {"limits": {"cpu": "2"}, "requests": {"memory": "1Gi"}}
        assert one["command"][-1] == one["name"]
        assert one["securityContext"]["readOnlyRootFilesystem"]


def test_initializers_have_what_a_template_gives_the_trainer() -> None:
    trainer = {"name": "trainer", "image": "own/image:2",
               "resources": {"limits": {"memory": "4Gi", "nvidia.com/gpu": 1}}}  # fmt: skip
    memory = {"limits": {"memory": "9Gi"}}
    own = {"name": "model-initializer", "image": "own/image:3", "resources": memory}
    spec = pod(podTemplate={"spec": {"containers": [trainer], "initContainers": [own]}})
    dataset, model = spec["initContainers"][:2]
    assert (dataset["image"], dataset["resources"]) == (
        "own/image:2",
        {"limits": {"memory": "4Gi"}},
    )
    assert (model["image"], model["resources"]) == ("own/image:3", memory)
    site = RuntimeSpec(image="site/image:1", pod_template={"spec": {"containers": [trainer]}})
    runtime = SiteRuntime("edge", site)
    dataset = pod(TRAINER, replace(SETTINGS, runtime=runtime))["initContainers"][0]
    assert (dataset["image"], dataset["resources"]) == (
        "own/image:2",
        {"limits": {"memory": "4Gi"}},
    )


def test_trainer_and_initializers_share_a_bounded_volume() -> None:
    spec = pod(TRAINER, replace(SETTINGS, scratch=ScratchSizes(downloads="20Gi")))
    (volume,) = [each for each in spec["volumes"] if each["name"] == "downloads"]
    assert volume == {"name": "downloads", "emptyDir": {"sizeLimit": "20Gi"}}
    trainer, initializer = spec["containers"][0], spec["initContainers"][0]
    (read,) = [each for each in trainer["volumeMounts"] if each["name"] == "downloads"]
    (written,) = [each for each in initializer["volumeMounts"] if each["name"] == "downloads"]
    assert read == {**written, "readOnly": True}
    variables = {each["name"]: each.get("value") for each in initializer["env"]}
    assert {"name": "DLION_DOWNLOADS", "value": read["mountPath"]} in trainer["env"]
    assert variables["DLION_DOWNLOADS"] == read["mountPath"]
    assert byte_limits(spec) == [str(int(0.9 * 20 * 1024**3))] * 2


def test_each_initializer_has_its_own_secret() -> None:
    dataset, model, _ = pod()["initContainers"]
    sources = [each.get("valueFrom", {}).get("secretKeyRef") for each in model["env"]]
    assert [(each["name"], each["key"]) for each in filter(None, sources)] == [
        ("hub", key)
        for key in (
            "token", "username", "password", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL",
        )
    ]  # fmt: skip
    assert "secretKeyRef" not in str(dataset) + str(pod()["containers"])


def test_a_failure_that_a_retry_cannot_cure_is_final() -> None:
    rules = rendered_job()["spec"]["podFailurePolicy"]["rules"]
    for name in ("dataset-initializer", "model-initializer"):
        own = [r for r in rules if r.get("onExitCodes", {}).get("containerName") == name]
        assert [(r["action"], 66 in r["onExitCodes"]["values"]) for r in own] == [
            ("Ignore", False), ("FailIndex", True)
        ]  # fmt: skip
        assert not any(69 in r["onExitCodes"]["values"] for r in own)


def test_a_claim_may_replace_the_volume() -> None:
    claim = {"name": "downloads", "persistentVolumeClaim": {"claimName": "shared"}}
    spec = pod(podTemplate={"spec": {"volumes": [claim]}})
    assert [each for each in spec["volumes"] if each["name"] == "downloads"] == [claim]
    assert byte_limits(spec) == [None, None]


def test_a_template_may_raise_the_volumes_limit() -> None:
    volume = {"name": "downloads", "emptyDir": {"sizeLimit": "100Gi"}}
    spec = pod(podTemplate={"spec": {"volumes": [volume]}})
    assert byte_limits(spec) == [str(int(0.9 * 100 * 1024**3))] * 2


def test_a_template_must_leave_the_initializers() -> None:
    gone = {"initContainers": [{"name": "model-initializer", "$patch": "delete"}]}
    job = load_job(dlion_job(trainer=TRAINER))
    found = list(missing_parts(job, rendered_job(podTemplate={"spec": gone})))
    assert found == ["initContainers[model-initializer] is missing"]
    assert not list(missing_parts(job, rendered_job()))


@pytest.mark.parametrize("by_rights", [False, True])
def test_a_secret_is_named_by_the_jobs_field(by_rights: bool) -> None:
    job = load_job(dlion_job(trainer=TRAINER))
    group = job.spec.sites[0].groups[0]
    refused = refused_by_site(job, group, rendered_job(), SETTINGS, by_rights=by_rights)
    found = [(each.path, each.what, each.limit) for each in refused]
    wanted = [("trainer.initializer.model.secretName", "Secret hub", "secrets")]
    assert found == ([] if by_rights else wanted)


def test_an_image_that_is_not_allowed_is_named_once() -> None:
    limits = replace(SETTINGS.tenancy.pod_template, images=("allowed/*",))
    tenancy = replace(SETTINGS.tenancy, pod_template=limits)
    job = load_job(dlion_job(trainer={**TRAINER, "image": "other/image:1"}))
    made_job = worker_job(job, job.spec.sites[0].groups[0], SETTINGS, {"uid": "u", "name": "d"})
    settings, group = replace(SETTINGS, tenancy=tenancy), job.spec.sites[0].groups[0]
    refused = refused_by_site(job, group, made_job, settings, by_rights=True)
    images = [each.path for each in refused if each.what == "image other/image:1"]
    assert images == ["containers[trainer].image"]


def test_a_job_without_downloads_has_no_initializer() -> None:
    trainer = {k: v for k, v in TRAINER.items() if k not in ("initializer", "startFrom")}
    assert "downloads" not in str(rendered_job(trainer)).lower()
    assert [each["name"] for each in pod(trainer)["initContainers"]] == ["sidecar"]
