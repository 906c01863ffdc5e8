"""From options to a method; combinations in which an option would do nothing are refused, naming both."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from tropism.data.audit.audit import class_weights
from tropism.data.formats import View
from tropism.errors import UsageError
from tropism.methods.method import Method, Term
from tropism.methods.table import LOSSES, LossRow

OPTIONS = tuple(dict.fromkeys(name for rows in LOSSES.values() for row in rows.values() for name in row.options))
"""Options that belong to a loss. One that is None has the default of each loss that takes it."""


DEFAULT_KD_WEIGHT = 0.5
"""`kd_weight` where none is given."""


def check_options(view: View, options: Mapping[str, Any]) -> None:
    """Every option that was given has an effect, and the losses go together.

    Args:
        view: of the method.
        options: all options of a run; None where nothing was given.

    Raises:
        UsageError: naming both options that do not go together.
    """
    rows = chosen_rows(view, options["loss"])
    weights_of(rows, options.get("loss_weights"))
    names = ", ".join(row.name for row in rows)
    taken = {name for row in rows for name in row.options}
    for name in OPTIONS:
        if options.get(name) is not None and name not in taken:
            raise UsageError(f"{name} has no effect on loss {names}; leave one of them out")
    preferences = [row for row in rows if row.reward is not None]
    if view != "single" and not preferences:
        raise UsageError(f"loss {names} holds no preference; that is `tropism sft`, or add a loss to it")
    link = options.get("f_divergence")
    without = [row.name for row in preferences if "f_divergence" not in row.options]
    if link not in (None, "reverse_kl") and without:
        raise UsageError(f"f_divergence {link} is not defined for loss {without[0]}")
    if options.get("f_alpha") is not None and link != "alpha":
        raise UsageError(f"f_alpha has no effect on f_divergence {link or 'reverse_kl'}")
    if any(row.name == "exo_pair" for row in rows) and options.get("label_smoothing") == 0:
        raise UsageError("label_smoothing 0 with loss exo_pair: its divergence is infinite there; it needs more than 0")
    free = [row.name for row in preferences if not row.needs_reference]
    if free and len(free) == len(preferences) and options.get("reference") is not None:
        raise UsageError(f"reference has no effect on loss {names}, which has no reference model")
    if options.get("ld_alpha") is not None and free:
        raise UsageError(f"ld_alpha is not defined for loss {free[0]}: it acts on log-ratios")
    rigid = [row.name for row in preferences if not row.weighted]
    if options.get("wpo") and rigid:
        raise UsageError(f"wpo is not defined for loss {rigid[0]}, which compares ranks and not pairs")
    _check_teacher(options)


def _check_teacher(options: Mapping[str, Any]) -> None:
    if options.get("teacher") is None:
        for name in ("kd_weight", "divergence", "divergence_mix", "temperature", "temperature_scaling", "top_k"):
            if options.get(name) is not None:
                raise UsageError(f"{name} has no effect without a teacher; name one with --teacher")
        return
    if options.get("temperature_scaling") is False and options.get("temperature") in (None, 1.0):
        raise UsageError("temperature_scaling has no effect on temperature 1; leave one of them out")
    divergence = options.get("divergence") or "forward_kl"
    if options.get("divergence_mix") is not None and divergence not in ("js", "skew"):
        raise UsageError(f"divergence_mix has no effect on divergence {divergence}")


def chosen_rows(view: View, names: str) -> list[LossRow]:
    """Rows of the table by their names, `NAME[,NAME...]`.

    Raises:
        UsageError: for an unknown name, or one named twice.
    """
    known = {name: row for name, row in LOSSES[view].items() if not row.needs_teacher}
    rows = []
    for name in names.split(","):
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1)
            raise UsageError(f"loss: {name!r} is not one of {', '.join(known)}"
                             + (f"; did you mean {close[0]}?" if close else ""))
        if known[name] in rows:
            raise UsageError(f"loss: {name} is named twice; give it a weight instead")
        rows.append(known[name])
    return rows


def weights_of(rows: Sequence[LossRow], weights: str | None) -> list[float]:
    """One weight per loss; all 1 by default.

    Raises:
        UsageError: if their numbers differ, or one is not a number above 0.
    """
    if weights is None:
        return [1.0] * len(rows)
    try:
        values = [float(weight) for weight in weights.split(",")]
    except ValueError:
        raise UsageError(f"loss_weights: {weights!r} is not a list of numbers such as 1,0.2") from None
    if len(values) != len(rows):
        raise UsageError(f"loss_weights: {len(values)} weights for {len(rows)} losses")
    if not all(0 < value < float("inf") for value in values):
        raise UsageError("loss_weights: each weight must be above 0")
    return values


def build_method(view: View, options: Mapping[str, Any], labels: Sequence[bool | None]) -> Method:
    """A method from the options of a run that `check_options` has accepted.

    Args:
        labels: of the training rows; `auto` weights come from their numbers.
    """
    rows = chosen_rows(view, options["loss"])
    values = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    if "auto" in (values.get("desirable_weight"), values.get("undesirable_weight")):
        desirable = sum(map(bool, labels))
        values["desirable_weight"], values["undesirable_weight"] = class_weights(
            desirable, len(labels) - desirable, values.get("desirable_weight", 1.0),
            values.get("undesirable_weight", 1.0))
    parts: list[tuple[LossRow, dict[str, Any], float]] = []
    for row, weight in zip(rows, weights_of(rows, options.get("loss_weights")), strict=True):
        taken = {name: values.get(name, default) for name, default in row.options.items()}
        parts.append((row, taken, weight))
        if row.nll is not None:
            factor = taken[row.nll] if isinstance(row.nll, str) else row.nll
            parts.append((LOSSES[view]["sft"], {}, weight * factor))
    if options.get("teacher") is not None:
        given = options.get("kd_weight")
        parts = _with_teacher(view, parts, DEFAULT_KD_WEIGHT if given is None else given)
    return Method(view, tuple(_terms(view, parts)), options.get("ld_alpha"), bool(options.get("wpo")))


def _with_teacher(view: View, parts: list[tuple[LossRow, dict[str, Any], float]],
                  weight: float) -> list[tuple[LossRow, dict[str, Any], float]]:
    """KD alone is (1 - weight) cross-entropy + weight x divergence; added to another method it is L + weight x D."""
    if view == "single":
        parts = [(row, taken, share * (1 - weight)) for row, taken, share in parts]
    return [*parts, (LOSSES[view]["divergence"], {}, weight)]


def _terms(view: View, parts: Sequence[tuple[LossRow, dict[str, Any], float]]) -> list[Term]:
    """Terms with the metric of each. A likelihood term that was named and also belongs to a loss is one term."""
    merged: dict[str, tuple[LossRow, dict[str, Any], float]] = {}
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


def describe(method: Method) -> str:
    """The losses with their readings, options and weights, as they are said at start."""
    said = []
    for term in method.terms:
        options = ", ".join(f"{name} {value:g}" if isinstance(value, float | int) else f"{name} {value}"
                            for name, value in term.options.items() if not _idle(name, term.options))
        factor = "" if term.weight == 1 and len(method.terms) == 1 else f"{term.weight:g} x "
        said.append(f"{factor}{term.row.name} ({term.row.reading})" + (f", {options}" if options else ""))
    if method.ld_alpha is not None:
        said.append(f"tokens beyond the shorter side count {method.ld_alpha:g} (LD-DPO)")
    if method.wpo:
        said.append("each pair weighed by the policy's confidence in it (WPO)")
    return "; ".join(said)


def effective(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that the losses filled in for options that were not given, where all of them agree."""
    filled: dict[str, Any] = {}
    for name in OPTIONS:
        values = {term.options[name] for term in method.terms if name in term.options
                  and not _idle(name, term.options)}
        if name in options and options[name] is None and len(values) == 1:
            filled |= {name: values.pop()}
    return filled


def _idle(name: str, options: Mapping[str, Any]) -> bool:
    """Options of the default link need not be read."""
    return ((name == "f_alpha" and options.get("f_divergence") != "alpha")
            or (name == "f_divergence" and options[name] == "reverse_kl"))
