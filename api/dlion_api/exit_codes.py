"""Exit codes of every DLion process. They are API: documented, never renumbered.

Source: this project, after sysexits.h (64-78), `timeout` (124) and the shell's 128+n for signals.
The supervisor restarts a trainer after any code that is not `fatal`.
"""

import errno
from enum import IntEnum
from typing import Final

STORAGE_ERRNOS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
)
"""System errors that end a process with `ExitCode.STORAGE`."""

TRAINING_ENDED: Final = 91
"""Exit code of a trainer that ended in order; its supervisor exits with OK.

The user's program runs in the trainer's process and may end it with 0, by `os._exit` or in a
library. So 0 proves nothing there.
"""


class ExitCode(IntEnum):
    """Exit code of a process."""

    OK = 0
    FAILED = 1  # an unexpected error: a defect in DLion; restarted
    USAGE = 2  # wrong flags; the message names the valid ones
    SPEC = 65  # the manifest, environment or a message is wrong; no restart helps
    DATA = 66  # data missing or corrupt
    PROGRAM = 67  # the user's program raised or broke its protocol
    UNAVAILABLE = 69  # a peer or the coordinator is not there; restarted
    MODEL_LOST = 73  # in a pod: the keeper did not receive the site's model
    STORAGE = 74  # disk full or not writable
    DIVERGED = 75  # loss or weights are no longer finite
    RESTARTS = 76  # a pod's trainer ended more often than maxRestarts allows
    DENIED = 77  # the cluster refuses it: missing rights, credentials, a conflict
    ENDED_EARLY = 79  # the run ended cleanly before its stop rule was met
    PARTIAL = 80  # the stop rule was met, and the saved model lacks a replica
    DEADLINE = 124  # the run took longer than the manifest's activeDeadlineSeconds
    INTERRUPTED = 130  # SIGINT, SIGTERM or SIGHUP, after a clean shutdown

    @property
    def fatal(self) -> bool:
        """Whether a restart cannot help, so that the supervisor exits too."""
        return self not in (ExitCode.FAILED, ExitCode.UNAVAILABLE)
