"""Test the merge of a user's pod template into a rendered pod.

- A table has expected values written by hand from the Kubernetes documentation of the strategic
  merge patch: merge keys, replaced lists, null and directives.
- The published OpenAPI document agrees for every list of a pod.
- `kubectl patch --local` agrees for random pods and patches (skipped without the testbed's
  programs).
- Wrong types, unknown directives and a megabyte of entries cause no crash and take no minutes.
- In a worker's Job, a user's volume or variable has one source, and a command is the user's only.

Left out: that an API server accepts the result (tests/cluster/test_operator_documents.py).
"""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dlion_api.spec import load_job
from dlion_operator.children.strategic_merge import MERGE_KEYS, merged
from dlion_operator.children.worker_jobs import worker_job
from example_counts import examples
from manifest_strategies import values
from operator_world import SETTINGS, dlion_job
from testbed.binaries import built

PUBLISHED = json.loads((Path(__file__).parents[3] / "support" / "pod_spec_lists.json").read_text())
NEVER_MERGED = "volumes[].ephemeral.volumeClaimTemplate.metadata."
"""Lists in the metadata of a claim: a volume is replaced as a whole."""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mapping by key": (
        {"securityContext": {"runAsUser": 1, "fsGroup": 2}},
        {"securityContext": {"fsGroup": 3}},
        {"securityContext": {"runAsUser": 1, "fsGroup": 3}},
    ),
    "null deletes": (
        {"a": 1, "b": {"c": 1, "d": 2}},
        {"a": None, "b": {"c": None}, "never": None},
        {"b": {"d": 2}},
    ),
    "null in what is new": ({}, {"b": {"c": None, "d": 1}}, {"b": {"d": 1}}),
    "containers by name": (
        {"containers": [{"name": "trainer", "image": "a", "tty": True}]},
        {"containers": [{"name": "trainer", "image": "b"}, {"name": "mine", "image": "c"}]},
        {
            "containers": [
                {"name": "trainer", "image": "b", "tty": True},
                {"name": "mine", "image": "c"},
            ]
        },
    ),
    "command and args are atomic": (
        {"command": ["python3", "-m", "dlion"], "args": ["x"]},
        {"command": ["sh"], "args": []},
        {"command": ["sh"], "args": []},
    ),
    "capabilities are atomic": (
        {"capabilities": {"drop": ["ALL"]}},
        {"capabilities": {"drop": ["NET_RAW"]}},
        {"capabilities": {"drop": ["NET_RAW"]}},
    ),
    "a volume has the overlay's source": (
        {"volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "state", "emptyDir": {}}]},
        {"volumes": [{"name": "state", "hostPath": {"path": "/ssd"}}]},
        {
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "state", "hostPath": {"path": "/ssd"}},
            ]
        },
    ),
    "a variable has the overlay's source": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        {
            "env": [
                {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "B", "value": "2"},
            ]
        },
    ),
    "mounts by path": (
        {"volumeMounts": [{"mountPath": "/tmp", "name": "tmp", "readOnly": True}]},
        {"volumeMounts": [{"mountPath": "/tmp", "name": "ssd"}]},
        {"volumeMounts": [{"mountPath": "/tmp", "name": "ssd", "readOnly": True}]},
    ),
    "ports by number": (
        {"ports": [{"containerPort": 1, "name": "a"}]},
        {"ports": [{"containerPort": 1, "protocol": "TCP"}, {"containerPort": 2}]},
        {"ports": [{"containerPort": 1, "name": "a", "protocol": "TCP"}, {"containerPort": 2}]},
    ),
    "an entry is deleted": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {"env": [{"name": "A", "$patch": "delete"}, {"name": "no such", "$patch": "delete"}]},
        {"env": [{"name": "B", "value": "2"}]},
    ),
    "an entry is replaced": (
        {"containers": [{"name": "a", "tty": True}, {"name": "b", "tty": True}]},
        {"containers": [{"name": "a", "image": "x", "$patch": "replace"}]},
        {"containers": [{"name": "a", "image": "x"}, {"name": "b", "tty": True}]},
    ),
    "a list is replaced": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {"env": [{"$patch": "replace"}, {"name": "C", "value": "3"}]},
        {"env": [{"name": "C", "value": "3"}]},
    ),
    "a mapping is replaced": (
        {"nodeSelector": {"a": "1"}},
        {"nodeSelector": {"$patch": "replace", "b": "2"}},
        {"nodeSelector": {"b": "2"}},
    ),
    "a mapping is deleted": (
        {"affinity": {"nodeAffinity": {}}, "tty": True},
        {"affinity": {"$patch": "delete"}},
        {"affinity": {}, "tty": True},
    ),
    "tolerations are atomic": (
        {"tolerations": [{"key": "edge"}]},
        {"tolerations": [{"key": "gpu"}]},
        {"tolerations": [{"key": "gpu"}]},
    ),
    "only some fields are kept": (
        {"volumes": [], "emptyDir": {}, "name": "state"},
        {"$retainKeys": ["name", "csi"], "csi": {"driver": "d"}},
        {"name": "state", "csi": {"driver": "d"}},
    ),
    "what the first entry adds, the second changes": (
        {"containers": []},
        {"containers": [{"name": "a", "tty": True}, {"name": "a", "image": "x"}]},
        {"containers": [{"name": "a", "tty": True, "image": "x"}]},
    ),
    "deleted, then added": (
        {"env": [{"name": "A", "value": "1"}]},
        {"env": [{"name": "A", "$patch": "delete"}, {"name": "A", "value": "2"}]},
        {"env": [{"name": "A", "value": "2"}]},
    ),
    "another kind of value": ({"a": {"b": 1}, "c": [1]}, {"a": 2, "c": "x"}, {"a": 2, "c": "x"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_merge_follows_kubernetes(name: str) -> None:
    base, overlay, expected = CASES[name]
    before = copy.deepcopy((base, overlay))
    assert merged(base, overlay) == expected
    assert (base, overlay) == before


def test_every_list_of_a_pod_is_merged_as_published() -> None:
    lists = {path: entry["key"] for path, entry in PUBLISHED["merged"].items()}
    lists = {path: key for path, key in lists.items() if not path.startswith(NEVER_MERGED)}
    assert len(lists) + len(PUBLISHED["replaced"]) > 140
    assert {path: MERGE_KEYS.get(name_of(path), "") for path in lists} == lists
    replaced = [path for path in PUBLISHED["replaced"] if not path.startswith(NEVER_MERGED)]
    assert [path for path in replaced if name_of(path) in MERGE_KEYS] == []
    assert {name_of(path) for path in lists} == MERGE_KEYS.keys()


def test_entries_whose_source_is_published_as_exclusive_are_replaced() -> None:
    for path, entry in PUBLISHED["merged"].items():
        name, key = name_of(path), entry["key"]
        if "retainKeys" in entry["strategy"]:
            there, given = {key: "a", "one": {}}, {key: "a", "other": {}}
            assert merged({name: [there]}, {name: [given]}) == {name: [given]}


def name_of(path: str) -> str:
    return path.rpartition(".")[2].removesuffix("[]")


# ---- comparison with kubectl

NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = st.sampled_from(["x", "y"])


def keyed(key: str, keys: st.SearchStrategy[Any], fields: dict[str, Any]) -> Any:
    """Return a strategy for lists of entries with different keys."""
    entry = st.fixed_dictionaries({key: keys}, optional=fields)
    return st.lists(entry, max_size=3, unique_by=lambda made: made[key])


CONTAINER: dict[str, Any] = {
    "image": TEXTS,
    "tty": st.booleans(),
    "args": st.lists(TEXTS, max_size=2),
    # Each entry has a value: kubectl keeps the old value of one without, ours is replaced.
    "env": st.lists(
        st.fixed_dictionaries({"name": NAMES, "value": TEXTS}),
        max_size=3,
        unique_by=lambda made: made["name"],
    ),
    "ports": keyed("containerPort", st.sampled_from([1, 2, 3]), {"name": NAMES}),
    "volumeMounts": keyed("mountPath", TEXTS, {"name": NAMES, "readOnly": st.booleans()}),
    "resources": st.fixed_dictionaries(
        {}, optional={"limits": st.dictionaries(st.sampled_from(["cpu", "memory"]), st.just("1"))}
    ),
}
POD: dict[str, Any] = {
    "containers": keyed("name", NAMES, CONTAINER),
    "initContainers": keyed("name", NAMES, CONTAINER),
    "tolerations": st.lists(st.fixed_dictionaries({"key": TEXTS}), max_size=2),
    "nodeSelector": st.dictionaries(NAMES, TEXTS, max_size=2),
    "imagePullSecrets": keyed("name", NAMES, {}),
    "hostAliases": keyed("ip", TEXTS, {"hostnames": st.lists(NAMES, max_size=2)}),
    "topologySpreadConstraints": keyed("topologyKey", TEXTS, {"maxSkew": st.just(1)}),
    "securityContext": st.fixed_dictionaries(
        {}, optional={"runAsUser": st.just(5), "supplementalGroups": st.lists(st.just(7))}
    ),
    "priorityClassName": TEXTS,
}
PODS = st.fixed_dictionaries({}, optional=POD)


@st.composite
def patched(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a pod's spec, and another with deleted fields and directives."""
    base, made = draw(PODS), draw(PODS)
    for name in draw(st.sets(st.sampled_from(sorted(POD)), max_size=2)):
        made[name] = None
    for entries in [made, *(made.get("containers") or ())]:
        for name in [each for each in entries if each in MERGE_KEYS and entries[each]]:
            match draw(st.sampled_from(["", "", "delete", "replace"])):
                case "delete":
                    key = MERGE_KEYS[name]
                    entries[name] = [{key: entries[name][0][key], "$patch": "delete"}]
                case "replace":
                    entries[name] = [{"$patch": "replace"}, *entries[name]]
    # kubectl drops a mapping with a directive if there is no mapping to replace.
    if draw(st.booleans()) and base.get("nodeSelector") and made.get("nodeSelector"):
        made["nodeSelector"]["$patch"] = draw(st.sampled_from(["delete", "replace"]))
    return base, made


@given(patched())
@settings(  # shrinking a failure starts one process per attempt
    max_examples=examples(40), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
def test_pods_are_patched_as_kubectl_patches_them(pair: Any) -> None:
    base, overlay = pair
    programs = built()
    if programs is None:
        pytest.skip("no kubectl of the testbed: run `make testbed-setup`")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": base}
    done = subprocess.run(
        [str(programs.path("kubectl")), "patch", "--local", "--type=strategic", "-o", "json",
         "-f", "-", "-p", json.dumps({"spec": overlay})],
        input=json.dumps(pod), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert normalized(merged(base, overlay)) == normalized(json.loads(done.stdout)["spec"])


def normalized(value: Any, name: str = "") -> Any:
    """Drop empty values, which kubectl omits, and sort merged lists."""
    if isinstance(value, dict):
        made = {key: normalized(each, key) for key, each in value.items()}
        return {key: each for key, each in made.items() if each not in ({}, [], None, False)}
    if isinstance(value, list):
        # kubectl keeps the directives inside entries that it adds.
        made = [normalized(e) for e in value if not isinstance(e, dict) or "$patch" not in e]
        return sorted(made, key=lambda e: str(e[MERGE_KEYS[name]])) if name in MERGE_KEYS else made
    return value


# ---- hostile templates


@pytest.mark.parametrize(
    ("overlay", "words"),
    [
        ({"$patch": "remove"}, "$patch is 'remove'; allowed: delete, replace"),
        ({"$patch": ["delete"]}, "$patch is"),
        ({"a": {"$patch": {"x": 1}}}, "$patch is"),
        ({"env": [{"name": "A", "$patch": "merge"}]}, "$patch is 'merge'"),
        ({"env": [{"$patch": "delete"}]}, "needs its name"),
        ({"ports": [{"name": "A", "$patch": "delete"}]}, "needs its containerPort"),
        ({"$setElementOrder/containers": [{"name": "a"}]}, "$setElementOrder/containers is not"),
        ({"a": {"$deleteFromPrimitiveList/args": ["x"]}}, "$deleteFromPrimitiveList/args is not"),
        ({"$retainKeys": "name", "name": "a"}, "$retainKeys must list"),
        ({"$retainKeys": ["name"], "csi": {}}, "$retainKeys must list"),
        ({"$retainKeys": [["name"]], "name": "a"}, "$retainKeys must list"),
    ],
)
def test_a_meaningless_directive_is_refused(overlay: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"allowed|needs|not supported|must list") as raised:
        merged({"a": {"b": 1}, "env": [{"name": "A"}], "args": []}, overlay)
    assert words in str(raised.value)


@given(st.dictionaries(st.sampled_from([*POD, "a"]), values), values)
@settings(max_examples=examples(300), deadline=None)
def test_anything_is_merged_or_refused(base: dict[str, Any], overlay: Any) -> None:
    before = copy.deepcopy((base, overlay))
    if isinstance(overlay, dict):
        with contextlib.suppress(ValueError):
            merged(base, overlay)
        assert (base, overlay) == before
    for name in MERGE_KEYS:
        with contextlib.suppress(ValueError):
            merged({name: [{"name": "a"}]}, {name: overlay})


def test_entries_are_distinguished_by_type() -> None:
    """In Python, True equals 1 and has the same hash."""
    ports = [{"containerPort": 1}, {"containerPort": True}, {"containerPort": "1"}, None, 3, "x"]
    assert merged({"ports": [{"containerPort": 1, "name": "a"}]}, {"ports": ports}) == {
        "ports": [{"containerPort": 1, "name": "a"}, *ports[1:]]
    }


def test_a_megabyte_of_entries_merges_quickly() -> None:
    """An object may have this size, and the operator merges it at each look."""
    entries = [{"name": f"n{number}"} for number in range(60_000)]
    began_s = time.process_time()
    made = merged({"env": entries}, {"env": [*entries, {"name": "n7", "$patch": "delete"}]})
    assert len(made["env"]) == len(entries) - 1
    assert time.process_time() - began_s < 10


def test_the_users_sources_and_command_replace_the_operators() -> None:
    template = {
        "spec": {
            "volumes": [{"name": "state", "persistentVolumeClaim": {"claimName": "ssd"}}],
            "containers": [
                {
                    "name": "trainer",
                    "command": ["my-trainer"],
                    "env": [{"name": "DLION_POD_IP", "value": "192.0.2.1"}],
                }
            ],
        }
    }
    job = load_job(dlion_job(podTemplate=template))
    (group,) = job.spec.sites[0].groups
    spec = worker_job(job, group, SETTINGS, {"uid": "u"})["spec"]["template"]["spec"]
    states = [each for each in spec["volumes"] if each["name"] == "state"]
    assert states == [{"name": "state", "persistentVolumeClaim": {"claimName": "ssd"}}]
    (trainer,) = spec["containers"]
    assert trainer["command"] == ["my-trainer"]
    given = [each for each in trainer["env"] if each["name"] == "DLION_POD_IP"]
    assert given == [{"name": "DLION_POD_IP", "value": "192.0.2.1"}]
