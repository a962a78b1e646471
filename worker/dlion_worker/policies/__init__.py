"""What a worker does with gradients, losses and peers: state machines without I/O.

What goes in: the vocabulary (`interface`), which part of a gradient is sent (`sending`,
`selection`), how what arrives is weighted (`combining`), who is waited for (`synchronization`),
who takes whose weights (`knowledge_transfer`), and how the batch is shared out (`batching`).
What stays out: TensorFlow, gRPC, clocks, threads, and the form of payloads (`codecs`).

The trainer and the simulator build one `Machine` per worker, hand it every event, and carry out
what comes back, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlion_worker.policies.building import build, build_for

__all__ = ["build", "build_for"]


def __getattr__(name: str) -> object:
    """`build` and `build_for`, imported when they are first asked for.

    The sidecar needs `batching` alone, and NumPy would cost it a sixth of its 80 MB.
    """
    if name in __all__:
        from dlion_worker.policies import building

        return getattr(building, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
