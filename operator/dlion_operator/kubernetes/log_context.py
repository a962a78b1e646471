"""Add the job to the operator's log records: JSON lines have it as `object`, like kopf's."""

import logging
from contextvars import ContextVar

from dlion_api.names import API_VERSION, KIND
from dlion_operator.kubernetes.store import ObjectName

_JOB: ContextVar[ObjectName | None] = ContextVar("job", default=None)
_KEY = "k8s_ref"
"""The attribute that kopf's formatters read."""


def set_logged_job(name: ObjectName) -> None:
    """Attribute all further log records of this task to that job."""
    _JOB.set(name)


def add_job_to_logs() -> None:
    """Let the root logger's handlers add the current task's job to each record."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_add_job)


def _add_job(record: logging.LogRecord) -> bool:
    name = _JOB.get()
    if name is not None and not hasattr(record, _KEY):
        namespace, job = name
        reference = {"apiVersion": API_VERSION, "kind": KIND, "namespace": namespace, "name": job}
        setattr(record, _KEY, reference)
    return True
