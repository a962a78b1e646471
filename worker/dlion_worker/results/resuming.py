"""What a resumed run must have in common with the one in its result folder.

Owns the comparison of the two jobs and the search for checkpoints that can be read. Called by
`folder`, under its lock. What a checkpoint holds is the trainer's business.
"""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

from dlion_api.document import to_document
from dlion_api.errors import DataError, Problem, SpecError
from dlion_api.spec import load_job
from dlion_worker.npz_faults import NPZ_FAULTS
from dlion_worker.results.description import describe_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dlion_worker.results.description import RunDescription

CHECKPOINTS = "state/w*/checkpoint.npz"
_ABSENT = object()


def check_resumable(path: Path, run: RunDescription) -> None:
    """Returns if `run` may go on in the folder `path`.

    It may where it is the stored job, with the same workers, but for `spec.trainer.stop` and the
    fields that may differ between sites, and where a worker has a checkpoint that can be read: a
    worker without one takes a peer's state.

    Raises: SpecError naming each field that differs, or that there is no checkpoint; DataError
        where the stored job cannot be read, or no checkpoint can.
    """
    problems = [
        Problem(
            field,
            "is another than in the run that is to go on",
            value=_words(given),
            allowed=_words(stored),
        )
        for field, stored, given in _differences(_kept(describe_folder(path)), _kept(run), "")
    ]
    if problems:
        advice = (
            f"Resume with the job as it was ({path / 'job.yaml'}), or start afresh with another"
            " --out. Only trainer.stop, and fields that may differ between sites, may change"
        )
        other = Problem("--resume", "holds the run of another job", str(path), advice=advice)
        raise SpecError([*problems, other])
    checkpoints = sorted(path.glob(CHECKPOINTS))
    if not checkpoints:
        raise SpecError(
            [
                Problem(
                    "--resume",
                    "holds no checkpoint: the run ended before it had saved one, or was simulated",
                    value=str(path),
                    advice="Start afresh: leave --resume away, and give another --out",
                )
            ]
        )

    damaged = {one: problem for one in checkpoints if (problem := _damage(one))}
    if len(damaged) == len(checkpoints):
        raise DataError(
            f"--resume {path}: no checkpoint can be read, so that no worker could go on:\n"
            + "".join(f"  {one}: {problem}\n" for one, problem in damaged.items())
            + "Put an intact copy in place of one of them (the other workers take its state), or "
            "start afresh: leave --resume away, and give another --out"
        )


def _damage(checkpoint: Path) -> str:
    """What is wrong with the file as an archive; empty: nothing."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            wrong = archive.testzip()
    except NPZ_FAULTS as error:
        return str(error) or type(error).__name__
    return f"{wrong} is damaged" if wrong else ""


def _kept(run: RunDescription) -> dict[str, Any]:
    """The part of a job's document that a resumed run must not change.

    Sites may differ in the number of workers while a job is scaled; a resumed run has one owner
    per checkpoint.
    """
    job = load_job(run.document)
    spec = to_document(job.spec, hashed_only=True)
    for site, kept_site in zip(job.spec.sites, spec["sites"], strict=True):
        for group, kept_group in zip(site.groups, kept_site["groups"], strict=True):
            kept_group["workers"] = group.workers
    trainer = {name: value for name, value in spec["trainer"].items() if name != "stop"}
    names = {"name": job.metadata.name, "namespace": job.metadata.namespace}
    return {"metadata": names, "spec": {**spec, "trainer": trainer}}


def _differences(stored: Any, given: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Dotted path, stored and given value of the smallest parts in which two documents differ."""
    if isinstance(stored, dict) and isinstance(given, dict):
        yield from _differing_fields(stored, given, where)
    elif isinstance(stored, list) and isinstance(given, list) and len(stored) == len(given):
        for index, (one, other) in enumerate(zip(stored, given, strict=True)):
            yield from _differences(one, other, f"{where}[{index}]")
    elif stored != given:
        yield where, stored, given


def _differing_fields(
    stored: Mapping[str, Any], given: Mapping[str, Any], where: str
) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*stored, *given]):
        field = f"{where}.{name}" if where else name
        yield from _differences(stored.get(name, _ABSENT), given.get(name, _ABSENT), field)


def _words(value: object) -> str:
    """A value as the manifest has it; a list of parts by their names."""
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        names = [str(each.get("name", "?")) for each in value if isinstance(each, dict)]
        return f"{len(value)} of them ({', '.join(names)})"
    return str(value)
