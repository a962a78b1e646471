"""Quarantines workers of a virtual run that most of the others have named.

The rule is that of clusters (`dlion_api.protocol.accusations`). As in `dlion run`, one coordinator
serves all sites, so all workers count as those of one site. `churn` removes the worker.
"""

from functools import partial

from dlion_api.protocol.accusations import Accusations, quarantine_message, quarantine_reason
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.spec import Job
from dlion_simulator.churn import ChurnController
from dlion_simulator.clock import VirtualClock

REPORT_S = 0.25
"""Seconds from a warning to its effect. Real workers send their records at this interval."""


class VirtualQuarantine:
    """`exchange.quarantine` of one run."""

    def __init__(self, job: Job, clock: VirtualClock, churn: ChurnController) -> None:
        self._clock, self._churn = clock, churn
        self._is_on = job.spec.exchange.quarantine != "off"
        self._accusations = Accusations(lambda: clock.now_s)
        self._trusted = {worker.rank: worker for worker in job.workers()}

    def take(self, record: ProgressRecord) -> None:
        """Take a worker's record; it may quarantine another worker."""
        if not self._is_on or not isinstance(record, EventRecord):
            return
        here = self._churn.training.keys() & self._trusted.keys()
        accused = self._accusations.take(record, here=here, known=self._trusted.keys())
        if accused is None:
            return
        name = self._trusted.pop(accused).name
        message = quarantine_message(name, quarantine_reason(record))
        # Not at once: the record is part of a step that has not ended.
        self._clock.after(REPORT_S, partial(self._churn.quarantine, accused, message))
