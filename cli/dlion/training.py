"""Training in the foreground in one call, and the model that it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from dlion.client import Client
from dlion.job import JobSnapshot
from dlion_api.errors import DataError, Problem, SpecError, UnavailableError
from dlion_api.status_names import State

if TYPE_CHECKING:
    from dlion.manifests import ManifestLike, Sites


_OF_FIT: Final = {
    "epochs": 'stop={"maxEpochs": N}',
    "batch_size": 'batching={"globalBatchSize": {"initial": N}}, of all workers together',
    "validation_data": "data=(x, y, test_x, test_y)",
    "callbacks": "a program with callbacks() (docs/own-programs.md)",
}


def train(
    model_or_manifest: ManifestLike | Any,
    data: Any = None,
    *,
    sites: Sites | None = None,
    workers: int | None = None,
    policy: str | None = None,
    environment: str | Path | None = None,
    backend: Literal["local", "simulated"] = "local",
    root: str | Path = "runs",
    data_root: str | Path = ".",
    validation_split: float | None = None,
    **fields: Any,
) -> JobSnapshot:
    """Train here, with live progress, and return the ended job.

    `model_or_manifest` is a `keras.Model` with its `data`; or without data a built-in program
    (`digits`), a file (`program.py`), a module, or a manifest as for `Client.train`. `sites` is
    their number, their names, or workers by name; `workers` the number of each site. Other keywords
    are fields of `spec` or `spec.trainer`, which are merged into the manifest:
    `stop={"maxSeconds": 60}`. Ctrl-C ends the run; its folder stays.

    The training starts from the model's weights, and does not change it. What it was compiled with
    counts. `data` are NumPy arrays (x [N, ...], y [N, ...]), (x_train, y_train, x_test, y_test) or
    {"train": (x, y), "test": (x, y)}, with finite `tf.data.Dataset` objects in place of any (x, y).
    `dataset` determines how workers share them. Without test data `validation_split` of the
    samples, a tenth by default, are held out at random by the seed.

    Raises: JobEndedError with the reason if the run fails; and as `Client.train`.

        job = dlion.train(model, (x, y), sites=["plant-a", "plant-b"], stop={"maxSeconds": 60})
        trained = dlion.load_model(job)
    """
    from dlion import manifests
    from dlion.arguments import check_program_name, fields_argument
    from dlion.live_display import live_display

    _reject_of_fit(fields)
    changes = dict(fields)
    for field, name, value in (
        ("exchange", "policy", policy),
        ("dataset", "evaluationFraction", validation_split),
    ):
        if value is not None:
            others = fields_argument(field, changes.get(field, {}), source="train")
            changes[field] = {**others, name: value}
    client = Client(backend, root=root)
    project = client._project(model_or_manifest, data)  # noqa: SLF001 - of this package
    if project is not None:
        given = project.manifest(sites, workers, changes)
    elif manifests.is_program(model_or_manifest):
        check_program_name(str(model_or_manifest))
        document = manifests.program_manifest(str(model_or_manifest), sites, workers)
        given = manifests.read_manifest(manifests.with_fields(document, changes))
    else:
        given = manifests.read_manifest(model_or_manifest)
        if sites is not None:
            changes["sites"] = manifests.site_list(sites, workers)
        given = manifests.changed(given, changes, workers=None if sites is not None else workers)
    job = client._train(  # noqa: SLF001
        given, project=project, environment=environment, data_root=data_root, detach=False
    )
    try:
        with live_display() as show:
            return client.wait_for_job_status(
                job.name, {State.SUCCEEDED}, timeout_s=None, callback=show
            )
    except KeyboardInterrupt:
        client._backend.end(job.name)  # noqa: SLF001
        raise


def _reject_of_fit(fields: Mapping[str, Any]) -> None:
    """Raises: SpecError for arguments of Keras' `fit()`, with the field that has their meaning."""
    problems = [
        Problem(name, "is an argument of fit()", advice=f"Give {_OF_FIT[name]}")
        for name in fields
        if name in _OF_FIT
    ]
    if problems:
        raise SpecError(problems, source="train")


def load_model(job: JobSnapshot | str | Path, *, site: str | None = None) -> Any:
    """The saved Keras model of an ended job, or of a result folder or `.keras` file.

    `site` chooses the model of a site; by default the most accurate one. A model with layers of
    your own needs the import of the program that registers them. Imports TensorFlow.

    Raises: UnavailableError if there is no model yet, or for a job of a cluster; DataError if the
    model cannot be read.
    """
    path = job.result_folder if isinstance(job, JobSnapshot) else Path(job)
    if path is None:
        name = job.name if isinstance(job, JobSnapshot) else ""
        raise UnavailableError(
            f"the model of {name} is in its cluster: `dlion fetch {name} --out model`, then "
            "load_model('model/model.keras')"
        )
    from dlion_worker.training.converting import load_keras_file

    return load_keras_file(_model_file(path, site))


def _model_file(path: Path, site: str | None) -> Path:
    try:
        exists = path.exists()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if not exists:
        raise DataError(f"{path}: no such file or folder. Name a result folder or a .keras file")
    if path.suffix == ".keras":
        return path
    from dlion_results.run_folder.models import read_models

    models = [model for model in read_models(path) if site in (None, model.site)]
    if not models:
        which = "" if site is None else f" of site {site}"
        raise UnavailableError(
            f"{path}: has no model{which}. A run saves it when it ends: wait for Succeeded"
        )
    best = max(models, key=lambda model: (model.accuracy == model.accuracy, model.accuracy))
    file = path / best.path
    if not file.is_file():
        raise DataError(f"{file}: the model is missing, though its description is there")
    return file
