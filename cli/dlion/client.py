"""The client, which starts and follows jobs in the same way on each back end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from dlion.errors import JobEndedError, JobTimeoutError
from dlion.job import JobSnapshot
from dlion_api.errors import Problem, SpecError
from dlion_api.status_names import State

if TYPE_CHECKING:
    from dlion.kubernetes_backend import KubernetesBackend
    from dlion.local_backend import LocalBackend
    from dlion.manifests import Assignments, ManifestInput, ManifestLike, Sites
    from dlion.model_project import ModelProject

_BACKENDS: Final = ("local", "simulated", "kubernetes")


class Client:
    """Trains jobs with one back end, and follows existing ones.

    `local` and `simulated` run `dlion` in child processes; their jobs are the result folders in
    `root`, also those of other processes. `kubernetes` uses DLionJobs of one namespace. Methods may
    be called from several threads.
    """

    def __init__(
        self,
        backend: Literal["local", "simulated", "kubernetes"] = "local",
        *,
        root: str | Path = "runs",
        context: str | None = None,
        namespace: str | None = None,
        kubeconfig: str | Path | None = None,
        cluster: str | None = None,
        user: str | None = None,
        server: str | None = None,
        token: str | None = None,
        certificate_authority: str | Path | None = None,
        insecure_skip_tls_verify: bool | None = None,
        tls_server_name: str | None = None,
        request_timeout_s: float | None = None,
        impersonated_user: str | None = None,
        impersonated_groups: Sequence[str] | None = None,
    ) -> None:
        """Choose the back end. Starts nothing and sends no request.

        `root` is for `local` and `simulated`. The others choose a cluster, the way to it and the
        identity there, as the options of `dlion get` do; what is not given comes from the
        kubeconfig. Raises: SpecError for arguments of another back end or of a wrong type;
        DataError if no cluster is configured.
        """
        connection = {
            "context": context,
            "namespace": namespace,
            "kubeconfig": kubeconfig,
            "cluster": cluster,
            "user": user,
            "server": server,
            "token": token,
            "certificate_authority": certificate_authority,
            "insecure_skip_tls_verify": insecure_skip_tls_verify,
            "tls_server_name": tls_server_name,
            "request_timeout_s": request_timeout_s,
            "impersonated_user": impersonated_user,
            "impersonated_groups": impersonated_groups,
        }
        given = [name for name, value in connection.items() if value is not None]
        if backend not in _BACKENDS:
            problem = Problem("backend", "is not known", str(backend), ", ".join(_BACKENDS))
            raise SpecError([problem], source="Client")
        if backend != "kubernetes" and given:
            problem = Problem(given[0], f"is for backend kubernetes, not {backend}")
            raise SpecError([problem], source="Client")
        self._is_cluster = backend == "kubernetes"
        self._backend: LocalBackend | KubernetesBackend
        # Each is imported when it is used: `import dlion` is quick.
        if self._is_cluster:
            from dlion.connection import connection_settings
            from dlion.kubernetes_backend import KubernetesBackend

            self._backend = KubernetesBackend(connection_settings(connection))
        else:
            from dlion.arguments import path_argument
            from dlion.local_backend import LocalBackend

            kind: Literal["local", "simulated"] = "local" if backend == "local" else "simulated"
            self._backend = LocalBackend(kind, path_argument("root", root, source="Client"))

    def train(
        self,
        manifest: ManifestLike | Any,
        data: Any = None,
        *,
        sites: Sites | None = None,
        environment: str | Path | None = None,
        set: Assignments | None = None,  # noqa: A002 - the name of the command's option
        data_root: str | Path = ".",
        detach: bool = False,
    ) -> JobSnapshot:
        """Start a job and return at once.

        `manifest` is a path, a mapping or YAML text, or a Keras model with its `data`, as for
        `dlion.train`. `sites` is their number, their names, or workers by name. `set` has fields to
        change, by path: `{"trainer.stop.maxSeconds": 20}`. `environment` names cores and links of a
        local or simulated run, `data_root` is the folder of relative paths of data. A local run
        ends with this Python process unless it is detached.

        Raises: SpecError with every problem of the manifest, DataError and ProgramError for missing
        files, and for a model or data that cannot be trained, all before anything starts; and on
        Kubernetes as `dlion submit`.
        """
        from dlion import manifests

        project = self._project(manifest, data)
        if project is not None:
            given = project.manifest(sites, None, {})
        else:
            given = manifests.read_manifest(manifest)
            if sites is not None:
                changes = {"sites": manifests.site_list(sites, None)}
                given = manifests.changed(given, changes, workers=None)
        return self._train(
            given,
            set,
            project=project,
            environment=environment,
            data_root=data_root,
            detach=detach,
        )

    def _project(self, model: object, data: object) -> ModelProject | None:
        """The model and its data; None if this is a manifest or program. Raises: as `train`."""
        if data is None and isinstance(model, str | Path | Mapping):
            return None
        if self._is_cluster:
            problem = Problem(
                "data", "are in this process, and the sites of a cluster cannot read them",
                advice="Name data of the sites in trainer.dataset (docs/data.md), or give a "
                "program with build_model() and load_data() (docs/own-programs.md)",
            )  # fmt: skip
            raise SpecError([problem], source="train")
        from dlion.model_project import model_project

        return model_project(model, data)

    def _train(
        self,
        manifest: ManifestInput,
        assignments: Assignments | None = None,
        *,
        project: ModelProject | None = None,
        environment: str | Path | None,
        data_root: str | Path,
        detach: bool,
    ) -> JobSnapshot:
        from dlion.arguments import path_argument
        from dlion.manifests import assignments_of

        return self._backend.train(
            manifest,
            assignments_of(assignments),
            project=project,
            environment=None if environment is None else str(environment),
            data_root=path_argument("data_root", data_root, source="train"),
            detach=detach,
        )

    def get_job(self, name: str) -> JobSnapshot:
        """The job as it is now. Raises: AbsentError if there is none of that name."""
        return self._backend.get(name)

    def list_jobs(self) -> list[JobSnapshot]:
        """All jobs, without their curves: below the root oldest first, of a namespace by name."""
        return self._backend.list()

    def wait_for_job_status(
        self,
        name: str,
        status: Collection[str] = (State.SUCCEEDED,),
        *,
        timeout_s: float | None = 600,
        callback: Callable[[JobSnapshot], object] | None = None,
    ) -> JobSnapshot:
        """Wait until the job is in one of these states, and return it.

        `callback` gets the job each time it was read. `timeout_s` None: no limit. Ctrl-C ends the
        wait and leaves the job running.

        Raises: JobEndedError if the job ends in another state; JobTimeoutError after the time;
        AbsentError if the job is gone; SpecError for what is no state or no number of seconds.
        """
        from dlion.arguments import seconds_argument, states_argument

        source = "wait_for_job_status"
        wanted = states_argument("status", status, source=source)
        if timeout_s is not None:
            timeout_s = seconds_argument("timeout_s", timeout_s, source=source)

        def is_over(job: JobSnapshot) -> bool:
            if callback is not None:
                callback(job)
            return job.state in wanted or job.has_ended

        job = self._backend.wait(name, is_over, timeout_s)
        text = " or ".join(sorted(wanted))
        if job.state in wanted:
            return job
        if job.has_ended:
            raise JobEndedError(job, text)
        raise JobTimeoutError(job, text, timeout_s or 0.0)

    def get_job_logs(
        self, name: str, *, worker: int | None = 0, follow: bool = False
    ) -> Iterator[str]:
        """Lines of the log of the worker with that rank, without line ends.

        A simulation is one process with one log, which a local run has, too: `worker=None`. With
        `follow` new lines come until the run has ended. Raises: AbsentError or SpecError if there
        is no such job or worker; while lines are read, DataError if the log cannot be read.
        """
        return self._backend.logs(name, worker, follow)

    def get_job_metrics(self, name: str) -> Any:
        """A `pandas.DataFrame` with a row per step and per evaluation of each worker, by time.

        Columns: `time_s` since the run began, `iteration`, `worker` (rank), `site`, `loss`,
        `batch_size` and `learning_rate` of steps, `accuracy` and `evaluation_loss` of evaluations,
        `samples` of this worker so far, then one for each other metric of `compile()`. With R² of
        targets `accuracy` is named `R²`, the job's `accuracy_name`. NaN where a row has no such
        value. On Kubernetes they are those of this site's workers, which its keeper has, also after
        their pods are gone.

        Raises: UnavailableError without pandas, without a keeper, or if that has no records.
        """
        from dlion.metrics import metrics_frame

        return metrics_frame(*self._backend.records(name))

    def delete_job(self, name: str) -> None:
        """End the job and remove what it has left.

        Of a local or simulated job this is its result folder, within twenty seconds. On Kubernetes
        it returns when the deletion has begun. Raises: AbsentError if there is no such job;
        UnavailableError if a process cannot be ended; StorageError if the folder cannot be removed.
        """
        self._backend.delete(name)

    def plot(self, name: str, *, timeout_s: float | None = None) -> JobSnapshot:
        """Show the job until it ends: in a notebook its table and curve, else a line.

        Returns the ended job. Raises: JobTimeoutError, AbsentError.
        """
        from dlion.live_display import live_display

        with live_display() as show:
            return self.wait_for_job_status(
                name, {State.SUCCEEDED, State.FAILED}, timeout_s=timeout_s, callback=show
            )

    def close(self) -> None:
        """Close the connections to a cluster. Runs continue."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
