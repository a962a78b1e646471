"""All parsers of foreign input, and the share of the fuzzing for each.

Shares follow the cost: a frame takes a tenth of a millisecond, a document two, a file of images
twenty. A module is imported when its turn comes. Only `data_files` and `models` import TensorFlow.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable
from pathlib import Path

from hostile.attacking import Target


def _attack(module: str, name: str) -> Callable[[random.Random, Path], str | None]:
    def attack(rng: random.Random, folder: Path) -> str | None:
        made: str | None = getattr(importlib.import_module(module), name)(rng, folder)
        return made

    return attack


def _target(name: str, where: str, inputs_per_frame: float) -> Target:
    module, _, function = where.partition(".")
    return Target(name, _attack(f"hostile.{module}", function), inputs_per_frame)


TARGETS = (
    _target("frames", "frames.attack_inbox", 1.0),
    _target("acknowledgements", "frames.attack_outbox", 0.1),
    _target("state chunks", "frames.attack_assembly", 0.1),
    _target("gradient payloads", "payloads.attack_gradient", 0.25),
    _target("losses, meetings, states", "payloads.attack_words", 0.1),
    _target("messages to the policies", "payloads.attack_policies", 0.05),
    _target("local socket", "records.attack_socket", 0.1),
    _target("progress records", "records.attack_record", 0.1),
    _target("events.jsonl", "records.attack_events", 0.02),
    _target("what a report reads beside them", "result_folders.attack_report", 0.005),
    _target("coordinator requests", "records.attack_coordinator", 0.1),
    _target("memberships", "records.attack_membership", 0.02),
    _target("words of sidecars", "records.attack_sidecar", 0.05),
    _target("certificate signing requests", "records.attack_signing", 0.1),
    _target("words of other sites' operators", "federation.attack_federation", 0.1),
    _target("tokens of pods", "tokens.attack_token", 0.02),
    _target("what a keeper sends", "fetched.attack_fetched", 0.02),
    _target("kept membership", "records.attack_kept", 0.02),
    _target("manifests", "documents.attack_manifest", 0.03),
    _target("assignments of --set", "documents.attack_set", 0.03),
    _target("environment files", "documents.attack_environment", 0.03),
    _target("checkpoints", "archives.attack_checkpoint", 0.06),
    _target("snapshots of replicas", "archives.attack_replica", 0.02),
    _target("npz files", "data_files.attack_npz", 0.02),
    _target("models to start from", "models.attack_keras", 0.002),
    _target("image files", "data_files.attack_images", 0.002),
    _target("TFRecord files", "data_files.attack_records", 0.001),
)


def frames_for(total: int) -> int:
    """Return the least number of frames with which all inputs together are at least `total`."""
    frames = math.floor(total / sum(target.inputs_per_frame for target in TARGETS))
    while sum(target.count(frames) for target in TARGETS) < total:
        frames += 1
    return frames
