"""Scored completions: the input of every preference loss."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tropism.shapes import Lengths, PerCompletion


@dataclass(frozen=True, slots=True)
class Scored:
    """Completions with their log-probs under policy and reference, one entry per completion.

    Args:
        logps: `[C]` summed log-prob of the supervised tokens under the policy, in nats.
        reference_logps: `[C]` the same under the reference; zeros for a method without one.
        lengths: `[C]` number of supervised tokens, terminator included.
        divergence: `[C]` summed divergence from the teacher over the supervised tokens, in nats; None without one.
        confidence: `[C]` mean over the supervised tokens of log p(token) minus log sum p^2 under the policy, no
            gradient; None without WPO.
    """

    logps: PerCompletion
    reference_logps: PerCompletion
    lengths: Lengths
    divergence: PerCompletion | None = None
    confidence: PerCompletion | None = None

    @property
    def logratios(self) -> PerCompletion:
        """`[C]` policy minus reference log-prob."""
        return self.logps - self.reference_logps

    def take(self, index: Int[Tensor, " U"]) -> "Scored":
        """The completions at `index`, in that order. Indices may repeat."""
        return Scored(self.logps[index], self.reference_logps[index], self.lengths[index],
                      None if self.divergence is None else self.divergence[index],
                      None if self.confidence is None else self.confidence[index])
