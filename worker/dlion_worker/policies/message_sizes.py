"""How long a message of a run can get: what a receiver has to have room for, and no more.

Called by the trainer, which knows the model. What each message carries is its policy's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_worker.codecs import most_coded_bytes

if TYPE_CHECKING:
    from dlion_api.spec import Job
    from dlion_worker.policies.interface import Layout

BESIDE_VALUES_BYTES = 64 * 1024
"""What stands beside a model's values, at most: samples of each worker (`held`, 12 bytes for each
of five thousand) and a bit for each variable (`eventgrad`, whose variables count by themselves)."""


def most_message_bytes(job: Job, layout: Layout) -> int:
    """The longest payload of a gradient's or weights' message about that model, or what the
    manifest allows (`network.maxMessageBytes`) where that is less."""
    bitmap_bytes = (len(layout.sizes) + 7) // 8
    most = most_coded_bytes(layout.size) + bitmap_bytes + BESIDE_VALUES_BYTES
    return min(most, job.spec.network.max_message_bytes)
