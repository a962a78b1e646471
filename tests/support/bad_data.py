"""A job in which one worker has bad data: its own program scales the samples there.

For tests of `exchange.quarantine` in virtual time and with real processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from local_run import blobs, job_document

if TYPE_CHECKING:
    from pathlib import Path

SITES = {"plant-a": 2, "plant-b": 1, "plant-c": 1}
BAD_RANK, BAD_NAME = 3, "plant-c/g-0"
_SCALED = """
_load = load_data


def load_data(split, site, worker_index):
    x, y = _load(split, site, worker_index)
    is_bad = split == "train" and site == "plant-c"
    return (x * 30 if is_bad else x), y
"""


def job_with_bad_data(
    folder: Path, *, max_steps: int, nap_s: float = 0.0, **spec: Any
) -> dict[str, Any]:
    """The only worker at `plant-c` has gradients over ten times as large as the others'."""
    trainer = {
        "program": blobs(folder, nap_s=nap_s, more=_SCALED),
        "stop": {"maxSteps": max_steps},
    }
    document = job_document(SITES, trainer=trainer, **spec)
    document["spec"]["exchange"] = {
        "policy": "full", "robustness": "clip", "quarantine": "majority"
    }  # fmt: skip
    return document
