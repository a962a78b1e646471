"""Every bound of the CRD's schema, each with documents at the bound and just beyond it.

The bounds are enumerated from `crds/dlionjob.yaml`, so that a new bound has its trial at once. Some
values need a meaning: a pattern, the items of a list, the other fields that a rule requires. A
table here holds them; a `KeyError` names what the table lacks.
"""
# ruff: noqa: E501 - tables: an entry a line

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlion_api.spec.failures import ENDS
from manifest_schema import nodes, openapi
from manifest_table import (
    DATASET,
    DOWNLOAD,
    EXCHANGE,
    GBS,
    GONE,
    INITIALIZER,
    PATH_DATA,
    PRIVACY,
    PROGRAM,
    SYNC,
    changed,
    smallest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIME = "2026-01-31T12:00:00Z"
CONDITION = {"type": "Ready", "status": "True", "reason": "Training", "lastTransitionTime": TIME}
SITE_STATUS = {"name": "plant-a", "state": "Ready", "workers": 3}
REVOKED_STATUS = {"name": "plant-a", "by": "plant-b", "effective": False}
PAIR_STATUS = {"pair": "plant-a to plant-b", "connected": 3, "expected": 3}
STATUS = {
    "attempt": {"number": 2, "startTime": TIME, "runStartTime": TIME},
    "conditions": [CONDITION],
    "sites": [SITE_STATUS],
    "revoked": [REVOKED_STATUS],
    "links": {"connected": 0, "expected": 0, "pairs": [PAIR_STATUS]},
    "trainerStatus": {"metrics": [{"name": "loss", "value": "1"}]},
}


@dataclass(frozen=True)
class Trial:
    """One bound: `base` is a valid document in which only the node at `path` is tested."""

    path: str
    """The node's path, as `manifest_schema.nodes` writes it."""
    keyword: str
    field: str
    """The field that the refusal names, as the API server writes it: `spec.sites[0].name`."""
    base: dict[str, Any]
    accepted: tuple[dict[str, Any], ...]
    refused: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        return f"{self.path}-{self.keyword}"


def _label(length: int) -> str:
    return "a" * length


PATTERNS: dict[str, tuple[Callable[[int], str], tuple[str, ...]]] = {
    "^(?:[a-z]([-a-z0-9]*[a-z0-9])?)$": (_label, ("1a", "a-", "-a", "A", "a.b", "a\n", "a_b", "")),
    "^(?:[a-z0-9]([-a-z0-9]*[a-z0-9])?)$": (_label, ("a-", "-a", "A", "a.b", "a\n", "a_b", "")),
    "^(?:[A-Za-z_][A-Za-z0-9_]*(\\.[A-Za-z_][A-Za-z0-9_]*)*)$": (_label, ("1a", "a..b", ".a", "a.", "a-b", "a/b", "")),
    "^(?:.*[^/]\\.py)$": (lambda n: "n" * (n - 3) + ".py", (".py", "a/.py", "net.pyc", "net.py ", "a\nb.py\n", "")),
    "^(?:[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)$": (_label, ("a..b", ".a", "a-.b", "A", "")),
    "^(?:([a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?)$": (_label, ("a..b", ".a", "a-.b", "A")),
    "^(?:[-._a-zA-Z0-9]+)$": (_label, ("a b", "a/b", "ä", "")),
    "^(?:[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?)$": (lambda n: "a/" + "B" * (n - 2), ("a", "a/", "/a", "a/b/c", "A/b", "a-/b", "")),
    "^(?:[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?)$": (_label, ("1a", "a b", "a:", "a-b", "")),
    "^(?:([^{}]|\\{(site|group|index|rank)\\})+)$": (lambda n: "é" * n, ("{sites}", "a{", "}", "{{site}}", "")),
    "^(?:[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\\.[0-9]+)?(Z|[-+][0-9:]{5}))$": (
        lambda n: TIME[:-1] + "." + "0" * (n - len(TIME) - 1) + "Z", ("2026-01-31", "now", TIME[:-1], "2026-01-31T12:00:00.Z", "")),
    "^(?:(\\+|-)?(([0-9]+(\\.[0-9]*)?)|(\\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\\+|-)?(([0-9]+(\\.[0-9]*)?)|(\\.[0-9]+))))?)$": (
        lambda n: "1" * n, ("two", "1 Gi", "1gi", "1Ki ", "0x1", "1e", "")),
    '^(?:https?://([!-"$-.0->@-~]*@)?([A-Za-z0-9._-]+|\\[[0-9A-Fa-f:.]+\\])(:[0-9]{1,5})?/([!-"$-.0->@-~]*/)*[!-"$-.0->@-~]+(\\?[!-"$-~]*)?|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/([!-"$-.0->@-~]+/)*[!-"$-.0->@-~]+)$': (
        lambda n: "https://a/" + "b" * (n - 10), ("ftp://a/b", "s3://a/b", "https://a", "https://a/", "https:///b", "https://a/b c", "https://a:b/c", "https://a/é", "https://a/b#c", "https://a/b\n", "s3://abc", "s3://abc/", "s3://abc//b", "s3://Abc/b", "s3://abc/b?c", "")),
    "^(?:[0-9a-f]{64})$": (lambda n: "a" * n, ("A" * 64, "g" * 64, "a" * 63, "")),
}  # fmt: skip
"""By pattern: a function that makes a string of a given length, and strings that are refused."""

MIN_LENGTH = {
    "^(?:.*[^/]\\.py)$": 4,
    "^(?:[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?)$": 3,
    "^(?:[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\\.[0-9]+)?(Z|[-+][0-9:]{5}))$": 22,
    '^(?:https?://([!-"$-.0->@-~]*@)?([A-Za-z0-9._-]+|\\[[0-9A-Fa-f:.]+\\])(:[0-9]{1,5})?/([!-"$-.0->@-~]*/)*[!-"$-.0->@-~]+(\\?[!-"$-~]*)?|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/([!-"$-.0->@-~]+/)*[!-"$-.0->@-~]+)$': 11,
    "^(?:[0-9a-f]{64})$": 64,
}
"""The minimum length of such strings, if not 1."""

NO_BOUNDS = {
    "additionalProperties",
    "anyOf",  # only beside x-kubernetes-int-or-string
    "default",
    "description",
    "exclusiveMaximum",  # tested with maximum
    "exclusiveMinimum",
    "format",
    "items",
    "properties",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",  # tested with the table of manifests
}


def _sites(count: int, **group: Any) -> list[dict[str, Any]]:
    return [
        {"name": f"s{i}", "groups": [{"name": "g", "workers": 1} | group]} for i in range(count)
    ]


ITEMS: dict[str, Callable[[int], Any]] = {
    "spec.sites": lambda i: _sites(i + 1)[i],
    "spec.sites[].groups": lambda i: {"name": f"g{i}", "workers": 1},
    "spec.trainer.dataset.siteClasses": lambda i: {"site": f"s{i}", "classes": [0]},
    "spec.trainer.dataset.siteClasses[].classes": lambda i: i,
    "spec.trainer.dataset.keepClasses": lambda i: i,
    "spec.trainer.freeze": lambda i: f"v{i}",
    "spec.failureRules": lambda i: {"onEnds": ["Killed"], "action": "Restart"},
    "spec.failureRules[].onEnds": lambda i: list(ENDS)[
        i % len(ENDS)
    ],  # more than all are not different
    "spec.failureRules[].groups": lambda i: f"g{i}",
    "status.conditions": lambda i: CONDITION | {"type": f"t{i}"},
    "status.sites": lambda i: SITE_STATUS | {"name": f"s{i}"},
    "status.links.pairs": lambda i: PAIR_STATUS | {"pair": f"s{i} to t{i}"},
    "status.revoked": lambda i: REVOKED_STATUS | {"name": f"plant-a/small-{i}"},
    "status.trainerStatus.metrics": lambda i: {"name": f"m{i}", "value": "1"},
}
"""By list: a function that makes distinct items, by number."""

ENTRIES: dict[str, Any] = {
    "spec.sites[].groups[].resources.requests": "1",
    "spec.sites[].groups[].resources.limits": "1",
    "spec.sites[].groups[].nodeSelector": "a",
}
"""By mapping: a value."""

FAILURE_RULE = {"onEnds": ["Killed"], "action": "FailRun"}
ONE_WORKER = {"spec.sites": _sites(1)}
MANY_WORKERS = {"spec.sites": [
    {"name": f"s{i}", "groups": [{"name": f"g{k}", "workers": 999} for k in range(8)]} for i in range(4)],
    GBS: {"initial": 10**6, "max": 10**6}}  # fmt: skip
BY_SITE = {
    "spec.sites": _sites(1),
    f"{DATASET}.partition": "bySite",
    f"{DATASET}.siteClasses": [{"site": "s0", "classes": [0]}],
}

SCENES: dict[str, dict[str, Any]] = {
    "spec.minSites": {"spec.sites": _sites(64)},
    "spec.sites[].groups[].workers": {GBS: {"initial": 5000}},
    "spec.trainer.program.module": {PROGRAM: {"module": "net"}},
    "spec.trainer.program.file": {PROGRAM: {"file": "net.py"}},
    "spec.trainer.program.configMap": {PROGRAM: {"configMap": {"name": "net", "key": "net.py"}}},
    "spec.trainer.optimizer.name": {PROGRAM: {"file": "net.py"}},
    "spec.trainer.dataset.path": {DATASET: PATH_DATA},
    "spec.trainer.dataset.format": {DATASET: PATH_DATA},
    "spec.trainer.dataset.evaluationPath": {DATASET: PATH_DATA},
    "spec.trainer.dataset.watch": {DATASET: PATH_DATA},
    "spec.trainer.dataset.siteClasses": BY_SITE,
    "spec.trainer.dataset.siteClasses-maxItems": BY_SITE | {"spec.sites": _sites(64),
        f"{DATASET}.siteClasses": [{"site": f"s{i}", "classes": [0]} for i in range(64)]},
    "spec.trainer.dataset.siteClasses-x-kubernetes-list-type": BY_SITE | {"spec.sites": _sites(2),
        f"{DATASET}.siteClasses": [{"site": f"s{i}", "classes": [0]} for i in range(2)]},
    "spec.trainer.dataset.siteClasses[].site-maxLength": BY_SITE | {"spec.sites": [
        {"name": "a" * 40, "groups": [{"name": "g", "workers": 1}]}], f"{DATASET}.siteClasses.0.site": "a" * 40},
    "spec.trainer.dataset.siteClasses[].site-minLength": BY_SITE | {"spec.sites": [
        {"name": "a", "groups": [{"name": "g", "workers": 1}]}], f"{DATASET}.siteClasses.0.site": "a"},
    "spec.trainer.dataset.keepClasses[]": {f"{DATASET}.keepClasses": [0]},
    INITIALIZER: {DATASET: PATH_DATA, "spec.trainer.startFrom": "m", INITIALIZER: {"dataset": DOWNLOAD, "model": DOWNLOAD}},
    "spec.trainer.privacy": PRIVACY,
    "spec.trainer.freeze[]": {"spec.trainer.freeze": ["v"]},
    "spec.batching.policy": {f"{SYNC}.mode": "synchronous",
        EXCHANGE: {"policy": "dlion", "prioritization": False}},
    "spec.batching.globalBatchSize.initial": ONE_WORKER | {f"{GBS}.max": 10**6},
    "spec.batching.globalBatchSize.max": ONE_WORKER | {f"{GBS}.initial": 1},
    "spec.batching.globalBatchSize.warmupFraction": {f"{GBS}.maxFraction": 1},
    "spec.batching.globalBatchSize.maxFraction": {f"{GBS}.warmupFraction": 0},
    "spec.exchange.topology": {EXCHANGE: {"policy": "dlion", "degree": 2, "topology": "bipartite"}},
    "spec.exchange.grouping": {EXCHANGE: {"policy": "dlion", "topology": "clustered"}},
    "spec.exchange.degree": {"spec.sites": _sites(2),
        EXCHANGE: {"policy": "dlion", "topology": "bipartite"}},
    "spec.exchange.degree-maximum": MANY_WORKERS | {
        EXCHANGE: {"policy": "dlion", "topology": "randomRegular", "degree": 2}},
    "spec.exchange.propagation": {f"{EXCHANGE}.policy": "dlion"},
    "spec.exchange.residual": {f"{EXCHANGE}.policy": "dlion"},
    "spec.synchronization.backupWorkers": MANY_WORKERS,
    "spec.synchronization.mode": {f"{SYNC}.backupWorkers": 1},
    "spec.failureRules": {"spec.failureRules": [FAILURE_RULE]},
    "spec.failureRules[].onEnds[]": {"spec.failureRules": [FAILURE_RULE]},
    "spec.failureRules[].groups": {"spec.failureRules": [FAILURE_RULE],
        "spec.sites": [{"name": "s", "groups": [{"name": f"g{i}", "workers": 1} for i in range(8)]},
                       {"name": "t", "groups": [{"name": "g8", "workers": 1}]}]},
    "spec.failureRules[].groups[]": {"spec.failureRules": [FAILURE_RULE | {"groups": ["a"]}], "spec.sites": [
        {"name": "s", "groups": [{"name": "a", "workers": 1}, {"name": "a" * 16, "workers": 1}]}]},
    "spec.maxRetries": ONE_WORKER,
    "spec.nodePolicies.heat": {"spec.nodePolicies.heat": {"thresholdCelsius": 80}},
    "spec.tls.secretName": {"spec.tls": {"mode": "Secret", "secretName": "ca"}},
    "spec.tls.issuerName": {"spec.tls": {"mode": "CertManager", "issuerName": "ca"}},
}  # fmt: skip
"""By the beginning of a path (or path-keyword): the other fields that are required; the longest
match counts."""

WITH: dict[tuple[str, object], dict[str, Any]] = {
    ("spec.tls.mode", "Secret"): {"spec.tls.secretName": "ca"},
    ("spec.tls.mode", "CertManager"): {"spec.tls.issuerName": "ca"},
    ("spec.exchange.topology", "allToAll"): {f"{EXCHANGE}.degree": GONE},
    ("spec.exchange.topology", "ring"): {f"{EXCHANGE}.degree": GONE},
    ("spec.exchange.topology", "clustered"): {f"{EXCHANGE}.degree": GONE},
    ("spec.exchange.topology", "staged"): {
        f"{EXCHANGE}.degree": GONE,
        f"{EXCHANGE}.policy": "staged",
        "spec.trainer.encoder": "encoder.keras",
    },
}
"""By a value of a field: the changes that it requires elsewhere."""


def trials() -> list[Trial]:
    """All bounds, from the root down."""
    return [trial for path, node in nodes(openapi()) for trial in _of(path, node)]


def document() -> dict[str, Any]:
    """The smallest manifest, with a status in which every list has an item."""
    return copy.deepcopy(smallest() | {"status": STATUS})


def _of(path: str, node: dict[str, Any]) -> Iterator[Trial]:
    if path in ("", "apiVersion", "kind", "metadata", "status"):
        node = {key: value for key, value in node.items() if key != "type"}
    for keyword in node:
        values = _values(path, keyword, node)
        if values is None:
            continue
        base = changed(document(), _scene(path, keyword))
        place = _place(path)
        if keyword == "required":
            gone = [f"{place}.{name}".lstrip(".") for name in node["required"]]
            for name in gone:
                yield Trial(
                    path,
                    f"required {name}",
                    _spelt(name),
                    base,
                    (base,),
                    (changed(base, {name: GONE}),),
                )
            continue
        accepted, refused = (
            tuple(changed(base, {place: v} | WITH.get((path, str(v)), {})) for v in half)
            for half in values
        )
        yield Trial(path, keyword, _spelt(place), base, accepted, refused)


Halves = tuple[list[Any], list[Any]]
"""Values that are accepted, and values that are refused."""


def _values(path: str, keyword: str, node: dict[str, Any]) -> Halves | None:
    """Values at a bound and just beyond it; None if the keyword bounds nothing."""
    limit = node[keyword]
    match keyword:
        case "required":
            return [], []
        case "type":
            return [], [[] if limit == "object" else {}, *_of_other_types(limit)]
        case "x-kubernetes-int-or-string":
            return [1, "1"], [0.5, True, {}]
        case "minimum" | "maximum":
            return _beside(node, keyword)
        case "enum":
            return list(limit), ["other", limit[0].swapcase(), f"{limit[0]} "]
        case "pattern":
            made, refused = PATTERNS[limit]
            longest: int = node["maxLength"]
            return [made(MIN_LENGTH.get(limit, 1)), made(longest)], list(refused)
        case "minLength" | "maxLength":
            beyond = limit - 1 if keyword == "minLength" else limit + 1
            return [_string(node, limit, path)], [_string(node, beyond, path)]
        case _:
            return _of_collections(path, keyword, limit)


def _of_collections(path: str, keyword: str, limit: Any) -> Halves | None:
    match keyword:
        case "minItems":
            return [_items(path, limit)], [_items(path, limit - 1)]
        case "maxItems":
            return [_items(path, limit)], [_items(path, limit + 1)]
        case "maxProperties":
            made = [{f"k{i}": ENTRIES[path] for i in range(count)} for count in (limit, limit + 1)]
            return made[:1], made[1:]
        case "x-kubernetes-list-type":
            return None if limit == "atomic" else ([_items(path, 2)], [_items(path, 1) * 2])
        case _ if keyword in NO_BOUNDS:
            return None
        case _:
            raise KeyError(f"{path}: no trial is known for {keyword!r}")


def _of_other_types(kind: str) -> list[Any]:
    others: dict[str, Any] = {"string": "a", "integer": 1.5, "boolean": True, "array": ["a"]}
    return [
        value
        for other, value in others.items()
        if other != kind and not (kind == "number" and other == "integer")
    ]


def _beside(node: dict[str, Any], keyword: str) -> Halves:
    limit, outwards = node[keyword], -1 if keyword == "minimum" else 1
    if node.get(f"exclusive{keyword.capitalize()}"):
        return [math.nextafter(limit, -outwards * math.inf)], [limit]
    if node["type"] == "integer":
        return [limit], [limit + outwards]
    return [limit], [math.nextafter(limit, outwards * math.inf)]


def _string(node: dict[str, Any], length: int, path: str) -> str:
    if "pattern" in node:
        return PATTERNS[node["pattern"]][0](length)
    return ("a" if path.endswith("siteClasses[].site") else "é") * length


def _items(path: str, count: int) -> list[Any]:
    return [ITEMS[path](i) for i in range(count)]


def _scene(path: str, keyword: str) -> dict[str, Any]:
    fitting = [key for key in SCENES if f"{path}-{keyword}" == key or _begins(path, key)]
    return SCENES[max(fitting, key=len)] if fitting else {}


def _begins(path: str, key: str) -> bool:
    return path == key or path.startswith((f"{key}.", f"{key}["))


def _place(path: str) -> str:
    return path.replace("[]", ".0").replace("{}", ".cpu")


def _spelt(place: str) -> str:
    return "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in place.split(".")).lstrip(".")
