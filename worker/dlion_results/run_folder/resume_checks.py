"""Checks whether a run may resume in a result folder.

Compares the two jobs, looks for readable checkpoints, and for an end that stands. `folder` calls it
under its lock.
"""

import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dlion_api.document import to_document
from dlion_api.endings import met_rule, stop_value
from dlion_api.errors import DataError, Problem, SpecError
from dlion_api.spec import Job, Stop
from dlion_core.npz_errors import NPZ_ERRORS
from dlion_results.run_folder.layout import CHECKPOINTS, SUMMARY
from dlion_results.run_folder.manifest import read_job
from dlion_results.run_folder.regular_files import read_start
from dlion_results.run_folder.stored_values import MAX_BYTES, UNREADABLE, parse_mapping, text_of
from dlion_results.summary.judgement import EndReason

_ABSENT = object()


def check_resumable(path: Path, job: Job) -> None:
    """Check that `job` may resume in the folder `path`.

    It must be the stored job with the same workers, except for `spec.trainer.stop` and fields that
    may differ between sites. At least one worker must have a readable checkpoint: others take a
    peer's state. A run that has finished needs a later stop.

    Raises: SpecError naming each field that differs, the missing checkpoint, or the stop rule that
    is met; DataError if the stored job or all checkpoints are unreadable.
    """
    text = "differs from the run to resume"
    problems = [
        Problem(field, text, value=_value_text(given), allowed=_value_text(stored))
        for field, stored, given in _differences(_kept(read_job(path)), _kept(job), "")
    ]
    if problems:
        advice = (
            f"Resume with the job as it was ({path / 'job.yaml'}), or start a new run with another"
            " --out. Only trainer.stop, and fields that may differ between sites, may change"
        )
        other = Problem("--resume", "holds the run of another job", str(path), advice=advice)
        raise SpecError([*problems, other])
    checkpoints = sorted(path.glob(CHECKPOINTS))
    if not checkpoints:
        missing = Problem(
            "--resume",
            "holds no checkpoint: the run ended before it had saved one, or was simulated",
            value=str(path),
            advice="Start a new run: omit --resume and give another --out",
        )
        raise SpecError([missing])
    damaged = {one: problem for one in checkpoints if (problem := _damage(one))}
    if len(damaged) == len(checkpoints):
        raise DataError(
            f"--resume {path}: no checkpoint can be read, so no worker can resume:\n"
            + "".join(f"  {one}: {problem}\n" for one, problem in damaged.items())
            + "Put an intact copy in place of one of them (the other workers take its state), or "
            "start a new run: omit --resume and give another --out"
        )
    _check_unfinished(path, job.spec.trainer.stop)


def _check_unfinished(path: Path, stop: Stop) -> None:
    """Raises SpecError if the run has met a stop rule, and `stop` has one that is met.

    Its workers would only start, stop, and save the same models.
    """
    summary = _stored_summary(path)
    ending = _mapping(summary.get("ending"))
    reason = text_of(ending.get("stop_reason"))
    if ending.get("reason") != EndReason.COMPLETED or (met := met_rule(reason)) is None:
        return
    rule, value = met
    reached = {
        "maxSteps": _count(ending.get("iteration")),
        "maxSeconds": _count(summary.get("training_s")),
        rule: value,
    }
    given = to_document(stop)
    wanted = [
        f"trainer.stop.{name} above {stop_value(most)}"
        for name, most in reached.items()
        if given.get(name) is not None and given[name] <= most
    ]
    if not wanted:
        return
    finished = Problem(
        "--resume",
        f"its run has finished: {reason}",
        value=str(path),
        advice=(
            f"Its models stand. To train on, raise {' and '.join(wanted)}, or give another end "
            "instead. For a new run, omit --resume and give another --out"
        ),
    )
    raise SpecError([finished])


def _stored_summary(path: Path) -> Mapping[str, Any]:
    """The summary of the run; empty if it was killed before it could write it."""
    try:
        return parse_mapping(read_start(path / SUMMARY, MAX_BYTES + 1))
    except UNREADABLE:
        return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int:
    """Whole steps or seconds of a summary; 0 if it has none."""
    if isinstance(value, int | float) and 0 <= value < math.inf:
        return int(value)
    return 0


def _damage(checkpoint: Path) -> str:
    """Damage of the file as an archive; empty if there is none."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            wrong = archive.testzip()
    except NPZ_ERRORS as error:
        return str(error) or type(error).__name__
    return f"{wrong} is damaged" if wrong else ""


def _kept(job: Job) -> dict[str, Any]:
    """The part of a job's document that a resumed run must not change.

    The number of workers is included: each checkpoint belongs to one worker.
    """
    spec = to_document(job.spec, hashed_only=True)
    for site, kept_site in zip(job.spec.sites, spec["sites"], strict=True):
        for group, kept_group in zip(site.groups, kept_site["groups"], strict=True):
            kept_group["workers"] = group.workers
    trainer = {name: value for name, value in spec["trainer"].items() if name != "stop"}
    names = {"name": job.metadata.name, "namespace": job.metadata.namespace}
    return {"metadata": names, "spec": {**spec, "trainer": trainer}}


def _differences(stored: Any, given: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """(Dotted path, stored value, given value) of the smallest differing parts."""
    if isinstance(stored, dict) and isinstance(given, dict):
        for name in dict.fromkeys([*stored, *given]):
            field = f"{where}.{name}" if where else name
            yield from _differences(stored.get(name, _ABSENT), given.get(name, _ABSENT), field)
    elif isinstance(stored, list) and isinstance(given, list) and len(stored) == len(given):
        for index, (one, other) in enumerate(zip(stored, given, strict=True)):
            yield from _differences(one, other, f"{where}[{index}]")
    elif stored != given:
        yield where, stored, given


def _value_text(value: object) -> str:
    """A value as in the manifest; a list of objects by their names."""
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        names = [str(each.get("name", "?")) for each in value if isinstance(each, dict)]
        return f"{len(value)} of them ({', '.join(names)})"
    return str(value)
