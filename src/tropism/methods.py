"""The table of methods: a view of the tree, a loss, and what the loss needs. A new loss is one more row."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tropism.data.formats import View
from tropism.losses import pairwise, unpaired
from tropism.losses.scored import Scored
from tropism.shapes import PerCompletion, PerUnit, Scalar


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a batch: which completions each one looks at.

    Args:
        members: `[U, 1]` for single completions, `[U, 2]` (chosen, rejected) for pairs.
        desirable: `[U]` labels of single completions; None for pairs.
    """

    members: Int[Tensor, "U m"]
    desirable: Bool[Tensor, " U"] | None


@dataclass(frozen=True, slots=True)
class LossRow:
    """One published loss.

    Args:
        name: as `--loss` takes it.
        view: unpaired completions, or pairs.
        function: the pure loss.
        options: its keyword arguments, by the names of the options that set them.
        at_start: its mean value while policy and reference agree, given those arguments and the labels.
        reading: what is said at start where the literature has more than one reading of the name.
        needs_reference_point: takes the pooled log-ratio of mismatched completions.
    """

    name: str
    view: View
    function: Callable[..., PerUnit]
    options: tuple[str, ...]
    at_start: Callable[[Mapping[str, float], Tensor | None], float]
    reading: str
    needs_reference_point: bool = False


def _half_mean_weight(options: Mapping[str, float], desirable: Tensor | None) -> float:
    assert desirable is not None
    share = float(desirable.double().mean())
    return 0.5 * (share * options["desirable_weight"] + (1 - share) * options["undesirable_weight"])


LOSSES: dict[str, LossRow] = {row.name: row for row in (
    LossRow("kto", "unpaired", unpaired.kto, ("beta", "desirable_weight", "undesirable_weight"),
            _half_mean_weight, "KTO with the reference point pooled over the whole step", needs_reference_point=True),
    LossRow("sigmoid", "paired", pairwise.sigmoid, ("beta", "label_smoothing"),
            lambda options, desirable: math.log(2.0), "DPO on summed log-probs"),
)}


@dataclass(frozen=True)
class Method:
    """A row of the table with the values of its options."""

    row: LossRow
    options: Mapping[str, float] = field(default_factory=dict)

    @property
    def beta(self) -> float:
        """What a log-ratio is multiplied with to be a reward."""
        return self.options["beta"]

    def losses(self, scored: Scored, units: Units, reference_point: Scalar | None) -> PerUnit:
        """`[U]` loss of each unit."""
        if self.row.view == "paired":
            return self.row.function(*self.sides(scored, units), **self.options)
        args: list[Any] = [scored.take(units.members[:, 0]), units.desirable]
        if self.row.needs_reference_point:
            args.append(reference_point)
        return self.row.function(*args, **self.options)

    @staticmethod
    def sides(scored: Scored, units: Units) -> tuple[Scored, Scored]:
        """Chosen and rejected completions of each pair."""
        return scored.take(units.members[:, 0]), scored.take(units.members[:, 1])

    def rewards(self, scored: Scored, noise: PerCompletion) -> PerCompletion:
        """`[C]` beta x log-ratio; one that is no larger than `noise` is rounding, and 0."""
        rewards = self.beta * scored.logratios
        return torch.where(rewards.abs() <= noise, torch.zeros_like(rewards), rewards)

    def metrics(self, scored: Scored, units: Units, losses: PerUnit,
                noise: PerCompletion) -> dict[str, tuple[Tensor, Tensor | int]]:
        """(sum, count) of each training metric. The margin of unpaired data follows from the class means."""
        pairs: dict[str, tuple[Tensor, Tensor | int]] = {"loss": (losses.sum(), len(losses))}
        if self.row.view == "paired":
            chosen, rejected = self.sides(scored, units)
            margins = self.beta * (chosen.logratios - rejected.logratios)
            pairs["rewards/margins"] = (margins.sum(), len(margins))
            clear = self.rewards(scored, noise)[units.members]
            right = (clear[:, 0] > clear[:, 1]).double() + 0.5 * (clear[:, 0] == clear[:, 1]).double()
            pairs["rewards/accuracies"] = (right.sum(), len(margins))
            for name, side in (("chosen", chosen), ("rejected", rejected)):
                pairs[f"rewards/{name}"] = (self.beta * side.logratios.sum(), len(margins))
                pairs[f"logps/{name}"] = (side.logps.sum(), len(margins))
            return pairs
        single = scored.take(units.members[:, 0])
        assert units.desirable is not None
        for name, of_class in (("chosen", units.desirable), ("rejected", ~units.desirable)):
            pairs[f"rewards/{name}"] = (self.beta * (single.logratios * of_class).sum(), of_class.sum())
            pairs[f"logps/{name}"] = ((single.logps * of_class).sum(), of_class.sum())
        return pairs

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Keys of `metrics`, the same on every rank whatever it has seen."""
        keys = ("loss", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
        return (*keys, "rewards/margins", "rewards/accuracies") if self.row.view == "paired" else keys
