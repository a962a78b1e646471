"""`spec.trainer.privacy`: noise that hides each single sample in what leaves its worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from dlion_api.document import Rule, setting

if TYPE_CHECKING:
    from dlion_api.spec.job import Spec


MIN_NOISE_MULTIPLIER: Final = 0.01
"""Its ε is in the thousands; with much less it cannot be computed."""
MIN_CLIP_NORM: Final = 1e-9
"""The square of a norm far below it is 0 in single precision, and nothing is clipped."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Gaussian noise on clipped gradients of single samples (docs/privacy.md)."""

    clip_norm: float = setting(
        "largest norm of one sample's gradient; larger ones are scaled down.",
        maximum=10**6,
    )
    noise_multiplier: float = setting(
        "standard deviation of the noise on a batch's summed gradients, relative to clipNorm.",
        maximum=1000,
    )
    delta: float = setting(
        "the δ that the reported ε holds for; well below 1 / samples of a worker.",
        default=1e-5,
        above=0,
        maximum=0.1,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        # No minima of the schema: API servers compare an integer with their whole part, here 0.
        Rule(
            cel=f"self.noiseMultiplier >= {MIN_NOISE_MULTIPLIER}",
            message=f"a noiseMultiplier below {MIN_NOISE_MULTIPLIER} protects nothing",
            holds=lambda it: it.noise_multiplier >= MIN_NOISE_MULTIPLIER,
            reads=("noiseMultiplier",),
            advice="Set 1 or more, or leave privacy out.",
        ),
        Rule(
            cel=f"self.clipNorm >= {MIN_CLIP_NORM}",
            message=f"a clipNorm below {MIN_CLIP_NORM} is lost in rounding",
            holds=lambda it: it.clip_norm >= MIN_CLIP_NORM,
            reads=("clipNorm",),
            advice="Set about the usual norm of a gradient: 1 is a good start.",
        ),
    )


def _is_off(spec: Spec) -> bool:
    return spec.trainer.privacy is None


PRIVACY_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        cel="!has(self.trainer.privacy) || self.knowledgeTransfer.policy == 'none'",
        message="privacy needs knowledgeTransfer none: it shares losses without noise",
        holds=lambda it: _is_off(it) or it.knowledge_transfer.policy == "none",
        reads=("trainer.privacy", "knowledgeTransfer.policy"),
        advice="Set knowledgeTransfer.policy: none.",
    ),
    Rule(
        cel="!has(self.trainer.privacy) || self.exchange.topology != 'staged'",
        message="privacy is not for topology staged, whose sensors send features of samples",
        holds=lambda it: _is_off(it) or it.exchange.topology != "staged",
        reads=("trainer.privacy", "exchange.topology"),
        advice="Set another exchange.topology, or leave privacy out.",
    ),
    Rule(
        cel="!has(self.trainer.privacy) ||"
        " !(self.trainer.dataset.watch || self.trainer.dataset.dropNearDuplicates)",
        message="privacy needs data that neither grow nor lose near-duplicates: else a sample would"
        " decide about others",
        holds=lambda it: (
            _is_off(it) or not (it.trainer.dataset.watch or it.trainer.dataset.drop_near_duplicates)
        ),
        reads=("trainer.privacy", "trainer.dataset.watch", "trainer.dataset.dropNearDuplicates"),
        advice="Leave out watch and dropNearDuplicates, or privacy.",
    ),
)
