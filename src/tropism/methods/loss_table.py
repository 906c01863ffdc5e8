"""The table of losses, one row each: its view, function, options, and what it needs from the step.

Functions are named by their place in `tropism.losses` and imported when they are called, because options are checked
against the table before torch is imported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from tropism.data.rows import EncodedRow, View

if TYPE_CHECKING:
    from tropism.shapes import PerUnit

Reward = Literal["logratio", "mean_logratio", "logp", "mean_logp"]


@dataclass(frozen=True, slots=True)
class LossRow:
    """One published loss.

    Args:
        name: value of `--loss`.
        view: unpaired completions, pairs, or completions without labels.
        function: the pure loss. It takes (chosen, rejected), (scored, desirable) or (scored), then keywords.
        reading: one line for the log, which tells apart different losses of the same name.
        options: its options with their defaults.
        reward: of a completion, before the factor beta: its log-ratio, or its log-prob for a loss without a reference;
            or the mean of either per token, if the loss compares means.
        step_inputs: keywords that depend on the whole step: fields of `StepInputs`.
        covers: number of supervised tokens of a row, for a loss that divides by tokens; None for one that divides by
            units.
        nll: for a loss with a likelihood term: the option with its weight, or a fixed weight.
        weighted: True if WPO can weight it.
        needs_teacher: True if it needs the divergence from a teacher.
        flat: values at which the loss of a unit has no slope: none that are known, near 0 (`low`; none with label
            smoothing), or near 0 and near the class weight (`ends`).
    """

    name: str
    view: View
    function: "Callable[..., PerUnit]"
    reading: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reward: Reward | None = "logratio"
    step_inputs: tuple[str, ...] = ()
    covers: Callable[[EncodedRow], int] | None = None
    nll: str | float | None = None
    weighted: bool = True
    needs_teacher: bool = False
    flat: Literal["", "low", "ends"] = ""

    @property
    def needs_reference(self) -> bool:
        """True if the loss uses the reference."""
        return self.reward in ("logratio", "mean_logratio")

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of the function from the values of the options."""
        values = {name: value for name, value in options.items() if name not in ("f_divergence", "f_alpha", self.nll)}
        if "f_divergence" in options:
            values["link"] = _in("f_divergence_links.link_of")(options["f_divergence"], options["f_alpha"])
        return values


def _in(place: str) -> Callable[..., Any]:
    """The function at a place in `tropism.losses`: `module.name`."""
    module, _, name = place.partition(".")

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f"tropism.losses.{module}"), name)(*args, **options)

    return call


def _tokens(row: EncodedRow) -> int:
    return sum(completion.length for completion in row.completions[:2])


def _tokens_if_desirable(row: EncodedRow) -> int:
    return row.completions[0].length if row.desirable else 0


_BETA = {"beta": 0.1}
_SMOOTH = {**_BETA, "label_smoothing": 0.0}
_LINK = {"f_divergence": "reverse_kl", "f_alpha": 0.5}
_WEIGHTS = {**_BETA, "desirable_weight": 1.0, "undesirable_weight": 1.0}
_KD = {"reward": None, "weighted": False, "needs_teacher": True}

_ROWS = (
    LossRow("sigmoid", "paired", _in("pairwise.sigmoid"), "DPO on summed log-probs", {**_SMOOTH, **_LINK}, flat="low"),
    LossRow("robust", "paired", _in("pairwise.robust"), "DPO unbiased under flipped labels",
            {**_BETA, "label_smoothing": 0.1, **_LINK}),
    LossRow("ipo", "paired", _in("pairwise.ipo"), "IPO on summed log-probs, as DPO takes them", {**_BETA, **_LINK}),
    LossRow("ipo_mean", "paired", _in("pairwise.ipo_mean"), "IPO on log-probs per token", {**_BETA, **_LINK},
            reward="mean_logratio"),
    LossRow("hinge", "paired", _in("pairwise.hinge"), "hinge on summed log-probs (SLiC)", {**_BETA, **_LINK},
            flat="low"),
    LossRow("exo_pair", "paired", _in("pairwise.exo_pair"), "EXO on pairs, reverse KL to smoothed labels",
            {**_BETA, "label_smoothing": 1e-3, **_LINK}),
    LossRow("nca_pair", "paired", _in("pairwise.nca_pair"), "noise contrastive alignment on pairs", _BETA),
    LossRow("bco_pair", "paired", _in("pairwise.bco_pair"), "binary classifier on both sides, no shift", _BETA,
            flat="low"),
    LossRow("sppo_hard", "paired", _in("pairwise.sppo_hard"), "SPPO with win probabilities 1 and 0", _BETA),
    LossRow("apo_zero", "paired", _in("pairwise.apo_zero"), "APO-zero: chosen up, rejected down", _BETA),
    LossRow("apo_down", "paired", _in("pairwise.apo_down"), "APO-down: chosen down, rejected further", _BETA),
    LossRow("discopop", "paired", _in("pairwise.discopop"), "DiscoPOP's log-ratio modulated loss",
            {**_BETA, "discopop_tau": 0.05, **_LINK}),
    LossRow("sigmoid_norm", "paired", _in("pairwise.sigmoid_norm"), "DPO on log-probs per token",
            {"beta": 5.0, **_LINK}, reward="mean_logratio", flat="low"),
    LossRow("aot", "paired", _in("aot.aot"), "AOT: margins of policy and reference, sorted over the step",
            _SMOOTH, step_inputs=("partner",), weighted=False),
    LossRow("aot_unpaired", "paired", _in("aot.aot_unpaired"),
            "AOT: chosen and rejected log-ratios, sorted over the step", _SMOOTH,
            step_inputs=("chosen_partner", "rejected_partner"), weighted=False),
    LossRow("simpo", "paired", _in("reference_free.simpo"), "SimPO on log-probs per token, no reference",
            {"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.0}, reward="mean_logp", flat="low"),
    LossRow("cpo", "paired", _in("reference_free.cpo"),
            "CPO on summed log-probs with its likelihood term, no reference",
            {**_SMOOTH, "cpo_alpha": 1.0}, reward="logp", nll="cpo_alpha"),
    LossRow("orpo", "paired", _in("reference_free.odds_ratio"), "ORPO: likelihood plus beta x odds term, no reference",
            _BETA, reward="mean_logp", nll=1.0),
    LossRow("sft", "paired", _in("sft.nll_chosen"), "likelihood of the chosen side, per token", reward=None,
            covers=lambda row: row.completions[0].length, weighted=False),
    LossRow("divergence", "paired", _in("distillation.of_pair"), "divergence from the teacher on both sides, per token",
            covers=_tokens, **_KD),  # type: ignore[arg-type]

    LossRow("kto", "unpaired", _in("unpaired.kto"), "KTO with the reference point of the step", _WEIGHTS,
            step_inputs=("reference_point",), flat="ends"),
    LossRow("apo_zero_unpaired", "unpaired", _in("unpaired.apo_zero_unpaired"),
            "APO-zero: desirable up, undesirable down", _WEIGHTS, flat="ends"),
    LossRow("kto_no_reference_point", "unpaired", _in("unpaired.kto_no_reference_point"), "KTO with reference point 0",
            _WEIGHTS, flat="ends"),
    LossRow("bco", "unpaired", _in("unpaired.bco"), "BCO, shifted by the running mean of the rewards", _WEIGHTS,
            step_inputs=("shift",), flat="low"),
    LossRow("sft", "unpaired", _in("sft.nll_desirable"), "likelihood of desirable completions, per token", reward=None,
            covers=_tokens_if_desirable, weighted=False),
    LossRow("divergence", "unpaired", _in("distillation.of_completion"), "divergence from the teacher, per token",
            covers=_tokens, **_KD),  # type: ignore[arg-type]

    LossRow("sft", "single", _in("sft.nll"), "cross-entropy per supervised token", reward=None, covers=_tokens,
            weighted=False),
    LossRow("divergence", "single", _in("distillation.of_completion"), "divergence from the teacher, per token",
            covers=_tokens, **_KD),  # type: ignore[arg-type]
)

LOSSES: dict[View, dict[str, LossRow]] = {
    view: {row.name: row for row in _ROWS if row.view == view} for view in ("paired", "unpaired", "single")}
"""Losses by view and name."""
