"""A method: weighted rows of the table with the values of their options."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tropism.data.formats import View
from tropism.data.rows import EncodedRow
from tropism.losses.scored import Scored
from tropism.methods.table import LossRow, Reward
from tropism.shapes import PerCompletion, PerUnit, Scalar

FLAT = 1e-3
"""A sigmoid this near to 0 or 1 is flat: its slope is a thousandth or less of its size."""

Sums = dict[str, tuple[Tensor, Tensor | int]]
"""(sum, count) of each metric."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a batch: which completions each one looks at.

    Args:
        members: `[U, 1]` for single completions, `[U, 2]` (chosen, rejected) for pairs; under `ld_alpha` `[U, 4]`, with
            the beginnings of both sides that have the shorter side's length.
        desirable: `[U]` labels of single completions; None without labels.
    """

    members: Int[Tensor, "U m"]
    desirable: Bool[Tensor, " U"] | None

    def to(self, device: torch.device) -> "Units":
        """The same units on a device."""
        desirable = None if self.desirable is None else self.desirable.to(device)
        return Units(self.members.to(device), desirable)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What losses take from the whole step; each a constant for the gradient.

    Args:
        reference_point: KTO's z0.
        shift: BCO's running mean of rewards.
        partner: `[U]` AOT's reference margin of equal rank.
        chosen_partner, rejected_partner: `[U]` the other side's log-ratio of equal rank.
    """

    reference_point: Scalar | None = None
    shift: Scalar | None = None
    partner: PerUnit | None = None
    chosen_partner: PerUnit | None = None
    rejected_partner: PerUnit | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a method's loss.

    Args:
        row: the loss.
        options: values of its options.
        weight: its factor.
        key: the metric that shows it.
    """

    row: LossRow
    options: Mapping[str, Any]
    weight: float
    key: str


@dataclass(frozen=True)
class Method:
    """A sum of losses over one view of the data.

    Args:
        view: what a unit is.
        terms: at least one.
        ld_alpha: weight of the tokens by which the longer side of a pair exceeds the shorter (LD-DPO, Liu et al.
            2024, arXiv:2409.06411); None for 1.
        wpo: weigh each pair by the policy's own confidence (WPO, Zhou et al. 2024, arXiv:2406.11827, equation 2,
            with the sampled alignment of section 3.2).
    """

    view: View
    terms: tuple[Term, ...]
    ld_alpha: float | None = None
    wpo: bool = False

    def needs(self, wide: str) -> bool:
        """Whether some term takes this field of `StepInputs`."""
        return any(wide in term.row.wide for term in self.terms)

    @property
    def needs_reference(self) -> bool:
        """Whether some term looks at the reference."""
        return any(term.row.needs_reference for term in self.terms)

    @property
    def needs_reference_point(self) -> bool:
        """Whether steps need mismatched completions."""
        return self.needs("reference_point")

    @property
    def looks_ahead(self) -> bool:
        """Whether a step begins with a forward pass over all of its packs."""
        return self.needs_sorting or self.needs("shift")

    @property
    def needs_sorting(self) -> bool:
        """Whether a term compares ranks over the whole step."""
        return self.needs("partner") or self.needs("chosen_partner")

    @property
    def preference(self) -> Term | None:
        """The term that says what a reward is: the first that has one, one with a reference before others."""
        rewarded = [term for term in self.terms if term.row.reward is not None]
        return next((term for term in rewarded if term.row.needs_reference), rewarded[0] if rewarded else None)

    @property
    def beta(self) -> float:
        """What a log-ratio (or log-prob) is multiplied with to be a reward."""
        return float(self.preference.options["beta"]) if self.preference else 0.0

    def counts(self, rows: Iterable[EncodedRow]) -> tuple[int, ...]:
        """What each term divides by, over some rows: their number, or the supervised tokens it covers."""
        rows = list(rows)
        return tuple(len(rows) if term.row.covers is None else sum(map(term.row.covers, rows)) for term in self.terms)

    def sides(self, scored: Scored, units: Units, whole: bool = False) -> tuple[Scored, Scored]:
        """Chosen and rejected completions of each pair, desensitised to length under `ld_alpha` unless `whole`."""
        sides = [scored.take(units.members[:, column]) for column in (0, 1)]
        if self.ld_alpha is not None and not whole:
            for column in (0, 1):
                full, shared = sides[column], scored.take(units.members[:, column + 2])
                # shared + alpha x rest, where rest = full - shared
                sides[column] = replace(
                    full, logps=self.ld_alpha * full.logps + (1 - self.ld_alpha) * shared.logps,
                    reference_logps=(self.ld_alpha * full.reference_logps
                                     + (1 - self.ld_alpha) * shared.reference_logps))
        return sides[0], sides[1]

    def losses(self, scored: Scored, units: Units, wide: StepInputs) -> list[PerUnit]:
        """`[U]` loss of each unit, for each term; neither weighted nor divided."""
        found = []
        for term in self.terms:
            args: tuple[Any, ...]
            if self.view == "paired":  # `ld_alpha` is about preferences: a likelihood is that of every token
                args = self.sides(scored, units, whole=term.row.reward is None)
            else:
                single = scored.take(units.members[:, 0])
                args = (single, units.desirable) if self.view == "unpaired" else (single,)
            from_step = {name: getattr(wide, name) for name in term.row.wide}
            losses = term.row.function(*args, **term.row.arguments(term.options), **from_step)
            if self.wpo and term.row.weighted:
                losses = losses * _confidence(scored, units)
            found.append(losses)
        return found

    def total(self, losses: Sequence[PerUnit], counts: Sequence[int]) -> Scalar:
        """The scalar to differentiate: each term divided by its own count, then weighted.

        A term without a token to look at in the whole step adds nothing.
        """
        parts = [term.weight * values.sum() / max(count, 1)
                 for term, values, count in zip(self.terms, losses, counts, strict=True)]
        return torch.stack(parts).sum()

    def unit_rewards(self, scored: Scored, units: Units) -> Tensor:
        """`[U, m]` reward of each unit's completion, or of both sides of each pair."""
        sides = self.sides(scored, units) if self.view == "paired" else (scored.take(units.members[:, 0]),)
        return torch.stack([self._reward(side) for side in sides], dim=1)

    def _reward(self, side: Scored) -> PerCompletion:
        kind = self._reward_kind
        total = self.beta * (side.logps if kind.endswith("logp") else side.logratios)
        return total / side.lengths if kind.startswith("mean") else total

    @property
    def _reward_kind(self) -> Reward:
        return self.preference.row.reward or "logratio" if self.preference else "logratio"

    def clear_rewards(self, scored: Scored, units: Units, noise: PerCompletion) -> Tensor:
        """`unit_rewards`, where one that is no larger than `noise` is rounding, and 0."""
        rewards = self.unit_rewards(scored, units)
        members = units.members[:, : rewards.shape[1]]
        quiet = noise[members] / (scored.lengths[members] if self._reward_kind.startswith("mean") else 1)
        return torch.where(rewards.abs() <= quiet, torch.zeros_like(rewards), rewards)

    def metrics(self, scored: Scored, units: Units, losses: Sequence[PerUnit], counts: Sequence[int],
                noise: PerCompletion) -> Sums:
        """(sum, count) of each training metric. The margin of unpaired data follows from the class means."""
        found: Sums = {term.key: (values.sum(), count)
                       for term, values, count in zip(self.terms, losses, counts, strict=True)}
        if self.view == "single":
            return found
        if self.tells_saturation:
            found["saturated"] = (self._saturated(units, losses).double().sum(), len(units.members))
        rewards = self.unit_rewards(scored, units)
        number = len(units.members)
        if self.view == "paired":
            clear = self.clear_rewards(scored, units, noise)
            right = (clear[:, 0] > clear[:, 1]).double() + 0.5 * (clear[:, 0] == clear[:, 1]).double()
            found["rewards/margins"] = ((rewards[:, 0] - rewards[:, 1]).sum(), number)
            found["rewards/accuracies"] = (right.sum(), number)
            for column, name in enumerate(("chosen", "rejected")):
                found[f"rewards/{name}"] = (rewards[:, column].sum(), number)
                found[f"logps/{name}"] = (scored.logps[units.members[:, column]].sum(), number)
            return found
        assert units.desirable is not None
        logps = scored.logps[units.members[:, 0]]
        for name, of_class in (("chosen", units.desirable), ("rejected", ~units.desirable)):
            found[f"rewards/{name}"] = ((rewards[:, 0] * of_class).sum(), of_class.sum())
            found[f"logps/{name}"] = ((logps * of_class).sum(), of_class.sum())
        return found

    @property
    def tells_saturation(self) -> bool:
        """Whether the value of a unit's loss says that its derivative is nearly 0."""
        term = self.preference
        return term is not None and bool(term.row.flat) and not term.options.get("label_smoothing") and not self.wpo

    def _saturated(self, units: Units, losses: Sequence[PerUnit]) -> Tensor:
        """`[U]` which units have a sigmoid within FLAT of an end where the loss has no slope."""
        term = self.preference
        assert term is not None
        values = next(own for other, own in zip(self.terms, losses, strict=True) if other is term).detach()
        if units.desirable is not None:
            weights = [torch.full_like(values, term.options[name]) for name in ("desirable_weight",
                                                                                "undesirable_weight")]
            values = values / torch.where(units.desirable, *weights)
        if term.row.flat == "ends":
            return (values < FLAT) | (values > 1 - FLAT)
        return values < -math.log1p(-FLAT)

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Keys of `metrics`, the same on every rank whatever it has seen."""
        keys = tuple(term.key for term in self.terms)
        if self.view == "single":
            return keys
        keys += ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
        keys += ("saturated",) if self.tells_saturation else ()
        return (*keys, "rewards/margins", "rewards/accuracies") if self.view == "paired" else keys

    def combine(self, means: Mapping[str, float]) -> dict[str, float]:
        """Means with what follows from them: the whole loss, the margin of unpaired data, the perplexity."""
        record = dict(means)
        present = [term.weight * record[term.key] for term in self.terms if term.key in record]
        if present:
            record = {"loss": sum(present), **record}
        if "rewards/margins" not in record and {"rewards/chosen", "rewards/rejected"} <= record.keys():
            record["rewards/margins"] = record["rewards/chosen"] - record["rewards/rejected"]
        entropy = next((record[term.key] for term in self.terms
                        if self.view == "single" and term.row.name == "sft" and term.key in record), None)
        if entropy is not None:
            record["perplexity"] = math.exp(min(entropy, 700.0))
        return record

    def at_start(self, labels: Sequence[bool | None]) -> float | None:
        """The loss of units with these labels while policy and reference agree, where that is known beforehand."""
        if self.wpo or any(not term.row.needs_reference for term in self.terms):
            return None
        number = len(labels)
        width = 2 if self.view == "paired" else 1
        members = torch.arange(width * number).reshape(number, width)
        zeros = torch.zeros(members.numel(), dtype=torch.float64)
        scored = Scored(zeros, zeros, torch.ones(len(zeros), dtype=torch.int64))
        units = Units(members, None if self.view == "paired" else torch.tensor([bool(label) for label in labels]))
        none, each = torch.zeros((), dtype=torch.float64), torch.zeros(number, dtype=torch.float64)
        plain = replace(self, ld_alpha=None)
        return float(plain.total(plain.losses(scored, units, StepInputs(none, none, each, each, each)),
                                 [number] * len(self.terms)))


def _confidence(scored: Scored, units: Units) -> PerUnit:
    """`[U]` WPO's weight of each pair: how likely the policy is to write both sides itself."""
    assert scored.confidence is not None
    return scored.confidence[units.members[:, :2]].sum(dim=1).exp().detach()
