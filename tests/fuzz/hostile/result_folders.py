"""Damaged `summary.json` and `environment.yaml` in a result folder, for the report.

The run must be read without invalid values, and the report must make a page of it.
"""

from __future__ import annotations

import functools
import json
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from dlion_api.protocol.records import record_to_json
from dlion_api.spec import load_job
from dlion_results.report.page import render
from dlion_results.report.runs import LoadedRun, load_run
from dlion_results.run_folder.environment import (
    EnvironmentFigure,
    EnvironmentReport,
    environment_document,
)
from dlion_results.run_folder.layout import ENVIRONMENT, EVENTS, JOB, SUMMARY
from hostile import bending
from hostile.documents import ROOT, altered_text
from hostile.records import PROGRESS, altered_json

RENDERED = 0.05
"""Fraction of the inputs that become a page, which takes 65 ms."""

ENDING = {
    "stop_reason": "maxSteps reached (10)",
    "message": "worker 1 ended with FAILED (1)",
    "succeeded": True,
    "started_at": "2026-01-31T10:00:00+00:00",
}
SCALABILITY = {
    "workers": 2,
    "reference_workers": 1,
    "accuracy": 0.5,
    "speed_up": 1.5,
    "efficiency": 0.75,
    "throughput_ratio": 1.4,
}
FIGURES = (
    EnvironmentFigure(0, "CPU quota", "cores", 2.0, 1.9, begins_s=20.0),
    EnvironmentFigure(0, "link rate", "Mbit/s", 50.0, None, peer=1, note="not measured"),
)
REPORT = EnvironmentReport("hetero-sys-a", FIGURES, ("links: relay",), {"name": "hetero-sys-a"})


@functools.cache
def valid_texts() -> dict[str, str]:
    """The files of a folder, by name."""
    job = load_job(yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text()))
    summary = {"schema_version": 1, "ending": ENDING, "scalability": SCALABILITY}
    return {
        JOB: yaml.safe_dump(job.to_document()),
        EVENTS: "".join(record_to_json(record) + "\n" for record in PROGRESS),
        SUMMARY: json.dumps(summary, indent=2),
        ENVIRONMENT: yaml.safe_dump(environment_document(REPORT), sort_keys=False),
    }


def attack_report(rng: random.Random, folder: Path) -> str | None:
    """Read a run with one damaged file beside the events; sometimes make a page of it.

    A result counts as refused if it differs from that of the valid file.
    """
    texts = valid_texts()
    if not (folder / EVENTS).exists():
        for name, text in texts.items():
            (folder / name).write_text(text)
    name = rng.choice((SUMMARY, ENVIRONMENT))
    valid = texts[name]
    if name == SUMMARY:
        wrong = bending.until_different(valid.encode(), lambda: altered_json(rng, valid.encode()))
    else:
        wrong = bending.until_different(valid.encode(), lambda: altered_text(rng, valid))
    (folder / name).write_bytes(wrong)
    try:
        with _ignore_warnings():
            run = load_run(folder, "hostile")
        if rng.random() < RENDERED:
            assert "</html>" in render([run])
    finally:
        (folder / name).write_text(valid)
    return "taken" if _loaded_values(run) == _loaded_values(_undamaged(folder)) else "refused"


def _loaded_values(run: LoadedRun) -> Any:
    return run.summary["ending"], run.summary["scalability"], run.environment


@functools.cache
def _undamaged(folder: Path) -> LoadedRun:
    return load_run(folder, "right")


@contextmanager
def _ignore_warnings() -> Iterator[None]:
    """Ignore the report's warnings of missing parts, which would be repeated thousands of times."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
