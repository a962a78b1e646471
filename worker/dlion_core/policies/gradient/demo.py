"""Policy `demo`: decoupled momentum. Its fast components travel, the rest stays with each worker.

Each worker has its own momentum m. The momentum is cut into chunks, and each chunk is transformed
by an orthonormal cosine transform (DCT-II). At each step, with gradient g:

    m <- beta m + g
    q = the k largest coefficients of each chunk of DCT(m);  m <- m - inverse DCT(q)
    Q = inverse DCT(mean of all workers' q);  the optimizer gets Q, or its sign

All average in lock step, so replicas stay identical. As the transform is linear, the momentum is
kept as its coefficients: that saves an inverse transform per step. Momentum is applied here, so a
job whose optimizer has momentum is rejected.

Source: Peng, Quesnelle and Kingma, "DeMo: Decoupled momentum optimization", 2024, algorithm 1. As
recalled: beta 0.999, chunks of 64, and the sign in its experiments; its authors' code divides a
coefficient by the workers that sent it, not by all. Ours: chunks are runs of a variable's entries,
as the shapes of matrices, which the paper cuts into squares, are not known here; so k is smaller
too. Means are by samples, and what the codec rounds off stays in the momentum.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import (
    AnyCoding,
    CosineTransform,
    GradientPart,
    NotFiniteError,
    require_finite,
)
from dlion_core.policies.aggregation import Contribution
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.factory import gradient_machine
from dlion_core.policies.gradient.entries import Residual, chunks_of, largest_of_chunks, outgoing
from dlion_core.policies.gradient.gradient_exchange import GradientMachine
from dlion_core.policies.gradient.gradient_selectors import (
    GradientSelector,
    OutgoingPayloads,
    Payload,
)
from dlion_core.policies.interface import ApplyGradient, Flat, Layout, PolicyMachine, Value
from dlion_core.policies.parameters import DemoParameters
from dlion_core.policies.state_values import vector_from_state

_MOMENTUM = "demo_momentum_D"


def demo(context: PolicyContext, parameters: DemoParameters) -> PolicyMachine:
    momentum = DecoupledMomentum(context.layout, context.coding, parameters)
    build_machine = partial(CoefficientMachine, transform=momentum.transform, parameters=parameters)
    return gradient_machine(context, momentum, build_machine)


def largest_coefficient(parameters: DemoParameters) -> float:
    """Return the largest magnitude with which the entries of a chunk are finite, whatever the signs
    of its coefficients."""
    return float(np.finfo(np.float32).max) / (2 * parameters.chunk)


class DecoupledMomentum(GradientSelector):
    """One worker's momentum, as coefficients. What it selects are coefficients, too."""

    def __init__(self, layout: Layout, codec: AnyCoding, parameters: DemoParameters) -> None:
        self._chunks = chunks_of(layout, parameters.chunk)
        self.transform = CosineTransform(self._chunks)
        self._codec = codec
        self._parameters = parameters
        self._momentum = Residual.zeros(layout.size)

    def prepare(
        self,
        gradient_D: Flat,
        peers: Sequence[Rank],
        budget_bytes: Mapping[Rank, int],  # noqa: ARG002 - the Protocol's
    ) -> OutgoingPayloads:
        """Return the same payload for all peers."""
        require_finite(gradient_D, "gradient")
        momentum_D = np.float32(self._parameters.momentum) * self._momentum.value_D
        momentum_D += self.transform.coefficients(gradient_D)
        require_finite(momentum_D, "momentum")
        if (largest := float(np.abs(momentum_D).max())) > largest_coefficient(self._parameters):
            raise NotFiniteError(f"momentum: a coefficient of {largest:.3g} is too large to send")
        self._momentum.value_D = momentum_D
        is_sent_D = largest_of_chunks(
            momentum_D, self._chunks, lambda _: self._parameters.coefficients
        )
        coded = self._momentum.send(is_sent_D, self._codec)
        return outgoing(dict.fromkeys(peers, coded), coded.part)

    def state(self) -> dict[str, Value]:
        return {_MOMENTUM: self._momentum.value_D.copy()}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore what `state` returned; ignore other policies' checkpoints."""
        if _MOMENTUM in state:
            self._momentum = Residual(vector_from_state(state[_MOMENTUM]))


class CoefficientMachine(GradientMachine):
    """A gradient machine whose contributions are coefficients."""

    def __init__(
        self,
        context: PolicyContext,
        selector: GradientSelector,
        *,
        transform: CosineTransform,
        parameters: DemoParameters,
    ) -> None:
        super().__init__(context, selector)
        self._transform, self._parameters = transform, parameters
        self._largest = largest_coefficient(parameters)

    def decoded(self, payload: Payload) -> GradientPart:
        """Decode a peer's coefficients. Raises ContractError if they are invalid."""
        part = super().decoded(payload)
        largest = float(np.abs(part.value_K).max())
        if largest > self._largest:
            raise ContractError(f"coefficient of {largest:.3g}; allowed: +-{self._largest:.3g}")
        return part

    def combined_update(
        self, contributions: Iterable[Contribution], sizes: Mapping[Rank, int]
    ) -> ApplyGradient:
        """Transform the mean of the coefficients back."""
        update = super().combined_update(contributions, sizes)
        update_D = self._transform.values(update.gradient_D)
        return replace(
            update, gradient_D=np.sign(update_D) if self._parameters.step == "sign" else update_D
        )
