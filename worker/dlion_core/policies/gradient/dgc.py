"""Policy `dgc`: deep gradient compression. A tiny share of the entries, with momentum correction.

At each step a worker clips its gradient to norm `clipNorm` / sqrt(n), where n counts its peers and
itself. Then, with momentum m:

    u <- m u + g        momentum correction: velocity is accumulated, not gradient
    v <- v + u
    send v where |v| >= thr, in each variable the lowest of its ceil(share * size) largest |v|
    v <- v - sent; u <- 0 where sent        momentum factor masking

During the warm-up the share decreases in stages. With the final share s and k stages before it,
stage i = 1, 2, ... sends s^(i / (k + 1)): 25, 6.3, 1.6, 0.4 and finally 0.1 %. Receivers add the
entries under the manifest's weighting (the paper's 1/N with even batches). The sender applies what
it sends, with or without peers, so replicas stay identical under full synchronous exchange. All
peers get the same payload, whatever their links' budgets. Momentum is applied here, so a job whose
optimizer has momentum is rejected.

Codec rounding errors stay in v (ours; the paper clears v). The paper's G is already divided by N;
`clipNorm` applies to the gradient before the weighting.

Source: Lin et al., Deep gradient compression, ICLR 2018, algorithm 2 and section 3.3; the schedule
as in its authors' code, by steps instead of epochs, which a policy does not know.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, require_finite
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.factory import gradient_machine
from dlion_core.policies.gradient.entries import Residual, magnitude_bits, nth_largest, outgoing
from dlion_core.policies.gradient.gradient_selectors import GradientSelector, OutgoingPayloads
from dlion_core.policies.interface import Flat, Layout, PolicyMachine, Value
from dlion_core.policies.parameters import DgcParameters
from dlion_core.policies.state_values import vector_from_state


def dgc(context: PolicyContext, parameters: DgcParameters) -> PolicyMachine:
    return gradient_machine(context, DeepCompression(context.layout, context.coding, parameters))


class DeepCompression(GradientSelector):
    """The velocity and its unsent part."""

    def __init__(self, layout: Layout, codec: AnyCoding, parameters: DgcParameters) -> None:
        self._slices = layout.slices()
        self._codec = codec
        self._parameters = parameters
        self._velocity_D = np.zeros(layout.size, np.float32)
        self._gathered = Residual.zeros(layout.size)
        self._steps = 0

    def prepare(
        self,
        gradient_D: Flat,
        peers: Sequence[Rank],
        budget_bytes: Mapping[Rank, int],  # noqa: ARG002 - the Protocol's
    ) -> OutgoingPayloads:
        """Return the same payload for all peers."""
        require_finite(gradient_D, "gradient")
        self._velocity_D *= np.float32(self._parameters.momentum)
        self._velocity_D += self._clipped(gradient_D, len(peers) + 1)
        self._gathered.value_D += self._velocity_D
        is_sent_D = self._chosen(self._gathered.value_D, self.share())
        coded = self._gathered.send(is_sent_D, self._codec)
        if self._parameters.masking:
            self._velocity_D[is_sent_D] = 0
        self._steps += 1
        return outgoing(dict.fromkeys(peers, coded), coded.part)

    def share(self) -> float:
        """Return the share of each variable's entries to send at this step."""
        stages = self._parameters.warmup_stages
        stage = min(stages, self._steps // self._parameters.warmup_every_steps)
        return float(self._parameters.share ** ((stage + 1) / (stages + 1)))

    def _clipped(self, gradient_D: Flat, workers: int) -> Flat:
        """The gradient, clipped to one worker's part of `clipNorm`."""
        if not self._parameters.clip_norm:
            return gradient_D
        norm = float(np.linalg.norm(gradient_D.astype(np.float64)))
        most = self._parameters.clip_norm / math.sqrt(workers)
        return gradient_D * np.float32(most / norm) if norm > most else gradient_D

    def _chosen(self, value_D: Flat, share: float) -> NDArray[np.bool_]:
        """The largest entries of each variable, including ties with the smallest of them."""
        bits_D = magnitude_bits(value_D)
        is_chosen_D = np.zeros(value_D.size, np.bool_)
        for where in self._slices:
            part = bits_D[where]
            if part.size:
                count = max(1, math.ceil(share * part.size))
                lowest = max(nth_largest(part, count), np.uint32(1))
                is_chosen_D[where] = part >= lowest
        return is_chosen_D

    def state(self) -> dict[str, Value]:
        return {
            "dgc_velocity_D": self._velocity_D.copy(),
            "dgc_gathered_D": self._gathered.value_D.copy(),
            "dgc_steps": self._steps,
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore what `state` returned; ignore other policies' checkpoints."""
        if "dgc_velocity_D" not in state:
            return
        self._velocity_D = vector_from_state(state["dgc_velocity_D"])
        self._gathered.value_D = vector_from_state(state["dgc_gathered_D"])
        self._steps = int(state["dgc_steps"])
