"""Manifests that must be accepted or refused, each as a change to the smallest valid one.

`judge` names who else refuses beside our parser: the CRD's schema, one of its CEL rules, or the API
server itself. The API server checks routing and ObjectMeta, of which a CRD can bound the name only.
"""
# ruff: noqa: E501 - a table: a case a line

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, Literal

GONE = object()
"""The value of a change that removes the field."""


def smallest() -> dict[str, Any]:
    """A manifest with only the required fields, at two sites with three workers and one."""
    return {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": "digits"},
        "spec": {
            "sites": [
                {"name": "plant-a", "groups": [{"name": "small", "workers": 3}]},
                {"name": "plant-b", "groups": [{"name": "large", "workers": 1}]},
            ],
            "trainer": {
                "program": {"builtin": "digits"},
                "dataset": {"name": "digits"},
                "stop": {"maxSteps": 100},
            },
        },
    }


def changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with values set at dotted paths; a number is an index."""
    result = copy.deepcopy(document)
    for path, value in changes.items():
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        place: Any = result
        for step in parents:
            place = place[step] if isinstance(step, int) else place.setdefault(step, {})
        if value is GONE:
            del place[last]
        else:
            place[last] = copy.deepcopy(value)
    return result


@dataclass(frozen=True)
class Case:
    """`path` is where our parser finds the (first) problem; empty if all accept it."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    judge: Literal["schema", "rule", "server"] = "schema"

    @property
    def document(self) -> dict[str, Any]:
        return changed(smallest(), self.changes)


DATASET, STOP, OPTIMIZER = "spec.trainer.dataset", "spec.trainer.stop", "spec.trainer.optimizer"
GBS, EXCHANGE, GROUP = "spec.batching.globalBatchSize", "spec.exchange", "spec.sites.0.groups.0"
PROGRAM, TRANSFER, SYNC = "spec.trainer.program", "spec.knowledgeTransfer", "spec.synchronization"

RULES, INITIALIZER = "spec.failureRules", "spec.trainer.initializer"
PRIVACY = {
    "spec.trainer.privacy": {"clipNorm": 1, "noiseMultiplier": 2},
    f"{TRANSFER}.policy": "none",
}
PATH_DATA = {"path": "x", "format": "npz"}
DOWNLOAD = {"url": "https://example.com/d.zip", "sha256": "0123456789abcdef" * 4}


def _site(name: str, workers: int = 1) -> dict[str, Any]:
    return {"name": name, "groups": [{"name": "g", "workers": workers}]}


ACCEPTED = [
    Case("nothing but what is required"),
    Case("a run id", {"spec.runId": "2026-a"}),
    Case("a job name of 32 characters", {"metadata.name": "j" * 32}),
    Case("labels and annotations", {"metadata.labels": {"a": "b"}, "metadata.annotations": {"c": ""}}),
    Case("a namespace", {"metadata.namespace": "ml"}),
    Case("what a cluster writes into metadata", {"metadata.uid": "1", "metadata.generation": 3}),
    Case("a status, which is not read", {"status": {"observedGeneration": 1}}),
    Case("unequal groups at a site", {"spec.sites.0.groups": [
        {"name": "small", "workers": 2}, {"name": "gpu", "workers": 1}]}),
    Case("quantities as strings and integers", {f"{GROUP}.resources": {
        "requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": 2}}}),
    Case("a node selector", {f"{GROUP}.nodeSelector": {"kubernetes.io/arch": "arm64"}}),
    Case("an image and a pod template for a group", {
        f"{GROUP}.image": "registry.example/trainer:2-gpu",
        f"{GROUP}.resources": {"limits": {"nvidia.com/gpu": 1}},
        f"{GROUP}.podTemplate": {"spec": {"runtimeClassName": "nvidia", "affinity": None}}}),
    Case("a heat budget", {"spec.nodePolicies": {"heat": {"thresholdCelsius": 74.5}}}),
    Case("a heat budget with its floor", {"spec.nodePolicies": {
        "heat": {"thresholdCelsius": 150, "minComputeShare": 1}}}),
    Case("demand without forecasts", {"spec.nodePolicies": {"demand": {"prediction": "none"}}}),
    Case("node policies without any", {"spec.nodePolicies": {}}),
    Case("a quorum of all sites", {"spec.minSites": 2}),
    Case("a failure rule for a group of one site", {RULES: [
        {"onEnds": ["Killed", "Disrupted"], "groups": ["large"], "action": "Ignore"}]}),
    Case("restarts after errors of the program, and the run's end after too many", {RULES: [
        {"onEnds": ["ProgramFailed"], "action": "Restart"},
        {"onEnds": ["RestartsExceeded"], "action": "FailRun"}]}),
    Case("restarts without end while a server of downloads is away", {RULES: [
        {"onEnds": ["InitializerFailed"], "action": "Ignore"}]}),
    Case("retries at one site", {"spec.sites": [_site("s")], "spec.maxRetries": 3}),
    Case("64 sites", {"spec.sites": [_site(f"s{i}") for i in range(64)]}),
    Case("a program in a module", {PROGRAM: {"module": "pkg.mod"}}),
    Case("a program in a file", {PROGRAM: {"file": "models/net.py"}}),
    Case("a program in a config map", {PROGRAM: {"configMap": {"name": "net", "key": "net.py"}}}),
    Case("a program with data of its own", {PROGRAM: {"file": "net.py"}, DATASET: GONE}),
    Case("a keras data set", {f"{DATASET}.name": "keras:fashion_mnist"}),
    Case("files by path", {DATASET: {"path": "data/train", "format": "tfrecord"}}),
    Case("a held-out path", {DATASET: {
        "path": "train.npz", "format": "npz", "evaluationPath": "test.npz"}}),
    Case("paths of each worker's own", {DATASET: {
        "path": "{site}/{group}-{index}", "format": "npz", "evaluationPath": "{rank}.npz"}}),
    Case("a watched path", {DATASET: {
        "path": "images", "format": "images", "evaluationPath": "held-out", "watch": True}}),
    Case("classes by site", {f"{DATASET}.partition": "bySite", f"{DATASET}.siteClasses": [
        {"site": "plant-b", "classes": [5, 6]}, {"site": "plant-a", "classes": [0, 5]}]}),
    Case("bySite without classes", {f"{DATASET}.partition": "bySite"}),
    Case("a skewed partition", {f"{DATASET}.partition": "dirichlet", f"{DATASET}.dirichletAlpha": 0.1}),
    Case("adam", {OPTIMIZER: {"name": "adam", "learningRate": 0.001}}),
    Case("an optimizer of the program's own", {
        PROGRAM: {"file": "net.py"}, OPTIMIZER: {"name": "program"}}),
    Case("an integer where a number may stand", {f"{OPTIMIZER}.learningRate": 1}),
    Case("an integral float where an integer may stand", {"spec.minSites": 2.0}),
    Case("nesterov with momentum", {f"{OPTIMIZER}.nesterov": True}),
    Case("privacy", PRIVACY),
    Case("frozen variables", {"spec.trainer.freeze": ["encoder*", "conv2d/kernel"]}),
    Case("several ends", {STOP: {"maxSeconds": 60, "targetAccuracy": 0.9, "maxEpochs": 3}}),
    Case("an endless run", {STOP: {"continuous": True}}),
    Case("an empty object takes its defaults", {"spec.exchange": {}, "spec.tls": {}}),
    Case("a null counts as absent", {"spec.exchange": None, "spec.suspend": None}),
    Case("the published form", {f"{EXCHANGE}.policy": "dlion-published", f"{EXCHANGE}.weighting": "dlion_ratio"}),
    Case("error feedback", {EXCHANGE: {"policy": "dlion", "residual": "perLink"}}),
    Case("a ring", {EXCHANGE: {"policy": "dlion", "topology": "ring"}}),
    Case("a random graph",
         {EXCHANGE: {"policy": "dlion", "topology": "randomRegular", "degree": 3}}),
    Case("two sides", {EXCHANGE: {"policy": "dlion", "topology": "bipartite", "degree": 2}}),
    Case("two unequal sides",
         {f"{GROUP}.workers": 2, EXCHANGE: {"policy": "dlion", "topology": "bipartite"}}),
    Case("groups by links", {EXCHANGE: {"policy": "dlion", "topology": "clustered"}}),
    Case("groups by predicted links",
         {EXCHANGE: {"policy": "dlion", "topology": "clustered", "grouping": "learned"}}),
    Case("sensors and a decoder", {
        "spec.trainer.encoder": "encoder.keras", EXCHANGE: {"policy": "staged", "topology": "staged"}}),
    Case("a downloaded data set", {DATASET: PATH_DATA, f"{INITIALIZER}.dataset": DOWNLOAD}),
    Case("a downloaded model", {"spec.trainer.startFrom": "m.keras", f"{INITIALIZER}.model": DOWNLOAD}),
    Case("a downloaded encoder, with a Secret", {"spec.trainer.encoder": "m.keras",
         f"{INITIALIZER}.model": DOWNLOAD | {"secretName": "hub"}}),
    Case("a data set in S3", {DATASET: PATH_DATA,
         f"{INITIALIZER}.dataset": DOWNLOAD | {"url": "s3://my.bucket-1/a/d%20e.zip", "secretName": "keys"}}),
    Case("selective propagation",
         {EXCHANGE: {"policy": "dlion", "propagation": "selective", "residual": "perLink"}}),
    Case("goodput of whole gradients", {"spec.batching.policy": "goodput", f"{SYNC}.mode": "synchronous",
         EXCHANGE: {"policy": "dlion", "prioritization": False}}),
    Case("backup workers", {SYNC: {"mode": "backup", "backupWorkers": 1}}),
    Case("links that are open to all on a network of pods", {"spec.tls": {"mode": "Disabled"}}),
    Case("exposure by a gateway", {"spec.network": {"exposure": "Gateway"}}),
    Case("a CA in a secret", {"spec.tls": {"mode": "Secret", "secretName": "ca"}}),
    Case("a cert-manager issuer", {"spec.tls": {"mode": "CertManager", "issuerName": "ca"}}),
    Case("Kueue manages it", {"spec.managedBy": "kueue.x-k8s.io/multikueue"}),
    Case("deadlines", {"spec.activeDeadlineSeconds": 60, "spec.ttlSecondsAfterFinished": 0}),
    Case("any pod template", {"spec.podTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {
        "tolerations": [{"operator": "Exists", "tolerationSeconds": None}]}}}),
    Case("an initial batch at its maximum", {GBS: {"initial": 200, "max": 200}}),
    Case("a batch of a sample each", {f"{GBS}.initial": 4}),
    Case("a warm-up until growth ends", {GBS: {"warmupFraction": 0.2, "maxFraction": 0.2}}),
    Case("all but one are backup workers", {SYNC: {"mode": "backup", "backupWorkers": 3}}),
    Case("a ring of two", {"spec.sites": [_site("a"), _site("b")], EXCHANGE: {"policy": "dlion", "topology": "ring"}}),
    Case("a single pair", {"spec.sites": [_site("a", 2)],
         EXCHANGE: {"policy": "dlion", "topology": "randomRegular", "degree": 1}}),
    Case("a trimmed mean of three", {f"{GROUP}.workers": 2, f"{EXCHANGE}.robustness": "trimmed"}),
    Case("krum of four", {f"{EXCHANGE}.robustness": "krum"}),
    Case("clipping in rounds, whatever the mode", {f"{EXCHANGE}.robustness": "clip", f"{SYNC}.mode": "bounded"}),
    Case("clipping on a ring", {EXCHANGE: {"policy": "full", "topology": "ring", "robustness": "clip"}}),
    Case("a quarantine", {f"{EXCHANGE}.quarantine": "majority"}),
    Case("warnings without a barrier", {EXCHANGE: {"policy": "gaia", "robustness": "detect"}}),
    Case("other parameters of a policy", {EXCHANGE: {"policy": "gaia", "parameters": {"a": [1, {"b": None}]}}}),
    Case("a limit exactly met", {f"{TRANSFER}.lambda": 1, f"{DATASET}.keepFraction": 1.0}),
]  # fmt: skip

REFUSED = [
    Case("demand with a word that YAML reads as false", {
        "spec.nodePolicies": {"demand": {"prediction": False}}},
        "spec.nodePolicies.demand.prediction"),
    Case("an unknown field", {"spec.tranier": {}}, "spec.tranier"),
    Case("an unknown field deep down", {f"{OPTIMIZER}.lr": 0.1}, f"{OPTIMIZER}.lr"),
    Case("an unknown field of an item", {f"{GROUP}.count": 1}, "spec.sites[0].groups[0].count"),
    Case("no spec", {"spec": GONE}, "spec"),
    Case("no name", {"metadata.name": GONE}, "metadata.name"),
    Case("another version", {"apiVersion": "dlion.dev/v1"}, "apiVersion"),
    Case("another kind", {"kind": "Job"}, "kind"),
    Case("a long job name", {"metadata.name": "j" * 33}, "metadata.name"),
    Case("a job name with a digit first", {"metadata.name": "1st"}, "metadata.name"),
    Case("a job name with a dot", {"metadata.name": "a.b"}, "metadata.name"),
    Case("a job name in capitals", {"metadata.name": "Digits"}, "metadata.name"),
    Case("a job name with a line end", {"metadata.name": "digits\n"}, "metadata.name"),
    Case("a bad namespace", {"metadata.namespace": "A"}, "metadata.namespace", "server"),
    Case("unknown metadata", {"metadata.nmae": "a"}, "metadata.nmae", "server"),
    Case("a label that is not a string", {"metadata.labels": {"a": 1}}, "metadata.labels.a", "server"),
    Case("a run id that is not a string", {"spec.runId": 1}, "spec.runId"),
    Case("a long run id", {"spec.runId": "r" * 25}, "spec.runId"),
    Case("an empty run id", {"spec.runId": ""}, "spec.runId"),
    Case("no sites", {"spec.sites": GONE}, "spec.sites"),
    Case("an empty list of sites", {"spec.sites": []}, "spec.sites"),
    Case("sites that are null", {"spec.sites": None}, "spec.sites"),
    Case("sites that are a mapping", {"spec.sites": {"plant-a": {}}}, "spec.sites"),
    Case("65 sites", {"spec.sites": [_site(f"s{i}") for i in range(65)]}, "spec.sites"),
    Case("a site twice", {"spec.sites": [_site("a"), _site("a")]}, "spec.sites[1].name"),
    Case("a group twice", {"spec.sites.0.groups": [{"name": "g", "workers": 1}] * 2},
         "spec.sites[0].groups[1].name"),
    Case("a null in a list", {"spec.sites.1": None}, "spec.sites[1]"),
    Case("a site name with an underscore", {"spec.sites.0.name": "plant_a"}, "spec.sites[0].name"),
    Case("a long group name", {f"{GROUP}.name": "g" * 17}, "spec.sites[0].groups[0].name"),
    Case("no workers", {f"{GROUP}.workers": 0}, "spec.sites[0].groups[0].workers"),
    Case("half a worker", {f"{GROUP}.workers": 1.5}, "spec.sites[0].groups[0].workers"),
    Case("workers in quotes", {f"{GROUP}.workers": "3"}, "spec.sites[0].groups[0].workers"),
    Case("workers that are true", {f"{GROUP}.workers": True}, "spec.sites[0].groups[0].workers"),
    Case("a thousand workers", {f"{GROUP}.workers": 1000}, "spec.sites[0].groups[0].workers"),
    Case("no quantity", {f"{GROUP}.resources.limits": {"cpu": "two"}},
         "spec.sites[0].groups[0].resources.limits.cpu"),
    Case("a quantity that is a float", {f"{GROUP}.resources.limits": {"cpu": 0.5}},
         "spec.sites[0].groups[0].resources.limits.cpu"),
    Case("a program that does not exist", {f"{PROGRAM}.builtin": "resnet"}, f"{PROGRAM}.builtin"),
    Case("two programs", {f"{PROGRAM}.file": "a.py"}, PROGRAM, "rule"),
    Case("no program", {PROGRAM: {}}, PROGRAM, "rule"),
    Case("a program that is not Python", {PROGRAM: {"file": "net.txt"}}, f"{PROGRAM}.file"),
    Case("a module that is a path", {PROGRAM: {"module": "pkg/mod"}}, f"{PROGRAM}.module"),
    Case("half a config map", {PROGRAM: {"configMap": {"name": "net"}}}, f"{PROGRAM}.configMap.key"),
    Case("a built-in program without data", {DATASET: GONE}, DATASET, "rule"),
    Case("a keras data set that is none of images", {f"{DATASET}.name": "keras:imdb"}, f"{DATASET}.name"),
    Case("data by name and by path", {f"{DATASET}.path": "x", f"{DATASET}.format": "npz"}, DATASET, "rule"),
    Case("a path without a format", {DATASET: {"path": "x"}}, f"{DATASET}.format", "rule"),
    Case("a held-out path without a path", {f"{DATASET}.evaluationPath": "x"},
         f"{DATASET}.evaluationPath", "rule"),
    Case("a placeholder that is none", {DATASET: {"path": "{sites}/x", "format": "npz"}},
         f"{DATASET}.path"),
    Case("half a placeholder", {DATASET: {
        "path": "x", "format": "npz", "evaluationPath": "{site"}}, f"{DATASET}.evaluationPath"),
    Case("an unknown data set", {f"{DATASET}.name": "imagenet"}, f"{DATASET}.name"),
    Case("everything held out", {f"{DATASET}.evaluationFraction": 1}, f"{DATASET}.evaluationFraction"),
    Case("classes without bySite", {f"{DATASET}.siteClasses": [
        {"site": "plant-a", "classes": [0]}, {"site": "plant-b", "classes": [1]}]},
         f"{DATASET}.siteClasses", "rule"),
    Case("classes of a site that is not there", {f"{DATASET}.partition": "bySite",
         f"{DATASET}.siteClasses": [{"site": "plant-a", "classes": [0]}, {"site": "x", "classes": [1]}]},
         f"{DATASET}.siteClasses", "rule"),
    Case("a site without classes", {f"{DATASET}.partition": "bySite",
         f"{DATASET}.siteClasses": [{"site": "plant-a", "classes": [0]}]},
         f"{DATASET}.siteClasses", "rule"),
    Case("a class twice", {f"{DATASET}.keepClasses": [1, 2, 1]}, f"{DATASET}.keepClasses[2]"),
    Case("a negative class", {f"{DATASET}.keepClasses": [-1]}, f"{DATASET}.keepClasses[0]"),
    Case("watching a data set by name", {f"{DATASET}.watch": True}, f"{DATASET}.watch", "rule"),
    Case("a watched path with nothing that stays held out", {DATASET: {
        "path": "images", "format": "images", "watch": True}}, f"{DATASET}.watch", "rule"),
    Case("a truth value in quotes", {f"{DATASET}.watch": "true"}, f"{DATASET}.watch"),
    Case("a learning rate of 0", {f"{OPTIMIZER}.learningRate": 0}, f"{OPTIMIZER}.learningRate"),
    Case("a momentum of 1", {f"{OPTIMIZER}.momentum": 1}, f"{OPTIMIZER}.momentum"),
    Case("nesterov without momentum", {OPTIMIZER: {"nesterov": True, "momentum": 0}},
         f"{OPTIMIZER}.nesterov", "rule"),
    Case("nesterov with adam", {OPTIMIZER: {"nesterov": True, "name": "adam"}},
         f"{OPTIMIZER}.nesterov", "rule"),
    Case("a built-in program's own optimizer", {OPTIMIZER: {"name": "program"}},
         f"{OPTIMIZER}.name", "rule"),
    Case("an unknown optimizer", {OPTIMIZER: {"name": "adamw"}}, f"{OPTIMIZER}.name"),
    Case("a number that is none", {f"{OPTIMIZER}.learningRate": math.nan}, f"{OPTIMIZER}.learningRate"),
    Case("an infinite number", {f"{OPTIMIZER}.learningRate": math.inf}, f"{OPTIMIZER}.learningRate"),
    Case("privacy with shared losses", PRIVACY | {f"{TRANSFER}.policy": "best2all"}, "spec.trainer.privacy", "rule"),
    Case("privacy of sensors", PRIVACY | {"spec.trainer.encoder": "encoder.keras",
         EXCHANGE: {"policy": "staged", "topology": "staged"}}, "spec.trainer.privacy", "rule"),
    Case("privacy of data that grow", PRIVACY | {DATASET: {"path": "images", "format": "images",
         "evaluationPath": "held-out", "watch": True}}, "spec.trainer.privacy", "rule"),
    Case("privacy without near-duplicates", PRIVACY | {f"{DATASET}.dropNearDuplicates": True},
         "spec.trainer.privacy", "rule"),
    Case("privacy without noise", {"spec.trainer.privacy": {"clipNorm": 1, "noiseMultiplier": 0},
         f"{TRANSFER}.policy": "none"}, "spec.trainer.privacy.noiseMultiplier", "rule"),
    Case("privacy without precision", {"spec.trainer.privacy": {"clipNorm": 1e-10, "noiseMultiplier": 1},
         f"{TRANSFER}.policy": "none"}, "spec.trainer.privacy.clipNorm", "rule"),
    Case("privacy with certainty", {"spec.trainer.privacy": {"clipNorm": 1, "noiseMultiplier": 1, "delta": 0},
         f"{TRANSFER}.policy": "none"}, "spec.trainer.privacy.delta"),
    Case("half of privacy", {"spec.trainer.privacy": {"clipNorm": 1}, f"{TRANSFER}.policy": "none"},
         "spec.trainer.privacy.noiseMultiplier"),
    Case("no end", {STOP: GONE}, STOP),
    Case("an empty end", {STOP: {}}, STOP, "rule"),
    Case("an end that is not one", {STOP: {"continuous": False}}, STOP, "rule"),
    Case("an accuracy in percent", {STOP: {"targetAccuracy": 96}}, f"{STOP}.targetAccuracy"),
    Case("too many frozen patterns", {"spec.trainer.freeze": [f"v{i}" for i in range(65)]},
         "spec.trainer.freeze"),
    Case("an empty pattern", {"spec.trainer.freeze": [""]}, "spec.trainer.freeze[0]"),
    Case("a text for an object", {"spec.trainer": "digits"}, "spec.trainer"),
    Case("a list for an object", {"spec.batching": []}, "spec.batching"),
    Case("a batch above its maximum", {f"{GBS}.initial": 6000}, f"{GBS}.initial", "rule"),
    Case("a batch with too few samples", {f"{GROUP}.workers": 999}, f"{GBS}.initial", "rule"),
    Case("a factor that does not grow", {f"{GBS}.factor": 1}, f"{GBS}.factor"),
    Case("fractions the wrong way round", {f"{GBS}.warmupFraction": 0.5},
         f"{GBS}.warmupFraction", "rule"),
    Case("an unknown policy", {f"{EXCHANGE}.policy": "DLion"}, f"{EXCHANGE}.policy"),
    Case("an unknown codec", {f"{EXCHANGE}.codec": "float8"}, f"{EXCHANGE}.codec"),
    Case("the published form without its weights", {f"{EXCHANGE}.policy": "dlion-published"},
         f"{EXCHANGE}.weighting", "rule"),
    Case("the published form with a residual",
         {f"{EXCHANGE}.policy": "dlion-published", f"{EXCHANGE}.weighting": "dlion_ratio",
          f"{EXCHANGE}.residual": "shared"}, f"{EXCHANGE}.residual", "rule"),
    Case("an unknown quarantine", {f"{EXCHANGE}.quarantine": "always"}, f"{EXCHANGE}.quarantine"),
    Case("a quarantine without warnings", {EXCHANGE: {"quarantine": "majority", "robustness": "off"}},
         f"{EXCHANGE}.quarantine", "rule"),
    Case("an unknown robustness", {f"{EXCHANGE}.robustness": "median"}, f"{EXCHANGE}.robustness"),
    Case("clipping without a barrier of its own", {EXCHANGE: {"policy": "gaia", "robustness": "clip"}},
         f"{EXCHANGE}.robustness", "rule"),
    Case("clipping of late gradients", {EXCHANGE: {"policy": "full", "robustness": "clip"},
         f"{SYNC}.mode": "bounded"}, f"{EXCHANGE}.robustness", "rule"),
    Case("clipping of sums for some peers", {EXCHANGE: {
        "policy": "dlion", "propagation": "selective", "robustness": "clip"}},
         f"{EXCHANGE}.robustness", "rule"),
    Case("a trimmed mean of neighbours", {EXCHANGE: {
        "policy": "dlion", "topology": "ring", "robustness": "trimmed"}},
         f"{EXCHANGE}.robustness", "rule"),
    Case("a trimmed mean of two", {f"{GROUP}.workers": 1, f"{EXCHANGE}.robustness": "trimmed"},
         f"{EXCHANGE}.robustness", "rule"),
    Case("krum of three", {f"{GROUP}.workers": 2, f"{EXCHANGE}.robustness": "krum"},
         f"{EXCHANGE}.robustness", "rule"),
    Case("an unknown topology", {EXCHANGE: {"policy": "dlion", "topology": "star"}}, f"{EXCHANGE}.topology"),
    Case("a ring of one", {"spec.sites": [{"name": "a", "groups": [{"name": "g", "workers": 1}]}],
         EXCHANGE: {"policy": "dlion", "topology": "ring"}}, f"{EXCHANGE}.topology", "rule"),
    Case("adaptive on a ring", {f"{EXCHANGE}.topology": "ring"}, f"{EXCHANGE}.topology", "rule"),
    Case("a degree that is not given", {EXCHANGE: {"policy": "dlion", "topology": "randomRegular"}},
         f"{EXCHANGE}.topology", "rule"),
    Case("a degree that is not used", {f"{EXCHANGE}.degree": 2}, f"{EXCHANGE}.degree", "rule"),
    Case("predicted links without groups", {f"{EXCHANGE}.grouping": "learned"}, f"{EXCHANGE}.grouping", "rule"),
    Case("an unknown grouping", {EXCHANGE: {"policy": "dlion", "topology": "clustered", "grouping": "spectral"}},
         f"{EXCHANGE}.grouping"),
    Case("a degree of groups", {EXCHANGE: {"policy": "dlion", "topology": "clustered", "degree": 2}},
         f"{EXCHANGE}.degree", "rule"),
    Case("a degree of all workers", {EXCHANGE: {"policy": "dlion", "topology": "randomRegular", "degree": 4}},
         f"{EXCHANGE}.degree", "rule"),
    Case("an odd number of ends", {f"{GROUP}.workers": 4,
         EXCHANGE: {"policy": "dlion", "topology": "randomRegular", "degree": 3}}, f"{EXCHANGE}.degree", "rule"),
    Case("pairs that nothing joins", {EXCHANGE: {"policy": "dlion", "topology": "randomRegular", "degree": 1}},
         f"{EXCHANGE}.degree", "rule"),
    Case("a degree above the other side", {EXCHANGE: {"policy": "dlion", "topology": "bipartite", "degree": 3}},
         f"{EXCHANGE}.degree", "rule"),
    Case("a degree between unequal sides", {f"{GROUP}.workers": 4,
         EXCHANGE: {"policy": "dlion", "topology": "bipartite", "degree": 2}}, f"{EXCHANGE}.degree", "rule"),
    Case("sensors without their policy", {
        "spec.trainer.encoder": "encoder.keras", EXCHANGE: {"policy": "dlion", "topology": "staged"}},
         f"{EXCHANGE}.topology", "rule"),
    Case("sensors without an encoder", {EXCHANGE: {"policy": "staged", "topology": "staged"}},
         f"{EXCHANGE}.topology", "rule"),
    Case("an encoder and an earlier model", {
        "spec.trainer.encoder": "encoder.keras", "spec.trainer.startFrom": "model.keras"},
         "spec.trainer.encoder", "rule"),
    Case("a download without a path", {f"{INITIALIZER}.dataset": DOWNLOAD}, INITIALIZER + ".dataset", "rule"),
    Case("a download that grows", {DATASET: PATH_DATA | {"evaluationPath": "y", "watch": True},
         f"{INITIALIZER}.dataset": DOWNLOAD}, INITIALIZER + ".dataset", "rule"),
    Case("a downloaded model that nothing reads", {f"{INITIALIZER}.model": DOWNLOAD},
         INITIALIZER + ".model", "rule"),
    Case("a password in a URL", {DATASET: PATH_DATA,
         f"{INITIALIZER}.dataset": DOWNLOAD | {"url": "https://user:word@example.com/d.zip"}},
         INITIALIZER + ".dataset.url", "rule"),
    Case("credentials in plain text", {DATASET: PATH_DATA,
         f"{INITIALIZER}.dataset": DOWNLOAD | {"url": "http://example.com/d.zip", "secretName": "hub"}},
         INITIALIZER + ".dataset.secretName", "rule"),
    Case("an object in S3 without a Secret", {DATASET: PATH_DATA,
         f"{INITIALIZER}.dataset": DOWNLOAD | {"url": "s3://bucket/d.zip"}},
         INITIALIZER + ".dataset.secretName", "rule"),
    Case("a bucket without an object", {DATASET: PATH_DATA,
         f"{INITIALIZER}.dataset": DOWNLOAD | {"url": "s3://bucket/", "secretName": "keys"}},
         INITIALIZER + ".dataset.url"),
    Case("a host in place of a bucket", {DATASET: PATH_DATA,
         f"{INITIALIZER}.dataset": DOWNLOAD | {"url": "s3://s3.example.com:9000/d.zip", "secretName": "keys"}},
         INITIALIZER + ".dataset.url"),
    Case("a download of another scheme", {DATASET: PATH_DATA,
         f"{INITIALIZER}.dataset": DOWNLOAD | {"url": "ftp://example.com/d.zip"}}, INITIALIZER + ".dataset.url"),
    Case("a download without a digest", {DATASET: PATH_DATA,
         f"{INITIALIZER}.dataset": {"url": "https://example.com/d.zip"}}, INITIALIZER + ".dataset.sha256"),
    Case("selective whole gradients", {EXCHANGE: {"policy": "full", "propagation": "selective"}},
         f"{EXCHANGE}.propagation", "rule"),
    Case("goodput of selective gradients", {"spec.batching.policy": "goodput", f"{SYNC}.mode": "synchronous",
         EXCHANGE: {"policy": "dlion", "prioritization": False, "propagation": "selective"}},
         "spec.batching.policy", "rule"),
    Case("selective with one rest",
         {EXCHANGE: {"policy": "dlion", "propagation": "selective", "residual": "shared"}},
         f"{EXCHANGE}.residual", "rule"),
    Case("no backup worker", {f"{SYNC}.mode": "backup"}, f"{SYNC}.backupWorkers", "rule"),
    Case("only backup workers", {SYNC: {"mode": "backup", "backupWorkers": 4}},
         f"{SYNC}.backupWorkers", "rule"),
    Case("a lambda above 1", {f"{TRANSFER}.lambda": 1.01}, f"{TRANSFER}.lambda"),
    Case("a quorum above the sites", {"spec.minSites": 3}, "spec.minSites", "rule"),
    Case("a failure rule for a group that no site has", {RULES: [
        {"onEnds": ["Killed"], "groups": ["large", "medium"], "action": "FailRun"}]}, RULES, "rule"),
    Case("a failure rule for an exit code", {RULES: [{"onEnds": ["137"], "action": "FailRun"}]},
         f"{RULES}[0].onEnds[0]"),
    Case("a failure rule with an action of Kubernetes", {RULES: [
        {"onEnds": ["Killed"], "action": "FailJob"}]}, f"{RULES}[0].action"),
    Case("a failure rule for no end", {RULES: [{"onEnds": [], "action": "FailRun"}]},
         f"{RULES}[0].onEnds"),
    Case("restarts after the last restart", {RULES: [
        {"onEnds": ["Killed", "RestartsExceeded"], "action": "Ignore"}]}, f"{RULES}[0].action", "rule"),
    Case("nine failure rules", {RULES: [{"onEnds": ["Killed"], "action": "Ignore"}] * 9}, RULES),
    Case("retries at two sites", {"spec.maxRetries": 1}, "spec.maxRetries", "rule"),
    Case("small messages", {"spec.network.maxMessageBytes": 1000}, "spec.network.maxMessageBytes"),
    Case("a gateway that is to distinguish workers by names that no client sends",
         {"spec.network": {"exposure": "Gateway"}, "spec.tls": {"mode": "Disabled"}},
         "spec.network.exposure", "rule"),
    Case("ports of nodes that are open to all",
         {"spec.network": {"exposure": "NodePort"}, "spec.tls": {"mode": "Disabled"}},
         "spec.network.exposure", "rule"),
    Case("load balancers that are open to all",
         {"spec.network": {"exposure": "LoadBalancer"}, "spec.tls": {"mode": "Disabled"}},
         "spec.network.exposure", "rule"),
    Case("a secret that is not named", {"spec.tls": {"mode": "Secret"}}, "spec.tls.secretName", "rule"),
    Case("a secret that is not used", {"spec.tls.secretName": "ca"}, "spec.tls.secretName", "rule"),
    Case("an issuer that is not named", {"spec.tls": {"mode": "CertManager"}},
         "spec.tls.issuerName", "rule"),
    Case("a manager without a domain", {"spec.managedBy": "kueue"}, "spec.managedBy"),
    Case("a deadline of 0", {"spec.activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds"),
    Case("a pod template that is a list", {"spec.podTemplate": []}, "spec.podTemplate"),
    Case("a group's pod template that is a list", {f"{GROUP}.podTemplate": []},
         "spec.sites[0].groups[0].podTemplate"),
    Case("a group's image that is too long", {f"{GROUP}.image": "i" * 513},
         "spec.sites[0].groups[0].image"),
]  # fmt: skip

CASES = [*ACCEPTED, *REFUSED]
