"""Which job a line of the operator's log speaks of: JSON lines have it as `object`, as kopf's have.

Called by the loops of the jobs, each a task with a context of its own, and by `process`.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

from dlion_api.names import API_VERSION, KIND
from dlion_operator.store import ObjectName

_JOB: ContextVar[ObjectName | None] = ContextVar("job", default=None)
_KEY = "k8s_ref"
"""Where kopf's formatters look for it."""


def speak_of(name: ObjectName) -> None:
    """From now on what this task logs is of that job."""
    _JOB.set(name)


def add_keys() -> None:
    """Has the handlers of the root logger put the job to what tasks of jobs log."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_keyed)


def _keyed(record: logging.LogRecord) -> bool:
    name = _JOB.get()
    if name is not None and not hasattr(record, _KEY):
        namespace, job = name
        reference = {"apiVersion": API_VERSION, "kind": KIND, "namespace": namespace, "name": job}
        setattr(record, _KEY, reference)
    return True
