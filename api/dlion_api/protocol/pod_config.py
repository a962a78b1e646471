"""Configuration of all pods of a run at a site: one file in the run's ConfigMap.

A pod derives its worker's configuration (`dlion_api.protocol.worker_config`) from it and from its
own group, index and address. Contains no secrets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dlion_api.protocol.worker_config import Document, FilledText, read_config


@dataclass(frozen=True)
class PodConfig:
    """Configuration shared by all pods of a run at one site."""

    job_document: Document
    """The manifest, for `dlion_api.spec.load_job`."""
    site: FilledText
    coordinator_address: FilledText
    """`host:port`."""
    keeper_address: FilledText
    """`host:port` of the site's keeper."""

    def to_json(self) -> str:
        """Return the file's text; deterministic."""
        # Not `asdict`, which copies the manifest at each pass of the operator.
        return json.dumps(vars(self), indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def load(cls, path: Path | str) -> PodConfig:
        """Load the configuration from a file. Raises: as `read_config`."""
        return cls(**read_config(path, PodConfig))
