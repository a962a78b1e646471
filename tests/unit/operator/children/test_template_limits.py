"""Test which podTemplates a site allows.

- The operator's own pods need no permission.
- Each field that gives a job rights of others is refused by default, with its path and the list
  that can allow it. An entry of that list allows it.
- The rights of the writer allow Secrets and service accounts only.
- A template that removes a field mounts no token. Every emptyDir has a limit.
- No allowed pod has a Secret, account or token, whatever hostile templates it is merged from.

Left out: that the operator then creates no pod (tests/unit/operator/plan/test_start_refusal.py),
and pod security `restricted` (test_pod_security.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.document import parse
from dlion_api.errors import SpecError
from dlion_api.spec import RuntimeSpec, load_job
from dlion_operator.children.template_limits import (
    MAX_LISTED,
    RefusedField,
    refusal_message,
    refused_fields,
)
from dlion_operator.children.worker_jobs import refused_by_site, worker_job
from dlion_operator.model.site_runtime import SiteRuntime
from dlion_operator.model.tenancy import TemplateLimits, Tenancy, matches
from example_counts import examples
from operator_world import SETTINGS, dlion_job

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = TemplateLimits()
Spec = dict[str, Any]


def volume(**source: Any) -> Spec:
    return {"volumes": [{"name": "x", **source}]}


def trainer(**fields: Any) -> Spec:
    return {"containers": [{"name": "trainer", **fields}]}


def rendered(spec: Any, group_spec: Any = None, **metadata: Any) -> tuple[Any, Any, Any]:
    """Return a job, a group and the group's Job with these templates."""
    document = dlion_job({"small": 1}, podTemplate={"metadata": metadata, "spec": spec})
    if group_spec is not None:
        document["spec"]["sites"][0]["groups"][0]["podTemplate"] = {"spec": group_spec}
    job = load_job(document)
    (group,) = job.spec.sites[0].groups
    return job, group, worker_job(job, group, SETTINGS, {"uid": "u"})


def refused(
    spec: Any, group_spec: Any = None, limits: TemplateLimits = LIMITS, *, by_rights: bool = False,
    **metadata: Any,
) -> tuple[RefusedField, ...]:  # fmt: skip
    job, group, made = rendered(spec, group_spec, **metadata)
    tenancy = replace(SETTINGS.tenancy, pod_template=limits)
    return refused_by_site(
        job, group, made, replace(SETTINGS, tenancy=tenancy), by_rights=by_rights
    )


def test_the_operators_own_pod_needs_no_permission() -> None:
    assert refused({}) == ()


DEFAULT_TOKEN = "a token of service account default"
TOKEN_SOURCE = {"serviceAccountToken": {"path": "token"}}
GUARDED: dict[str, tuple[Spec, str, str, str, dict[str, Any]]] = {
    # template, path in the pod, value, and the list that allows it
    "account": (
        {"serviceAccountName": "admin"}, "serviceAccountName", "service account admin",
        "service_accounts", {"service_accounts": ("admin",)},
    ),
    "account, old name": (
        {"serviceAccount": "admin"}, "serviceAccount", "service account admin",
        "service_accounts", {"service_accounts": ("adm*",)},
    ),
    "token": (
        {"automountServiceAccountToken": True}, "automountServiceAccountToken", DEFAULT_TOKEN,
        "service_accounts", {"service_accounts": ("default",)},
    ),
    "projected token": (
        volume(projected={"sources": [TOKEN_SOURCE]}),
        "volumes[x].projected.sources[0].serviceAccountToken", DEFAULT_TOKEN,
        "service_accounts", {"service_accounts": ("default",)},
    ),
    "mounted Secret": (
        volume(secret={"secretName": "db"}), "volumes[x].secret", "Secret db",
        "secrets", {"secrets": ("db",)},
    ),
    "projected Secret": (
        volume(projected={"sources": [{"secret": {"name": "db"}}]}),
        "volumes[x].projected.sources[0].secret", "Secret db", "secrets", {"secrets": ("d*",)},
    ),
    "Secret as a variable": (
        trainer(env=[{"name": "K", "valueFrom": {"secretKeyRef": {"name": "db", "key": "k"}}}]),
        "containers[trainer].env[K].secretKeyRef", "Secret db", "secrets", {"secrets": ("*",)},
    ),
    "all variables of a Secret": (
        trainer(envFrom=[{"secretRef": {"name": "db"}, "prefix": "X"}]),
        "containers[trainer].envFrom[0].secretRef", "Secret db", "secrets", {"secrets": ("db",)},
    ),
    "Secret of the sidecar": (
        {"initContainers": [{"name": "sidecar", "envFrom": [{"secretRef": {"name": "db"}}]}]},
        "initContainers[sidecar].envFrom[0].secretRef", "Secret db",
        "secrets", {"secrets": ("db",)},
    ),
    "volume by a driver": (
        volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "db"}}),
        "volumes[x].csi", "a volume of kind csi", "volumes", {"volumes": ("csi",),
                                                              "secrets": ("db",)},
    ),
    "node": ({"nodeName": "control-plane"}, "nodeName", "the field nodeName", "fields",
             {"fields": ("nodeName",)}),
    "field of a newer Kubernetes": (
        {"futureHostAccess": True}, "futureHostAccess", "the field futureHostAccess", "fields",
        {"fields": ("futureHostAccess",)},
    ),
    "debugging container": (
        {"ephemeralContainers": [{"name": "sh", "image": "sh"}]}, "ephemeralContainers",
        "the field ephemeralContainers", "fields", {"fields": ("ephemeralContainers",)},
    ),
    "field of a container": (
        trainer(futureField=1), "containers[trainer].futureField", "the field", "fields",
        {"fields": ("futureField",)},
    ),
    "priority of the cluster's own pods": (
        {"priorityClassName": "system-node-critical"}, "priorityClassName",
        "priority class system-node-critical", "priority_classes",
        {"priority_classes": ("system-*",)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GUARDED)
def test_a_field_with_rights_of_others_is_refused_unless_listed(name: str) -> None:
    spec, path, what, limit, allowing = GUARDED[name]
    by_rights = limit in ("secrets", "service_accounts")
    assert refused(spec) == (RefusedField(path, what, limit, by_rights),)
    assert refused({}, spec) == refused(spec), "a group's template has the same limits"
    assert refused(spec, limits=TemplateLimits(**allowing)) == ()
    assert bool(refused(spec, by_rights=True)) is not by_rights


OPEN: dict[str, tuple[Spec, dict[str, Any], str]] = {
    # allowed by default, and refused once the list has another entry
    "image": (trainer(image="evil.example/x:1"), {"images": ("registry.example/*",)}, "image"),
    "image of another container": (
        {"containers": [{"name": "more", "image": "evil.example/x:1"}]},
        {"images": ("registry.example/*",)}, "image evil.example/x:1",
    ),
    "image as a volume": (
        volume(image={"reference": "evil.example/x:1"}), {"images": ("registry.example/*",)},
        "image evil.example/x:1",
    ),
    "claim": (volume(persistentVolumeClaim={"claimName": "c"}), {"claims": ("data",)}, "claim c"),
    "ConfigMap": (volume(configMap={"name": "c"}), {"config_maps": ()}, "ConfigMap c"),
    "ConfigMap as a variable": (
        trainer(env=[{"name": "K", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]),
        {"config_maps": ()}, "ConfigMap c",
    ),
    "ConfigMap's variables": (
        trainer(envFrom=[{"configMapRef": {"name": "c"}}]), {"config_maps": ()}, "ConfigMap c",
    ),
    "projected ConfigMap": (
        volume(projected={"sources": [{"configMap": {"name": "c"}}]}), {"config_maps": ()},
        "ConfigMap c",
    ),
    "ephemeral claim": (
        volume(ephemeral={"volumeClaimTemplate": {}}), {"volumes": ("emptyDir", "configMap")},
        "a volume of kind ephemeral",
    ),
    "pull Secret": ({"imagePullSecrets": [{"name": "p"}]}, {"pull_secrets": ()}, "pull Secret p"),
    "runtime class": ({"runtimeClassName": "kata"}, {"runtime_classes": ()}, "class kata"),
    "priority class": ({"priorityClassName": "high"}, {"priority_classes": ()}, "class high"),
    "taint": (
        {"tolerations": [{"key": "edge", "operator": "Exists"}]}, {"tolerations": ("gpu",)},
        "the taint edge",
    ),
    "all taints": (
        {"tolerations": [{"operator": "Exists"}]}, {"tolerations": ("gpu", "e*")},
        "it tolerates every taint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_fields_allowed_by_default_can_be_restricted(name: str) -> None:
    spec, narrow, words = OPEN[name]
    assert refused(spec) == ()
    found = refused(spec, limits=TemplateLimits(**narrow))
    assert [each.limit for each in found] == list(narrow)
    assert words in found[0].what
    assert refused({}, limits=TemplateLimits(**narrow)) == (), (
        "the operator's own pod stays allowed"
    )


def test_annotations_are_narrowed_and_apparmor_stays_on() -> None:
    networks = {"k8s.v1.cni.cncf.io/networks": "storage"}
    assert refused({}, annotations=networks) == ()
    (found,) = refused({}, annotations=networks, limits=TemplateLimits(annotations=("team/*",)))
    assert found.limit == "annotations"
    off = {"container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"}
    assert "AppArmor" in refused({}, annotations=off)[0].what


def test_images_of_the_manifest_need_an_entry_and_the_operators_do_not() -> None:
    limits = TemplateLimits(images=("registry.example/team/*", "registry.example/one:1"))
    for image, is_allowed in {
        SETTINGS.images.worker: True,
        "registry.example/team/a:1": True,
        "registry.example/one:1": True,
        "registry.example/one:2": False,
        "registry.example/teams/a:1": False,
        "evil.example/registry.example/team/a:1": False,
    }.items():
        assert (refused(trainer(image=image), limits=limits) == ()) is is_allowed, image


@pytest.mark.parametrize(
    "removed",
    [
        {"automountServiceAccountToken": None},
        {"$patch": "replace", "tolerations": [], "containers": [
            {"name": "trainer", "image": "dlion/worker:1"}]},
        {"$retainKeys": ["containers", "tolerations"], "containers": [], "tolerations": []},
    ],
)  # fmt: skip
def test_a_template_that_removes_the_field_gets_no_token(removed: Spec) -> None:
    *_, made = rendered(removed)
    assert made["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert refused(removed) == ()


@pytest.mark.parametrize(
    ("malformed", "path"),
    [
        ({"volumes": {"name": "x"}}, "volumes"),
        ({"volumes": ["x"]}, "volumes[5]"),
        (volume(secret=["db"]), "volumes[x].secret"),
        (volume(secret={}), "volumes[x].secret"),
        (volume(projected={"sources": {"secret": {"name": "db"}}}), "volumes[x].projected.sources"),
        (
            volume(projected={"sources": [{"podCertificate": {}}]}),
            "volumes[x].projected.sources[0]",
        ),
        (trainer(env="K"), "containers[trainer].env"),
        (trainer(env=[{"name": "K", "valueFrom": "x"}]), "containers[trainer].env[K]"),
        (trainer(env=[{"name": "K", "valueFrom": {"vaultRef": {}}}]), "containers[trainer].env[K]"),
        (trainer(envFrom=[{"secretRef": None}]), "containers[trainer].envFrom[0].secretRef"),
        ({"serviceAccountName": ["admin"]}, "serviceAccountName"),
        ({"serviceAccountName": 0}, "serviceAccountName"),
        ({"tolerations": ["x"]}, "tolerations[2]"),
        ({"initContainers": "x"}, "initContainers"),
    ],
)  # fmt: skip
def test_a_malformed_pod_is_refused_and_not_ignored(malformed: Spec, path: str) -> None:
    assert path in [each.path for each in refused(malformed)]


def test_neither_of_two_accounts_hides_the_other() -> None:
    both = {"serviceAccountName": "default", "serviceAccount": "admin"}
    assert [each.path for each in refused(both)] == ["serviceAccount"]


def test_the_message_names_each_field_the_list_and_what_to_do() -> None:
    found = refused(
        {"serviceAccountName": "admin", "nodeName": "n", **volume(secret={"secretName": "db"})}
    )
    assert refusal_message(found) == (
        "the job asks for what this site does not allow: nodeName: the field nodeName;"
        " serviceAccountName: service account admin; volumes[x].secret: Secret db. Remove it, or"
        " have this site's administrators allow it in tenancy.podTemplate.fields or"
        " tenancy.podTemplate.secrets or tenancy.podTemplate.serviceAccounts"
    )
    many = tuple(RefusedField(f"f{n}", "x" * 300, "fields") for n in range(500))
    assert f"and {500 - MAX_LISTED} more" in refusal_message(many)
    assert len(refusal_message(many)) < 4096


def test_lists_that_match_too_much_are_refused() -> None:
    assert parse(TemplateLimits, {"images": ["a.example/*", "*", "b:1"]}).images[1] == "*"
    for wrong in ({"images": ["registry.example*"]}, {"secrets": ["a*b"]}, {"secrets": [""]}):
        with pytest.raises(SpecError):
            parse(TemplateLimits, wrong)
    assert not matches("registry.example.attacker.com/x", ["registry.example/*"])


def test_every_emptydir_has_a_limit() -> None:
    """This includes the operator's, their replacements and a user's own; a smaller limit of the
    user stays."""
    volumes = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "mine", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "more", "emptyDir": {"sizeLimit": "0"}},
    ]
    *_, made = rendered({"volumes": volumes})
    limits = {
        each["name"]: each["emptyDir"]["sizeLimit"]
        for each in made["spec"]["template"]["spec"]["volumes"]
        if "emptyDir" in each
    }
    scratch = SETTINGS.scratch
    assert limits == {
        "tmp": scratch.state, "shared": scratch.shared, "state": scratch.state, "mine": "1Mi",
        "more": scratch.state,
    }  # fmt: skip


# ---- hostile templates -----------------------------------------------------------------------

NAMES = st.sampled_from(["db", "default", "admin", "trainer", "sidecar", "config", "token", "x"])
SOURCES = st.sampled_from([
    {"secret": {"secretName": "db"}}, {"configMap": {"name": "c"}}, {"emptyDir": {}},
    {"projected": {"sources": [{"secret": {"name": "db"}}]}},
    {"projected": {"sources": [TOKEN_SOURCE]}}, {"persistentVolumeClaim": {"claimName": "c"}},
    {"csi": {"driver": "d", "nodePublishSecretRef": {"name": "db"}}}, {"secret": None}, {},
])  # fmt: skip
DIRECTIVES = st.sampled_from([{}, {}, {}, {"$patch": "replace"}, {"$patch": "delete"}])
VOLUMES = st.builds(lambda name, source, more: {"name": name, **source, **more},
                    NAMES, SOURCES, DIRECTIVES)  # fmt: skip
VARIABLES = st.builds(
    lambda name, source: {"name": name, **source},
    NAMES,
    st.sampled_from([
        {"value": "v"}, {"valueFrom": {"secretKeyRef": {"name": "db", "key": "k"}}},
        {"valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}, {"valueFrom": None},
    ]),
)  # fmt: skip
CONTAINERS = st.builds(
    lambda name, env, more, directive: {"name": name, "env": env, **more, **directive},
    NAMES,
    st.lists(VARIABLES, max_size=2),
    st.sampled_from([{}, {"envFrom": [{"secretRef": {"name": "db"}}]}, {"image": "i:1"}]),
    DIRECTIVES,
)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "serviceAccountName": NAMES | st.none(),
        "serviceAccount": NAMES | st.none(),
        "automountServiceAccountToken": st.sampled_from([True, False, None, "true"]),
        "volumes": st.lists(VOLUMES, max_size=2),
        "containers": st.lists(CONTAINERS, max_size=2),
        "initContainers": st.lists(CONTAINERS, max_size=2),
        "$patch": st.just("replace"),
    },
)
NONSENSE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["db", "name", ""]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(
        st.sampled_from(["name", "secret", "env", "volumes", "containers", "sources", "projected",
                         "valueFrom", "x", "image"]), below, max_size=3),
    max_leaves=12,
)  # fmt: skip


def naive_rights(value: Any, key: str = "") -> Iterator[str]:
    """Find every reference to a Secret, an account or a token, at any depth."""
    if isinstance(value, list):
        for each in value:
            yield from naive_rights(each, key)
    elif isinstance(value, dict):
        if key in ("secret", "secretKeyRef", "secretRef", "nodePublishSecretRef"):
            yield str(value.get("secretName", value.get("name")))
        if key == "serviceAccountToken" and value.get("audience") != "coordinator.dlion.dev":
            yield "token"
        for name, below in value.items():
            yield from naive_rights(below, name)
    elif key in ("serviceAccountName", "serviceAccount") and value not in ("default", None):
        yield str(value)
    elif key == "automountServiceAccountToken" and value is not False:
        yield "token"


@settings(max_examples=examples(600), deadline=None)
@given(SPECS, st.none() | SPECS)
def test_no_allowed_pod_has_a_secret_an_account_or_a_token(job_spec: Any, group_spec: Any) -> None:
    try:
        *_, made = rendered(job_spec, group_spec)
    except ValueError:
        return  # the operator refuses the directive
    found = refused(job_spec, group_spec)
    asked = set(naive_rights(made["spec"]["template"]["spec"]))
    paths = {each.path for each in found}
    assert bool(paths) or not asked, (asked, made["spec"]["template"]["spec"])
    if asked:
        assert {each.limit for each in found} & {"secrets", "service_accounts", "volumes", ""}


@settings(max_examples=examples(800), deadline=None)
@given(st.dictionaries(st.sampled_from([
    "containers", "initContainers", "volumes", "serviceAccountName", "tolerations", "nodeName",
    "imagePullSecrets", "priorityClassName", "runtimeClassName", "odd"]), NONSENSE))  # fmt: skip
def test_malformed_input_gives_the_same_answer_twice(spec: Any) -> None:
    once = refused_fields({"spec": spec, "metadata": spec}, {}, LIMITS)
    assert once == refused_fields({"spec": spec, "metadata": spec}, {}, LIMITS)
    assert len(refusal_message(once)) < 8192


def test_the_writers_rights_allow_no_secret_that_the_admission_policy_does_not_compare() -> None:
    spec = volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "db"}})
    limits = replace(LIMITS, volumes=("csi",))
    (found,) = refused(spec, limits=limits, by_rights=True)
    assert (found.path, found.what, found.limit) == ("volumes[x].csi", "Secret db", "secrets")


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("dataSource", {"kind": "PersistentVolumeClaim", "name": "theirs"}, "claim theirs"),
        ("dataSourceRef", {"kind": "VolumeSnapshot", "name": "theirs"}, "claim theirs"),
        ("dataSourceRef", "theirs", "it has not the form that a pod needs"),
        ("volumeName", "theirs", "volume theirs"),
    ],
)
def test_an_ephemeral_claim_has_no_data_of_a_claim_that_is_not_listed(
    field: str, value: Any, what: str
) -> None:
    spec = volume(ephemeral={"volumeClaimTemplate": {"spec": {field: value}}})
    (found,) = refused(spec, limits=replace(LIMITS, claims=("mine-*",)), by_rights=True)
    assert (found.path, found.what) == (f"volumes[x].ephemeral.{field}", what)
    assert refused(volume(ephemeral={"volumeClaimTemplate": {"spec": {}}})) == ()


def test_the_programs_config_map_must_be_listed() -> None:
    document = dlion_job({"small": 1}, podTemplate=None)
    document["spec"]["trainer"]["program"] = {"configMap": {"name": "theirs", "key": "main.py"}}
    job = load_job(document)
    (group,) = job.spec.sites[0].groups
    made = worker_job(job, group, SETTINGS, {"uid": "u"})
    assert refused_by_site(job, group, made, SETTINGS, by_rights=False) == ()
    tenancy = Tenancy(pod_template=replace(LIMITS, config_maps=("mine-*",)))
    (found,) = refused_by_site(job, group, made, replace(SETTINGS, tenancy=tenancy), by_rights=True)
    assert (found.path, found.what) == ("volumes[program].configMap", "ConfigMap theirs")


@pytest.mark.parametrize("where", ["group", "template"])
def test_the_keepers_image_must_be_allowed_though_no_worker_has_it(where: str) -> None:
    document = dlion_job({"small": 1}, podTemplate=None)
    document["spec"]["trainer"]["image"] = "evil/image:1"
    if where == "group":
        document["spec"]["sites"][0]["groups"][0]["image"] = "team/image:1"
    else:
        document["spec"]["podTemplate"] = {"spec": trainer(image="team/image:1")}
    job = load_job(document)
    (group,) = job.spec.sites[0].groups
    limits = replace(LIMITS, images=("team/*",))
    settings = replace(SETTINGS, tenancy=Tenancy(pod_template=limits))
    made = worker_job(job, group, settings, {"uid": "u"})
    found = refused_by_site(job, group, made, settings, by_rights=True)
    assert found == (RefusedField("trainer.image", "image evil/image:1", "images"),)


def test_the_keeper_gets_nothing_that_a_groups_template_hides() -> None:
    spec = {
        "priorityClassName": "system-node-critical",
        "runtimeClassName": "bare",
        "tolerations": [{"operator": "Exists"}],
        "imagePullSecrets": [{"name": "theirs"}],
    }
    hiding = {
        "priorityClassName": None,
        "runtimeClassName": None,
        "tolerations": None,
        "imagePullSecrets": [{"name": "theirs", "$patch": "delete"}],
    }
    limits = replace(LIMITS, runtime_classes=(), tolerations=(), pull_secrets=())
    found = refused(spec, hiding, limits)
    assert [each.path for each in found] == [
        "imagePullSecrets[theirs]", "priorityClassName", "runtimeClassName", "tolerations[2]"
    ]  # fmt: skip


def test_a_pod_without_a_spec_is_refused() -> None:
    for nothing in ({}, {"spec": None}, {"spec": ["x"]}):
        assert [each.path for each in refused_fields(nothing, {}, LIMITS)] == ["spec"]


SITE_POD: Spec = {
    "metadata": {"annotations": {"site.example/tier": "edge"}},
    "spec": {
        "serviceAccountName": "site",
        "automountServiceAccountToken": True,
        "runtimeClassName": "kata",
        "priorityClassName": "system-node-critical",
        "nodeName": "n1",
        "volumes": [{"name": "ca", "secret": {"secretName": "site-ca"}}],
        "containers": [
            {
                "name": "trainer",
                "image": "site/worker:2",
                "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            },
            {"name": "logs", "image": "site/logs:1", "envFrom": [{"secretRef": {"name": "logs"}}]},
        ],
    },
}


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        (None, []),
        ({"tolerations": []}, []),
        ({"serviceAccountName": "other"}, ["automountServiceAccountToken", "serviceAccountName"]),
        ({"volumes": [{"name": "ca", "secret": {"secretName": "db"}}]}, ["volumes[ca].secret"]),
        ({"nodeName": "n2"}, ["nodeName"]),
        ({"containers": [{"name": "logs", "image": "other"}]}, ["containers[logs].image"]),
        (
            {
                "containers": [
                    {"name": "mine", "image": "x", "envFrom": [{"secretRef": {"name": "logs"}}]}
                ]
            },
            ["containers[mine].envFrom[0].secretRef", "containers[mine].image"],
        ),
    ],
)
def test_only_what_the_sites_runtime_gives_is_allowed(spec: Spec | None, paths: list[str]) -> None:
    limits = replace(LIMITS, images=())
    runtime = SiteRuntime("edge", RuntimeSpec(image="site/worker:2", pod_template=SITE_POD))
    settings = replace(SETTINGS, runtime=runtime, tenancy=Tenancy(pod_template=limits))
    document = dlion_job({"small": 1}, podTemplate={"spec": spec} if spec is not None else None)
    job = load_job(document)
    (group,) = job.spec.sites[0].groups
    made = worker_job(job, group, settings, {"uid": "u"})
    found = refused_by_site(job, group, made, settings, by_rights=False)
    assert [each.path for each in found] == paths


def test_a_job_gets_no_token_if_its_runtime_gives_an_account_without_one() -> None:
    pod = {"spec": {"serviceAccountName": "site"}}
    runtime = SiteRuntime("edge", RuntimeSpec(pod_template=pod))
    settings = replace(SETTINGS, runtime=runtime)
    job = load_job(
        dlion_job({"small": 1}, podTemplate={"spec": {"automountServiceAccountToken": True}})
    )
    (group,) = job.spec.sites[0].groups
    made = worker_job(job, group, settings, {"uid": "u"})
    (found,) = refused_by_site(job, group, made, settings, by_rights=False)
    assert (found.path, found.what) == (
        "automountServiceAccountToken", "a token of service account site"
    )  # fmt: skip


@pytest.mark.parametrize("account", [None, "default", ""])
@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"automountServiceAccountToken": True}, "automountServiceAccountToken"),
        (
            volume(projected={"sources": [TOKEN_SOURCE]}),
            "volumes[x].projected.sources[0].serviceAccountToken",
        ),
    ],
)
def test_a_runtimes_token_does_not_become_that_of_the_default_account(
    given: Spec, path: str, account: str | None
) -> None:
    """The admission policy finds no token in the job, and so does not check the writer."""
    pod = {"spec": {"serviceAccountName": "site", **given}}
    runtime = SiteRuntime("edge", RuntimeSpec(pod_template=pod))
    settings = replace(SETTINGS, runtime=runtime)
    job = load_job(dlion_job({"small": 1}, podTemplate={"spec": {"serviceAccountName": account}}))
    (group,) = job.spec.sites[0].groups
    made = worker_job(job, group, settings, {"uid": "u"})
    found = refused_by_site(job, group, made, settings, by_rights=True)
    assert found == (RefusedField(path, DEFAULT_TOKEN, "service_accounts"),)
    limits = replace(LIMITS, service_accounts=("default",))
    settings = replace(settings, tenancy=Tenancy(pod_template=limits))
    assert refused_by_site(job, group, made, settings, by_rights=False) == ()
