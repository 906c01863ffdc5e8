"""Builds a method from options, and rejects options that have no effect."""

from collections.abc import Mapping, Sequence
from typing import Any

from tropism.data.class_weights import class_weights
from tropism.data.rows import View
from tropism.errors import UsageError, count_of, did_you_mean
from tropism.methods.loss_table import LOSSES, LossRow
from tropism.methods.method import Method, Term

OPTIONS = tuple(dict.fromkeys(name for rows in LOSSES.values() for row in rows.values() for name in row.options))
"""Options of losses. None stands for the default of each loss that has the option."""

DEFAULT_KD_WEIGHT = 0.5
"""Default of `kd_weight`."""

WeightedLoss = tuple[LossRow, dict[str, Any], float]
"""A row of the table, the values of its options, and its weight."""


def check_options(view: View, options: Mapping[str, Any]) -> None:
    """Check that every given option has an effect and that the losses can be combined.

    Args:
        view: of the method.
        options: all options of a run; None for those that were not given.

    Raises:
        UsageError: naming both options that cannot be combined.
    """
    rows = rows_of_losses(view, options["loss"])
    weights_of_losses(rows, options.get("loss_weights"))
    names = ",".join(row.name for row in rows)
    taken = {name for row in rows for name in row.options}
    for name in OPTIONS:
        if options.get(name) is not None and name not in taken:
            raise UsageError(f"{_flag(name)} has no effect on --loss {names}. Remove one of them.")
    preferences = [row for row in rows if row.reward is not None]
    if view != "single" and not preferences:
        raise UsageError(f"--loss {names} uses no preferences. Use `tropism sft`, or add a preference loss.")
    link = options.get("f_divergence")
    without = [row.name for row in preferences if "f_divergence" not in row.options]
    if link not in (None, "reverse_kl") and without:
        raise UsageError(f"--f-divergence {link} is not defined for --loss {without[0]}. Remove one of them.")
    if options.get("f_alpha") is not None and link != "alpha":
        raise UsageError(f"--f-alpha has no effect on --f-divergence {link or 'reverse_kl'}. Set --f-divergence alpha.")
    if any(row.name == "exo_pair" for row in rows) and options.get("label_smoothing") == 0:
        raise UsageError("--label-smoothing 0 is invalid for --loss exo_pair, whose divergence is then infinite. Set "
                         "it above 0.")
    reference_free = [row.name for row in preferences if not row.needs_reference]
    if reference_free and len(reference_free) == len(preferences) and options.get("reference") is not None:
        raise UsageError(f"--reference has no effect on --loss {names}, which uses no reference model")
    if options.get("ld_alpha") is not None and reference_free:
        raise UsageError(f"--ld-alpha is not defined for --loss {reference_free[0]}, which has no log-ratios")
    unweighted = [row.name for row in preferences if not row.weighted]
    if options.get("wpo") and unweighted:
        raise UsageError(f"--wpo is not defined for --loss {unweighted[0]}, which compares ranks instead of pairs")
    _check_teacher(options)


def _check_teacher(options: Mapping[str, Any]) -> None:
    if options.get("teacher") is None:
        for name in ("kd_weight", "divergence", "divergence_mix", "temperature", "temperature_scaling", "top_k"):
            if options.get(name) is not None:
                raise UsageError(f"{_flag(name)} has no effect without --teacher")
        return
    if options.get("temperature_scaling") is False and options.get("temperature") in (None, 1.0):
        raise UsageError("--temperature-scaling has no effect on --temperature 1. Remove one of them.")
    divergence = options.get("divergence") or "forward_kl"
    if options.get("divergence_mix") is not None and divergence not in ("js", "skew"):
        raise UsageError(f"--divergence-mix has no effect on --divergence {divergence}. It applies to js and skew.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def rows_of_losses(view: View, names: str) -> list[LossRow]:
    """Rows of the table for `NAME[,NAME...]`.

    Raises:
        UsageError: for an unknown name, or one that is named twice.
    """
    known = {name: row for name, row in LOSSES[view].items() if not row.needs_teacher}
    rows = []
    for name in names.split(","):
        if name not in known:
            raise UsageError(f"{name!r} is not a known loss. {did_you_mean(name, known)}")
        if known[name] in rows:
            raise UsageError(f"{name} is named twice. Set its weight with --loss-weights instead.")
        rows.append(known[name])
    return rows


def weights_of_losses(rows: Sequence[LossRow], weights: str | None) -> list[float]:
    """One weight per loss; 1 by default.

    Raises:
        UsageError: if the numbers of weights and losses differ, or a weight is not a number above 0.
    """
    if weights is None:
        return [1.0] * len(rows)
    try:
        values = [float(weight) for weight in weights.split(",")]
    except ValueError:
        raise UsageError(f"--loss-weights {weights!r} is not a list of numbers such as 1,0.2") from None
    if len(values) != len(rows):
        raise UsageError(f"--loss-weights: {count_of(len(values), 'weight')} for "
                         f"{count_of(len(rows), 'loss', 'losses')}")
    if not all(0 < value < float("inf") for value in values):
        raise UsageError("--loss-weights: each weight must be above 0")
    return values


def build_method(view: View, options: Mapping[str, Any], labels: Sequence[bool | None],
                 weighted: bool = False) -> Method:
    """Build a method from options that `check_options` has accepted.

    Args:
        view: of the method.
        options: all options of a run.
        labels: of the training rows; `auto` class weights depend on their counts.
        weighted: a row has another weight than 1.

    Raises:
        UsageError: if the weights of rows do not fit the options.
    """
    rows = rows_of_losses(view, options["loss"])
    ranking = [row.name for row in rows if row.reward is not None and not row.weighted]
    if weighted and ranking:
        raise UsageError(f"the rows have weights, which are not defined for --loss {ranking[0]}: it compares ranks "
                         "instead of pairs. Choose another loss, or ignore the column: --columns unused=weight")
    divisor = options.get("weight_divisor", "count")
    if divisor != "count" and not weighted:
        raise UsageError(f"--weight-divisor {divisor} has no effect, because no row has a weight other than 1. Remove "
                         "it, or add a column 'weight'.")
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
                  divisor if weighted else "")


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


def describe_method(method: Method) -> str:
    """One line for the log: the losses with their readings, options and weights."""
    parts = []
    for term in method.terms:
        options = ", ".join(f"{name} {value:g}" if isinstance(value, float | int) else f"{name} {value}"
                            for name, value in term.options.items() if not _unused(name, term.options))
        factor = "" if term.weight == 1 and len(method.terms) == 1 else f"{term.weight:g} x "
        parts.append(f"{factor}{term.row.name} ({term.row.reading})" + (f", {options}" if options else ""))
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
