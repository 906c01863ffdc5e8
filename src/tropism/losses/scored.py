"""Scored completions: the input of every preference loss."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tropism.shapes import Lengths, PerCompletion


class CompletionScore(NamedTuple):
    """One completion of `Scored`, in plain numbers that travel between processes."""

    logps: float
    reference_logps: float
    length: int
    divergence: float | None = None
    confidence: float | None = None


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

    @classmethod
    def join(cls, completions: Iterable[CompletionScore]) -> "Scored":
        """Completions as float64 tensors on the host, in their order; at least one."""
        logps, reference_logps, lengths, *optional = (list(column) for column in zip(*completions, strict=True))
        divergence, confidence = (None if None in column else torch.tensor(column, dtype=torch.float64)
                                  for column in optional)
        return cls(torch.tensor(logps, dtype=torch.float64), torch.tensor(reference_logps, dtype=torch.float64),
                   torch.tensor(lengths), divergence, confidence)

    def split(self) -> list[CompletionScore]:
        """Each completion in plain numbers; one transfer from the device."""
        none = torch.zeros_like(self.logps)
        columns = (self.logps, self.reference_logps, self.lengths, self.divergence, self.confidence)
        table = torch.stack([(none if column is None else column).detach().double() for column in columns], dim=1)
        return [CompletionScore(policy, reference, int(length), None if self.divergence is None else divergence,
                                None if self.confidence is None else confidence)
                for policy, reference, length, divergence, confidence in table.tolist()]
