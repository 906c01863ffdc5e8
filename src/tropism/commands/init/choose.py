"""Chooses the options of a run for a model and data, each with its reason."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tropism.commands.init import published
from tropism.commands.init.look import Look, look
from tropism.config import METHODS, MethodOptions
from tropism.data.audit.findings import Finding, percent
from tropism.data.audit.layout_savings import layout_savings
from tropism.data.row_facts import facts_of
from tropism.data.split import split_by_prompt
from tropism.errors import DataError, ModelError, UsageError, count_of
from tropism.observe.console import Voice
from tropism.observe.rundir import free_name
from tropism.observe.verdict import FEWEST_PROMPTS
from tropism.train.planning.choose import gib
from tropism.train.setup.data import check_classes, labels_of
from tropism.train.setup.run_plan import Plan, Prepared, duration

_USUAL = 2048
"""Tokens of a row up to which every row is kept whole without a thought."""
_ROUNDED = 64
_HELD_OUT, _MOST_HELD_OUT, _ENOUGH_HELD_OUT = 0.1, 0.5, 200
_FAIR = (1.0, 1.5)
"""Weighted ratio of the classes that the KTO paper recommends."""
_LD_ALPHA = 0.5
_RANK = 16
_TOP_K = 64
_LONG_S = 3600.0
GIVEN = "given"


@dataclass
class Initial:
    """The options of a run, with their reasons.

    Args:
        method: that they are for.
        values: options by name, those of groups as `group.name`, in the order of the file.
        reasons: of each value.
        about: lines about the data and the prediction.
        findings: about the data under these options, warnings first; without those that need no action.
        fits: the run is predicted to fit into memory.
    """

    method: str
    values: dict[str, Any]
    reasons: dict[str, str]
    about: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    fits: bool = True

    def set(self, name: str, value: Any, why: str) -> None:
        """Choose an option that the user did not give."""
        if name not in self.values:
            self.values[name], self.reasons[name] = value, why

    def options(self) -> MethodOptions:
        """The options, checked in combination."""
        cls = METHODS[self.method]
        return cls.model_validate(cls.nested(self.values))


def init(options: MethodOptions, given: Collection[str], device: str | None, voice: Voice) -> Initial:
    """Choose the options of a run.

    Args:
        options: those that the user gave, and defaults.
        given: names of the options that the user gave, those of groups as `group.name`.
        device: name of a device to plan for; None for this machine.

    Raises:
        TropismError: for a model or data that training would refuse too.
    """
    flat = options.flattened(options.model_dump())
    order = sorted(given, key=lambda name: ("model", "teacher", "data", "output").index(name)
                   if name in ("model", "teacher", "data", "output") else 9)
    found = Initial(options.method, {name: flat[name] for name in order if name != "trust_remote_code"},
                    dict.fromkeys(given, GIVEN))
    found.set("output", str(free_name(Path("runs") / f"{options.method}-{_stem(options.data)}")),
              "run directory: new or empty")
    seen = look(options, voice)
    rows = _lengths(found, seen)
    _template(found, seen)
    train = _held_out(found, rows)
    if options.view == "unpaired":
        _balance(found, train)
    _steps(found, train)
    prepared = _prepared(found, options, device)
    _memory(found, prepared)
    found.findings = [finding for finding in (*prepared.inputs.data.audit.findings(), *prepared.inputs.data.of_template)
                      if finding.severity != "info" and finding.name != "left_out"]
    data = prepared.inputs.data
    found.about.insert(0, f"data: {data.audit.summary()}; {count_of(len(data.train), 'training row')}, "
                       f"{len(data.evaluation):,} held out; {data.audit.format}")
    return found


def _stem(data: str) -> str:
    name = data.split(",")[0].strip().rstrip("/").rpartition("/")[2].partition(".")[0]
    return re.sub(r"[^\w-]+", "-", name).strip("-")[:60] or "data"


def _lengths(found: Initial, seen: Look) -> Any:
    """Choose the length limit; return the rows that it leaves."""
    lengths, positions = seen.lengths, seen.positions
    longest, usual = int(lengths.max()), int(np.percentile(lengths, 99, method="higher"))
    wanted = longest if longest <= max(_USUAL, usual) else max(_USUAL, usual)
    limit = min(-(-wanted // _ROUNDED) * _ROUNDED, positions or wanted + _ROUNDED)
    if (given := found.values.get("max_length")) is not None:
        limit = int(given)
    p50 = int(np.median(lengths))
    found.set("max_length", limit, f"tokens of prompt and completion: the rows have {p50:,} (median), {usual:,} (99%) "
              f"and {longest:,} (longest)" + (f", the model has {positions:,} positions" if positions else ""))
    over = int((lengths > limit).sum())
    if not over:
        return seen.audit.rows
    share = f"{count_of(over, 'row')} ({percent(over / len(lengths))}) {'are' if over > 1 else 'is'} longer"
    kept = seen.rows_within(limit)
    if 2 * len(kept) >= len(lengths) and _both_classes(found.method, kept):
        found.set("overlong", "drop", f"{share}; a truncated completion does not teach the model to stop")
    else:
        found.set("overlong", "truncate", f"{share}, too many to drop: they lose text. A model with more positions, or "
                  "shorter rows, would learn from all of it")
    return kept if found.values["overlong"] == "drop" else seen.audit.rows


def _both_classes(method: str, rows: Any) -> bool:
    if METHODS[method].view != "unpaired":
        return len(rows) > 0
    return len({*labels_of(rows)}) > 1


def _template(found: Initial, seen: Look) -> None:
    for name, value in seen.template.items():
        found.set(name, value, {
            "as_messages": "the rows are plain text and the model has a chat template: it is trained as it will be "
                           "asked",
            "chat_template": "the rows are conversations and the tokenizer has no chat template of its own"}[name])


def _held_out(found: Initial, rows: Any) -> Any:
    """Choose the share of prompts to hold out; return the training rows."""
    if "eval_data" in found.values:
        return rows
    if "eval_fraction" in found.values:
        return split_by_prompt(rows, found.values["eval_fraction"])[0] if found.values["eval_fraction"] else rows
    facts = facts_of(rows)
    prompts = min(len(np.unique(facts.split)), int(facts.prompt_numbers.max()) + 1)
    least = math.ceil(100 * FEWEST_PROMPTS / prompts) / 100
    fraction = min(max(_HELD_OUT, least), _MOST_HELD_OUT) if prompts >= 2 * FEWEST_PROMPTS else 2 * _HELD_OUT
    if fraction * prompts > _ENOUGH_HELD_OUT:
        fraction = max(math.ceil(1000 * _ENOUGH_HELD_OUT / prompts) / 1000, 0.001)
    try:
        train, held = split_by_prompt(rows, fraction)
        if METHODS[found.method].view == "unpaired":
            check_classes(train, found.values["data"])
    except (UsageError, DataError):
        if METHODS[found.method].view == "unpaired":
            check_classes(rows, found.values["data"])
        found.set("eval_fraction", 0.0, "no prompt can be held out: too few prompts, or too few rows of a class. "
                  "Without held-out rows there is no verdict")
        return rows
    count = min(len(np.unique(facts_of(held).split)), int(facts_of(held).prompt_numbers.max()) + 1)
    enough = (f"the verdict needs {FEWEST_PROMPTS}" if count >= FEWEST_PROMPTS else
              f"fewer than the {FEWEST_PROMPTS} that a verdict needs, since more would take most of the data")
    found.set("eval_fraction", fraction, f"holds out {count_of(count, 'prompt')} of {prompts:,}: {enough}")
    return train


def _balance(found: Initial, rows: Any) -> None:
    good = sum(map(bool, labels_of(rows)))
    bad = len(rows) - good
    ratio = good / bad if bad else math.inf
    names = ("desirable_weight", "undesirable_weight")
    if any(name in found.values for name in names):
        return
    text = f"{good:,} desirable and {bad:,} undesirable training rows"
    if _FAIR[0] <= ratio <= _FAIR[1]:
        found.about.append(f"balance: {text}, within the ratio of 1 to 1.5 that the KTO paper recommends: weights 1")
        return
    for name in names:
        found.set(name, "auto", f"{text}: weights that balance the classes")


def _steps(found: Initial, rows: Any) -> None:
    """Choose batch size, grouping and epochs."""
    size = published.batch_size(len(rows))
    found.set("batch_size", size, f"rows per optimizer step, for {count_of(len(rows), 'training row')}: at most 32, "
              "and about 20 steps or more in each pass")
    size = int(found.values["batch_size"])
    saving = layout_savings(rows, size)
    most = int(np.bincount(facts_of(rows).prompt_numbers).max())
    if saving.severity == "notice" and 2 * most <= size:
        flat, trees, grouped = (int(saving.figures[f"{name}_tokens"]) for name in ("flat", "tree", "grouped"))
        found.set("group_prompts", True, f"prompts repeat: computes {grouped:,} tokens per pass instead of {trees:,} "
                  f"(of {flat:,})")
    if "max_steps" in found.values:
        return
    steps = math.ceil(len(rows) / size)
    count = published.epochs(found.method, steps)
    found.set("epochs", count, f"passes over the data: about {count_of(count * steps, 'optimizer step')}")


def _prepared(found: Initial, options: MethodOptions, device: str | None) -> Prepared:
    """The run as it would start, with the options that answer findings."""
    def of() -> Prepared:
        trusted = found.options().model_copy(update={"trust_remote_code": options.trust_remote_code})
        return Prepared.of(trusted, device, Voice(loud=False))

    prepared = of()
    length = next((finding for finding in prepared.inputs.data.audit.findings()
                   if finding.name == "length" and finding.severity == "warning"), None)
    if length is not None and getattr(options, "loss", "") == "sigmoid" and "ld_alpha" not in found.values:
        good, bad, share = (length.figures[name] for name in ("mean_good", "mean_bad", "auc"))
        found.set("ld_alpha", _LD_ALPHA,
                  f"chosen completions have {good:.0f} tokens on average, rejected ones {bad:.0f}, and length alone "
                  f"tells them apart (accuracy {share:.2f}). LD-DPO halves the weight of the tokens by which one is "
                  "longer")
        prepared = of()
    return prepared


def _memory(found: Initial, prepared: Prepared) -> None:
    """Choose what is trained, and how the frozen part is held, by the plan."""
    policy = prepared.inputs.policy
    weights = sum(weight.numel() for weight in policy.skeleton(prepared.inputs.numerics).parameters())
    steps = prepared.inputs.schedule.total_steps
    plan, chosen = (None, {}) if (little := prepared.needs_little()) else _first_that_fits(found, prepared)
    reasons = {"lora.rank": "training all weights does not fit: an adapter does",
               "lora.quantize": "holds the frozen weights in 4 bits, which fits. It needs pip install 'tropism[quant]'",
               "top_k": "stores the teacher's most likely tokens, since policy and teacher do not fit together"}
    if plan is None:
        found.about.append(f"memory: {'the model needs little' if little else 'cannot be predicted for this model'}; "
                           f"{count_of(steps, 'optimizer step')}")
    else:
        found.fits = plan.choice.fits
        if not found.fits:
            reasons["lora.rank"] = "training all weights does not fit, and an adapter needs least"
        components = sum(plan.choice.components.values())
        found.about += [f"device: {plan.device}, {gib(plan.memory_bytes)}; predicted peak {gib(components)}"
                        + ("" if found.fits else ", which does not fit"),
                        f"time: {plan.seconds_per_step:.2g} s per step, {duration(plan.seconds)} for {plan.steps:,} "
                        "steps, without evaluations"]
    for name, value in chosen.items():
        found.set(name, value, reasons[name])
    adapter = policy.adapts or "lora.rank" in found.values
    rate = published.rate(found.method, weights, adapter)
    found.set("learning_rate", rate.value, rate.why)
    if plan is not None and plan.seconds > _LONG_S:
        found.set("save_every", "30min", "the run is long: `tropism resume` continues it from a checkpoint")


def _first_that_fits(found: Initial, prepared: Prepared) -> tuple[Plan | None, dict[str, Any]]:
    """The plan of the first way to train that fits, or of the last; None if the model cannot be planned."""
    policy, options = prepared.inputs.policy, prepared.inputs.options
    plan, chosen = None, {}
    teacher = [{"top_k": _TOP_K}] if found.method == "kd" and getattr(options, "top_k", None) is None else []
    ways: list[dict[str, Any]] = [{}, *teacher]
    small = teacher[0] if teacher else {}
    if policy.directory is None and not policy.held:
        if not policy.adapts:
            ways.append({**small, "lora.rank": _RANK})
        if options.lora.quantize is None and prepared.device.kind == "cuda":
            ways.append({**ways[-1], "lora.quantize": "nf4"})
    for chosen in ways:
        flat = options.flattened(options.model_dump()) | chosen
        try:
            plan = prepared.under(type(options).model_validate(options.nested(flat))).plan()
        except ModelError:
            return None, {}
        if plan.choice.fits:
            break
    return plan, chosen


__all__ = ["Initial", "init"]
