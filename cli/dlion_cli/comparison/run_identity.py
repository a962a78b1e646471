"""The identity of a compared run: every change to it requires another run.

Called by `comparison_runner`. Data files do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from dlion_api.document import to_document
from dlion_api.spec import Job
from dlion_cli.comparison.comparison_matrix import Matrix, PlannedRun
from dlion_cli.inputs.manifests import apply_set, load_manifest, read_document
from dlion_cli.inputs.policy_source import digest_of, policy_source
from dlion_cli.inputs.required_files import find_program_root
from dlion_environments.loading import load_environment


def identity(command: Iterable[str], planned: PlannedRun, matrix: Matrix) -> dict[str, object]:
    """The run's command, and digests of the files that it depends on.

    Raises: SpecError if the manifest has become invalid.
    """
    environment = json.dumps(to_document(load_environment(planned.environment)), sort_keys=True)
    job = _job(planned, matrix)
    files = {
        "manifest": [matrix.file],
        "program": program_files(job, matrix.file),
        "calibration": [] if matrix.calibration is None else [matrix.calibration],
    }
    policy = policy_source(job.spec.exchange.policy)
    return {
        "command": list(command),
        "environment": hashlib.sha256(environment.encode()).hexdigest(),
        "dlion": version("dlion"),
        **{
            name: digest_of((path.name, path) for path in paths)
            for name, paths in files.items()
            if paths
        },
        **({"policy": policy} if policy else {}),
    }


def _job(planned: PlannedRun, matrix: Matrix) -> Job:
    document, _ = read_document(matrix.file)
    source = f"{matrix.file}, {planned.variant.name}"
    return load_manifest(apply_set(document, planned.settings(matrix)), source=source, lines=None)


def program_files(job: Job, file: Path) -> list[Path]:
    """The job's program, first, and the Python files beside it, which it may import.

    Empty for a built-in program. `file`: the job's manifest.
    """
    if not job.spec.trainer.program.file:
        return []
    program = find_program_root(job, file, None) / job.spec.trainer.program.file
    beside = (path for path in sorted(program.parent.glob("*.py")) if path != program)
    return [path for path in (program, *beside) if path.is_file()]
