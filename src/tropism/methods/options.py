"""Checks the options of losses, and rejects those that have no effect. Without torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tropism.data.rows import View
from tropism.errors import UsageError, count_of, did_you_mean
from tropism.methods.loss_table import LOSSES, LossRow

OPTIONS = tuple(dict.fromkeys(name for rows in LOSSES.values() for row in rows.values() for name in row.options))
"""Options of losses. None stands for the default of each loss that has the option."""


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
            hint = _of_other_methods(view, name, known) or did_you_mean(name, known)
            raise UsageError(f"{name!r} is not a known loss. {hint}")
        if known[name] in rows:
            raise UsageError(f"{name} is named twice. Set its weight with --loss-weights instead.")
        rows.append(known[name])
    return rows


def _of_other_methods(view: View, name: str, known: Iterable[str]) -> str:
    """Which command has a loss that this one does not have; empty if none has it."""
    if name == "kto_pair" or (name == "kto" and view == "paired"):
        return "KTO learns from labels. `tropism convert --to unpaired` makes them from pairs, for `tropism kto`."
    if view == "unpaired" and name in LOSSES["paired"]:
        return f"It is a loss of `tropism dpo`, which learns from pairs. `tropism kto` has {', '.join(known)}."
    if view == "paired" and name in LOSSES["unpaired"]:
        return f"It is a loss of `tropism kto`, which learns from labels. `tropism dpo` has {', '.join(known)}."
    return ""


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
