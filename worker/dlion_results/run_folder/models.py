"""Reads which models a run has saved, from `models/<site>/model.json`.

The trainer writes these files. Loads no model.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from dlion_results.run_folder.regular_files import read_start

MODELS = "models"
MODEL_INFO = "model.json"
MAX_INFO_BYTES = 1024 * 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteModel:
    """One site's saved model; `path` is relative to the result folder."""

    site: str
    path: str
    model: str
    """`averaged`, or which replica it is."""
    accuracy: float
    averaged_accuracy: float
    ranks: tuple[int, ...]
    """Ranks of the averaged replicas."""
    sites: tuple[str, ...]
    samples: int


def read_models(folder: Path) -> tuple[SiteModel, ...]:
    """The models in the result folder, by site; unreadable ones are left out."""
    models = []
    for about in sorted((folder / MODELS).glob(f"*/{MODEL_INFO}")):
        try:
            models.append(_model(about))
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            _log.warning("%s: cannot be read (%r); ignoring its model", about, error)
    return tuple(models)


def _model(about: Path) -> SiteModel:
    values = json.loads(read_start(about, MAX_INFO_BYTES, follow_links=True))
    site = about.parent.name
    return SiteModel(
        site=site,
        path=f"{MODELS}/{site}/model.keras",
        model=str(values["model"]),
        accuracy=float(values["accuracy"]),
        averaged_accuracy=float(values["averaged_accuracy"]),
        ranks=tuple(int(rank) for rank in values["ranks"]),
        sites=tuple(str(name) for name in values["sites"]),
        samples=int(values["samples"]),
    )
