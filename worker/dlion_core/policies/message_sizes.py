"""Maximum length of a message of a run, for which a receiver reserves space.

Called by the trainer, which knows the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_core.codecs import max_coded_bytes

if TYPE_CHECKING:
    from dlion_api.spec import Job
    from dlion_core.policies.interface import Layout

MAX_OVERHEAD_BYTES = 64 * 1024
"""Maximum bytes besides a model's values: a version vector (12 bytes for each of five thousand
workers) and a bit per variable (`eventgrad`, counted separately)."""


def max_message_bytes(job: Job, layout: Layout) -> int:
    """Return the longest payload of a gradient or weights message for that model.

    At most the manifest's `network.maxMessageBytes`.
    """
    bitmap_bytes = (len(layout.sizes) + 7) // 8
    most = max_coded_bytes(layout.size) + bitmap_bytes + MAX_OVERHEAD_BYTES
    return min(most, job.spec.network.max_message_bytes)
