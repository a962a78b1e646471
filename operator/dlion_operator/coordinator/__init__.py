"""A site's coordinator: who takes part in a run, told to its workers; their progress, taken.

What goes in: admission, membership, incarnations and progress of a run as a state machine without
I/O (`state`, `events`), the newest of its records for whoever follows (`feed`), a run as it is
served (`served_run`), the gRPC skin of many runs on one port (`service`, `server`), and that in a
thread for `dlion run` (`thread`). What stays out: pods and status (the operator's reconcile),
other sites (federation), gradients (they never pass here).
"""

from dlion_operator.coordinator.served_run import TokenVerifier
from dlion_operator.coordinator.server import CoordinatorServer
from dlion_operator.coordinator.thread import CoordinatorThread

__all__ = ["CoordinatorServer", "CoordinatorThread", "TokenVerifier"]
