"""A site's coordinator: it admits workers to a run, streams the membership and takes progress.

`state` and `events` are a state machine without I/O: admission, membership, incarnations, progress.
`feed` buffers recent records for followers. `served_run` handles the calls of one run; `service`
and `server` serve many runs on one port, and `thread` runs them for `dlion run`.

Not here: pods and status (the operator's reconcile), other sites (federation), and gradients, which
never pass through the coordinator.
"""

from dlion_operator.coordinator.served_run import TokenVerifier
from dlion_operator.coordinator.server import CoordinatorServer
from dlion_operator.coordinator.thread import CoordinatorThread

__all__ = ["CoordinatorServer", "CoordinatorThread", "TokenVerifier"]
