"""Policies: state machines without I/O for gradients, losses and peers.

Inside: the interface (`interface`), selection of gradient parts (`gradient_selectors`,
`magnitudes`), weighting (`aggregation`), waiting (`synchronization`), knowledge transfer
(`knowledge_transfer`) and batch sizes (`batching`). Outside: TensorFlow, gRPC, clocks, threads, and
the encoding of payloads (`codecs`).

The trainer and the simulator build one `PolicyMachine` per worker, pass it every event, and execute
the returned instructions in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlion_worker.policies.factory import build, build_for

__all__ = ["build", "build_for"]


def __getattr__(name: str) -> object:
    """Import `build` and `build_for` on first use.

    The sidecar needs only `batching`; NumPy would take a sixth of its 80 MB.
    """
    if name in __all__:
        from dlion_worker.policies import factory

        return getattr(factory, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
