"""Builds a method from options."""

from collections.abc import Mapping, Sequence
from typing import Any

from tropism.data.class_weights import class_weights
from tropism.data.rows import View
from tropism.data.schedule import STEP, MicroBatchRule
from tropism.errors import UsageError
from tropism.methods.loss_table import LOSSES, LossRow
from tropism.methods.method import Method, Term
from tropism.methods.options import OPTIONS, rows_of_losses, weights_of_losses

DEFAULT_KD_WEIGHT = 0.5
"""Default of `kd_weight`."""

WeightedLoss = tuple[LossRow, dict[str, Any], float]
"""A row of the table, the values of its options, and its weight."""


def build_method(view: View, options: Mapping[str, Any], labels: Sequence[bool | None],
                 weighted: bool = False) -> Method:
    """Build a method from options that `check_options` has accepted.

    Args:
        view: of the method.
        options: all options of a run.
        labels: of the training rows; `auto` class weights depend on their counts.
        weighted: a row has another weight than 1.

    Raises:
        UsageError: if the losses cannot be weighted.
    """
    rows = rows_of_losses(view, options["loss"])
    ranking = [row.name for row in rows if row.reward is not None and not row.weighted]
    if weighted and ranking:
        raise UsageError(f"the rows have weights, which are not defined for --loss {ranking[0]}: it compares ranks "
                         "instead of pairs. Choose another loss, or ignore the column: --columns unused=weight")
    values = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    if "auto" in (values.get("desirable_weight"), values.get("undesirable_weight")):
        desirable = sum(map(bool, labels))
        values["desirable_weight"], values["undesirable_weight"] = class_weights(
            desirable, len(labels) - desirable, values.get("desirable_weight", 1.0),
            values.get("undesirable_weight", 1.0))
    parts: list[WeightedLoss] = []
    for row, weight in zip(rows, weights_of_losses(rows, options.get("loss_weights")), strict=True):
        taken = {name: values.get(name, default) for name, default in row.options.items()}
        parts.append((row, taken, weight))
        if row.nll is not None:
            factor = taken[row.nll] if isinstance(row.nll, str) else row.nll
            parts.append((LOSSES[view]["sft"], {}, weight * factor))
    if options.get("teacher") is not None:
        given = options.get("kd_weight")
        parts = _with_teacher(view, parts, DEFAULT_KD_WEIGHT if given is None else given)
    return Method(view, tuple(_terms(view, parts)), options.get("ld_alpha"), bool(options.get("wpo")),
                  options.get("weight_divisor", "count") if weighted else "")


def _with_teacher(view: View, parts: list[WeightedLoss], weight: float) -> list[WeightedLoss]:
    """Add the divergence D: (1 - weight) cross-entropy + weight D for `tropism kd`, loss + weight D for others."""
    if view == "single":
        parts = [(row, taken, share * (1 - weight)) for row, taken, share in parts]
    return [*parts, (LOSSES[view]["divergence"], {}, weight)]


def _terms(view: View, parts: Sequence[WeightedLoss]) -> list[Term]:
    """Terms with their metrics. A likelihood that is named and also belongs to a loss is one term."""
    merged: dict[str, WeightedLoss] = {}
    for row, taken, weight in parts:
        before = merged[row.name][2] if row.name in merged else 0.0
        merged[row.name] = (row, taken, before + weight)
    only = len(merged) == 1 and all(weight == 1.0 for _, _, weight in merged.values())
    distilled = "divergence" in merged
    terms = []
    for name, (row, taken, weight) in merged.items():
        key = "loss" if only else f"loss/{name}"
        if distilled and name == "divergence":
            key = "kd/divergence"
        elif distilled and view == "single":
            key = "kd/ce"
        terms.append(Term(row, taken, weight, key))
    return terms


def describe_method(method: Method, rule: MicroBatchRule = STEP) -> str:
    """One line for the log: the losses with their readings, options and weights.

    Args:
        rule: of the steps.
    """
    parts = []
    for term in method.terms:
        options = ", ".join(f"{name} {value:g}" if isinstance(value, float | int) else f"{name} {value}"
                            for name, value in term.options.items() if not _unused(name, term.options))
        factor = "" if term.weight == 1 and len(method.terms) == 1 else f"{term.weight:g} x "
        reading = term.row.reading
        if rule.point != "step" and "reference_point" in term.row.step_inputs:
            reading = reading.replace("of the step", "of each micro-batch")
        parts.append(f"{factor}{term.row.name} ({reading})" + (f", {options}" if options else ""))
    if method.average:
        parts.append("log-probs are means per token")
    if method.ld_alpha is not None:
        parts.append(f"tokens beyond the length of the shorter side have weight {method.ld_alpha:g} (LD-DPO)")
    if method.wpo:
        parts.append("pairs are weighted by the policy's confidence (WPO)")
    if method.divisor:
        parts.append("rows are weighted" + (", divided by the sum of the weights" if method.divisor == "sum" else ""))
    return "; ".join(parts)


def effective(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the losses for options that were not given, if all losses agree on one."""
    filled: dict[str, Any] = {}
    for name in OPTIONS:
        values = {term.options[name] for term in method.terms if name in term.options
                  and not _unused(name, term.options)}
        if name in options and options[name] is None and len(values) == 1:
            filled |= {name: values.pop()}
    return filled


def _unused(name: str, options: Mapping[str, Any]) -> bool:
    """True for options of f-divergences that the default link does not use."""
    return ((name == "f_alpha" and options.get("f_divergence") != "alpha")
            or (name == "f_divergence" and options[name] == "reverse_kl"))
