"""Test sensors and a decoder as pods of one site, from `kubectl apply` to the fetched model.

The operator accepts and runs a staged job, whose pods read the encoder from a ConfigMap. Features
reach the decoder. The keeper signs the decoder's model, the statement names the decoder as its only
replica, and the model takes images. Left out: a decoder that is lost (tests/local), rules
(tests/unit/core/policies/test_staged.py).
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.staged_encoder import save_encoder

from trained_jobs import SITE, fetched, manifest, records

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(420)]

ENCODER = "encoder.keras"
MOUNTS = {
    "volumes": [{"name": "encoder", "configMap": {"name": "encoder"}}],
    "containers": [
        {"name": "trainer", "volumeMounts": [{"name": "encoder", "mountPath": "/data"}]},
    ],
}


def staged_job() -> dict[str, Any]:
    """Return a job of one decoder and two sensors."""
    document = manifest(
        {"decoder": 500, "sensors": 500},
        exchange={"topology": "staged", "policy": "staged"},
        podTemplate={"spec": MOUNTS},
    )
    document["spec"]["trainer"] |= {"encoder": ENCODER, "stop": {"maxSteps": 400}}
    document["spec"]["batching"] = {"policy": "even", "globalBatchSize": {"initial": 64}}
    document["spec"]["sites"][0]["groups"][1]["workers"] = 2
    return document


def test_a_decoder_trains_in_a_pod_on_the_features_of_others(
    restricted: Kubectl, tmp_path: Path
) -> None:
    content = save_encoder(tmp_path / ENCODER).read_bytes()
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "encoder"},
        "binaryData": {ENCODER: base64.b64encode(content).decode()},
    }
    restricted.apply(config_map, staged_job())
    restricted.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=240)
    out = fetched(restricted, tmp_path / "out", "--all")
    events = records(out, "event")
    assert [each["rank"] for each in events if each["reason"] == "FeaturesCollected"] == [0, 0]
    assert not [each for each in events if each["reason"] == "MessageRefused"]
    (statement,) = out.rglob("model.provenance.json")
    signed = statement.read_text()
    workers = provenance(signed)["workers"]
    replicas = [each["worker"] for each in workers if each["evidence"] == "replica"]
    assert (replicas, len(workers)) == ([f"{SITE}/decoder-0"], 3)
    from dlion_worker.training.converting import load_keras_file
    from dlion_worker.training.datasets.named_datasets import digits

    (saved,) = out.rglob("model.keras")
    x, y = digits()
    found = load_keras_file(saved).predict(x / np.float32(255), verbose=0).argmax(1)
    assert np.mean(found == y) > 0.8


def provenance(envelope: str) -> dict[str, Any]:
    """Return the predicate of a signed statement."""
    payload = base64.b64decode(json.loads(envelope)["payload"])
    predicate: dict[str, Any] = json.loads(payload)["predicate"]
    return predicate
