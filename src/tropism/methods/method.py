"""A method: a weighted sum of losses, what it needs, and its metrics."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tropism.data.batching.transfer import sent
from tropism.data.rows import EncodedRow, View
from tropism.losses.scored import Scored
from tropism.methods.loss_table import LossRow, Reward
from tropism.shapes import PerCompletion, PerUnit, Scalar

FLAT = 1e-3
"""Distance from 0 or 1 within which a sigmoid counts as flat. Its slope is then at most a thousandth."""

_PERPLEXITY = "perplexity"

Sums = dict[str, tuple[Tensor, Tensor | int]]
"""(sum, count) of each metric."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a batch: indices of the completions of each unit.

    Args:
        members: `[U, 1]` for single completions, `[U, 2]` (chosen, rejected) for pairs. With `ld_alpha` `[U, 4]`: also
            the beginnings of both sides in the length of the shorter side.
        desirable: `[U]` labels; None without labels.
        weights: `[U]` factors of the losses; None for 1 each.
        micro_batches: `[U]` the micro-batch of each unit, if the step's have a reference point each.
        shares: `[U, terms]` what each unit's loss contributes of each term's, in place of one over the step's count.
    """

    members: Int[Tensor, "U m"]
    desirable: Bool[Tensor, " U"] | None
    weights: PerUnit | None = None
    micro_batches: Int[Tensor, " U"] | None = None
    shares: Float[Tensor, "U t"] | None = None

    def to(self, device: torch.device) -> "Units":
        """The same units on a device."""
        return Units(sent(self.members, device), *(None if part is None else sent(part, device) for part in (
            self.desirable, self.weights, self.micro_batches, self.shares)))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of losses that depend on the whole step. No gradient flows into them.

    Args:
        reference_point: KTO's z0; `[U]` if micro-batches have one each.
        shift: BCO's running mean of the rewards.
        partner: `[U]` AOT's reference margin of equal rank.
        chosen_partner, rejected_partner: `[U]` log-ratio of equal rank on the other side, for unpaired AOT.
    """

    reference_point: Scalar | PerUnit | None = None
    shift: Scalar | None = None
    partner: PerUnit | None = None
    chosen_partner: PerUnit | None = None
    rejected_partner: PerUnit | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a method's loss.

    Args:
        row: of the table of losses.
        options: values of its options.
        weight: factor of the loss.
        key: of its metric.
    """

    row: LossRow
    options: Mapping[str, Any]
    weight: float
    key: str


@dataclass(frozen=True)
class Method:
    """A sum of losses over one view of the data.

    Args:
        view: kind of its units.
        terms: at least one.
        ld_alpha: weight of the tokens of the longer side of a pair beyond the length of the shorter side (LD-DPO, Liu
            et al. 2024, arXiv:2409.06411); None for 1.
        wpo: weight each pair by the policy's own confidence (WPO, Zhou et al. 2024, arXiv:2406.11827, equation 2,
            with the sampled alignment of section 3.2).
        divisor: of the losses of rows with weights: the `count` that they have without weights, or the `sum` of the
            weights of what is counted; empty if the weights of rows are 1.
        average: compare single completions by their mean log-prob per token.
    """

    view: View
    terms: tuple[Term, ...]
    ld_alpha: float | None = None
    wpo: bool = False
    divisor: Literal["", "count", "sum"] = ""
    average: bool = False

    def compared(self, scored: Scored) -> Scored:
        """Completions with the log-probs that are compared: sums, or means per token if `average`."""
        if not self.average:
            return scored
        tokens = scored.lengths.clamp(min=1)
        return replace(scored, logps=scored.logps / tokens, reference_logps=scored.reference_logps / tokens)

    def needs(self, step_input: str) -> bool:
        """True if a term needs this field of `StepInputs`."""
        return any(step_input in term.row.step_inputs for term in self.terms)

    @property
    def needs_reference(self) -> bool:
        """True if a term uses the reference."""
        return any(term.row.needs_reference for term in self.terms)

    @property
    def needs_reference_point(self) -> bool:
        """True if steps need mismatched completions."""
        return self.needs("reference_point")

    @property
    def looks_ahead(self) -> bool:
        """True if a step begins with a forward pass over all of its packs."""
        return self.needs_sorting or self.needs("shift")

    @property
    def needs_sorting(self) -> bool:
        """True if a term sorts values over the whole step."""
        return self.needs("partner") or self.needs("chosen_partner")

    @property
    def preference(self) -> Term | None:
        """The term that defines the reward: the first with a reference and a reward, else the first with a reward."""
        rewarded = [term for term in self.terms if term.row.reward is not None]
        return next((term for term in rewarded if term.row.needs_reference), rewarded[0] if rewarded else None)

    @property
    def beta(self) -> float:
        """Factor from a log-ratio (or log-prob) to a reward."""
        return float(self.preference.options["beta"]) if self.preference else 0.0

    def counts(self, rows: Iterable[EncodedRow]) -> tuple[float, ...]:
        """Divisor of each term for some rows: their number, or the supervised tokens that the term covers; or the sum
        of the weights of either."""
        rows = list(rows)
        if self.divisor == "sum":
            return tuple(math.fsum(row.weight * (term.row.covers(row) if term.row.covers else 1) for row in rows)
                         for term in self.terms)
        return tuple(len(rows) if term.row.covers is None else sum(map(term.row.covers, rows)) for term in self.terms)

    def shares(self, rows: Sequence[EncodedRow], factor: float, per_token: bool = False) -> list[tuple[float, ...]]:
        """For each row of a part of a micro-batch, the factor of its loss in each term: `factor` over the count of the
        part. The likelihood of a pair is its mean per token there, unless the part counts tokens (`per_token`)."""
        counts = [factor / (count or 1) for count in self.counts(rows)]
        by_row = self.view == "paired" and not per_token
        return [tuple(factor / len(rows) / (term.row.covers(row) or 1) if term.row.covers and by_row else count
                      for term, count in zip(self.terms, counts, strict=True)) for row in rows]

    def weights(self, rows: Iterable[EncodedRow]) -> PerUnit | None:
        """`[U]` the weight of each row; None if weights have no effect."""
        return torch.tensor([row.weight for row in rows], dtype=torch.float64) if self.divisor else None

    def sides(self, scored: Scored, units: Units, all_tokens: bool = False) -> tuple[Scored, Scored]:
        """Chosen and rejected completions of each pair, length-desensitized by `ld_alpha` unless `all_tokens`."""
        sides = [scored.take(units.members[:, column]) for column in (0, 1)]
        if self.ld_alpha is not None and not all_tokens:
            for column in (0, 1):
                full, shared = sides[column], scored.take(units.members[:, column + 2])
                # shared + alpha x rest, where rest = full - shared
                sides[column] = replace(
                    full, logps=self.ld_alpha * full.logps + (1 - self.ld_alpha) * shared.logps,
                    reference_logps=(self.ld_alpha * full.reference_logps
                                     + (1 - self.ld_alpha) * shared.reference_logps))
        return sides[0], sides[1]

    def losses(self, scored: Scored, units: Units, step_inputs: StepInputs) -> list[PerUnit]:
        """`[U]` loss of each unit for each term, times the unit's weight, before weights of terms and divisors."""
        found = []
        for term in self.terms:
            args: tuple[Any, ...]
            if self.view == "paired":  # `ld_alpha` applies to preferences; a likelihood is that of every token
                args = self.sides(scored, units, all_tokens=term.row.reward is None)
            else:
                single = self.compared(scored.take(units.members[:, 0]))
                args = (single, units.desirable) if self.view == "unpaired" else (single,)
            from_step = {name: getattr(step_inputs, name) for name in term.row.step_inputs}
            losses = term.row.function(*args, **term.row.arguments(term.options), **from_step)
            if self.wpo and term.row.weighted:
                losses = losses * _confidence(scored, units)
            if units.weights is not None:
                losses = losses * units.weights.to(losses.dtype)
            found.append(losses)
        return found

    def total(self, losses: Sequence[PerUnit], counts: Sequence[float],
              shares: Float[Tensor, "U t"] | None = None) -> Scalar:
        """The scalar to differentiate: each term divided by its own count, then weighted.

        A term with count 0 adds nothing.

        Args:
            shares: of `Units`, in place of the counts.
        """
        if shares is not None:
            return torch.stack([term.weight * (values * share).sum() for term, values, share in zip(
                self.terms, losses, shares.unbind(1), strict=True)]).sum()
        parts = [term.weight * values.sum() / (count or 1)
                 for term, values, count in zip(self.terms, losses, counts, strict=True)]
        return torch.stack(parts).sum()

    def unit_rewards(self, scored: Scored, units: Units) -> Tensor:
        """`[U, 1]` rewards of single completions, or `[U, 2]` of both sides of each pair."""
        sides = self.sides(scored, units) if self.view == "paired" else (scored.take(units.members[:, 0]),)
        return torch.stack([self._reward(side) for side in sides], dim=1)

    def _reward(self, side: Scored) -> PerCompletion:
        kind, side = self._reward_kind, self.compared(side)
        total = self.beta * (side.logps if kind.endswith("logp") else side.logratios)
        return total / side.lengths if kind.startswith("mean") else total

    @property
    def _reward_kind(self) -> Reward:
        return self.preference.row.reward or "logratio" if self.preference else "logratio"

    @property
    def discounts_length(self) -> bool:
        """Whether the length of a completion counts for less: LD-DPO, and rewards per token."""
        return (self.ld_alpha is not None and self.ld_alpha < 1) or self._reward_kind.startswith("mean")

    def clear_rewards(self, scored: Scored, units: Units, noise: PerCompletion) -> Tensor:
        """`unit_rewards`, with 0 for rewards no larger than `noise`, which are rounding errors."""
        rewards = self.unit_rewards(scored, units)
        members = units.members[:, : rewards.shape[1]]
        threshold = noise[members] / (scored.lengths[members] if self._reward_kind.startswith("mean") else 1)
        return torch.where(rewards.abs() <= threshold, torch.zeros_like(rewards), rewards)

    def metrics(self, scored: Scored, units: Units, losses: Sequence[PerUnit], counts: Sequence[float],
                noise: PerCompletion) -> Sums:
        """(sum, count) of each training metric. `combine` derives the margin of unpaired data from the class means."""
        found: Sums = {term.key: (values.sum(), count)
                       for term, values, count in zip(self.terms, losses, counts, strict=True)}
        if self.view == "single":
            return found | (self._weighted_entropy(scored, units, losses) if self.divisor else {})
        if self.reports_saturation:
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

    def _weighted_entropy(self, scored: Scored, units: Units, losses: Sequence[PerUnit]) -> Sums:
        """The cross-entropy of the tokens with the weights of their rows, which `combine` turns into a perplexity."""
        assert units.weights is not None
        tokens = (units.weights * scored.lengths[units.members[:, 0]]).sum()
        entropy = next(own.sum() for term, own in zip(self.terms, losses, strict=True) if term.row.name == "sft")
        return {_PERPLEXITY: (entropy, tokens)}

    @property
    def reports_saturation(self) -> bool:
        """True if the loss of a unit shows that its derivative is nearly 0."""
        term = self.preference
        return term is not None and bool(term.row.flat) and not term.options.get("label_smoothing") and not self.wpo

    def _saturated(self, units: Units, losses: Sequence[PerUnit]) -> Tensor:
        """`[U]` True for units whose sigmoid is within FLAT of an end where the loss has no slope."""
        term = self.preference
        assert term is not None
        values = next(own for other, own in zip(self.terms, losses, strict=True) if other is term).detach()
        if units.desirable is not None:
            weights = [torch.full_like(values, term.options[name]) for name in ("desirable_weight",
                                                                                "undesirable_weight")]
            values = values / torch.where(units.desirable, *weights)
        if units.weights is not None:  # a weight of 0 gives NaN, which is not saturated
            values = values / units.weights
        if term.row.flat == "ends":
            return (values < FLAT) | (values > 1 - FLAT)
        return values < -math.log1p(-FLAT)

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Keys of `metrics`, equal on all ranks."""
        keys = tuple(term.key for term in self.terms)
        if self.view == "single":
            return (*keys, _PERPLEXITY) if self.divisor else keys
        keys += ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
        keys += ("saturated",) if self.reports_saturation else ()
        return (*keys, "rewards/margins", "rewards/accuracies") if self.view == "paired" else keys

    def combine(self, means: Mapping[str, float]) -> dict[str, float]:
        """Means with derived metrics: the total loss, the margin of unpaired data, the perplexity."""
        record = dict(means)
        present = [term.weight * record[term.key] for term in self.terms if term.key in record]
        if present:
            record = {"loss": sum(present), **record}
        if "rewards/margins" not in record and {"rewards/chosen", "rewards/rejected"} <= record.keys():
            record["rewards/margins"] = record["rewards/chosen"] - record["rewards/rejected"]
        entropy = next((record[term.key] for term in self.terms
                        if self.view == "single" and term.row.name == "sft" and term.key in record), None)
        if self.divisor:
            entropy = record.pop(_PERPLEXITY, None)
        if entropy is not None:
            record[_PERPLEXITY] = math.exp(min(entropy, 700.0))
        return record

    def loss_at_start(self, labels: Sequence[bool | None], weights: PerUnit | None = None) -> float | None:
        """The loss of units with these labels and weights while policy equals reference; None if it is not known in
        advance."""
        if self.wpo or any(not term.row.needs_reference for term in self.terms):
            return None
        number = len(labels)
        width = 2 if self.view == "paired" else 1
        members = torch.arange(width * number).reshape(number, width)
        zeros = torch.zeros(members.numel(), dtype=torch.float64)
        scored = Scored(zeros, zeros, torch.ones(len(zeros), dtype=torch.int64))
        units = Units(members, None if self.view == "paired" else torch.tensor([bool(label) for label in labels]),
                      weights)
        count = number if weights is None or self.divisor == "count" else float(weights.sum())
        none, each = torch.zeros((), dtype=torch.float64), torch.zeros(number, dtype=torch.float64)
        plain = replace(self, ld_alpha=None)
        return float(plain.total(plain.losses(scored, units, StepInputs(none, none, each, each, each)),
                                 [count] * len(self.terms)))


def _confidence(scored: Scored, units: Units) -> PerUnit:
    """`[U]` WPO's weight of each pair: how likely the policy is to write both sides itself."""
    assert scored.confidence is not None
    return scored.confidence[units.members[:, :2]].sum(dim=1).exp().detach()
