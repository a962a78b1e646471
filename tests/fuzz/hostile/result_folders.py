"""Damaged `summary.json` and `environment.yaml` in a result folder, against the report.

What must hold: the run is read, without what makes no sense; the page can be made of it.
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
from hostile.documents import ROOT, bent_text
from hostile.records import PROGRESS, bent_json

RENDERED = 0.05
"""Of the inputs: a page takes 65 ms."""

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
def right_texts() -> dict[str, str]:
    """The files of a folder, by name."""
    job = load_job(yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text()))
    summary = {"schema_version": 1, "ending": ENDING, "scalability": SCALABILITY}
    return {
        JOB: yaml.safe_dump(job.to_document()),
        EVENTS: "".join(record_to_json(record) + "\n" for record in PROGRESS),
        SUMMARY: json.dumps(summary, indent=2),
        ENVIRONMENT: yaml.safe_dump(environment_document(REPORT), sort_keys=False),
    }


def attack_report(chance: random.Random, folder: Path) -> str | None:
    """One damaged file beside the events; the run is then read, and now and then made a page of.

    Refused is what is told otherwise than by the right file: not at all, or a changed value.
    """
    texts = right_texts()
    if not (folder / EVENTS).exists():
        for name, text in texts.items():
            (folder / name).write_text(text)
    name = chance.choice((SUMMARY, ENVIRONMENT))
    right = texts[name]
    if name == SUMMARY:
        wrong = bending.until_other(right.encode(), lambda: bent_json(chance, right.encode()))
    else:
        wrong = bending.until_other(right.encode(), lambda: bent_text(chance, right))
    (folder / name).write_bytes(wrong)
    try:
        with _warnings_apart():
            run = load_run(folder, "hostile")
        if chance.random() < RENDERED:
            assert "</html>" in render([run])
    finally:
        (folder / name).write_text(right)
    return "taken" if _told(run) == _told(_undamaged(folder)) else "refused"


def _told(run: LoadedRun) -> Any:
    return run.summary["ending"], run.summary["scalability"], run.environment


@functools.cache
def _undamaged(folder: Path) -> LoadedRun:
    return load_run(folder, "right")


@contextmanager
def _warnings_apart() -> Iterator[None]:
    """The report says what it goes without; thousands of times that helps nobody."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
