"""The model card: facts from the run's own files. It claims nothing that was not measured."""

import math
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jinja2

from tropism.commands.export import serving
from tropism.commands.export.metadata import front_matter
from tropism.commands.export.read_run import Chosen, ExportedRun
from tropism.config import METHODS
from tropism.data.options import DataOptions
from tropism.model.source import public_name
from tropism.observe.metrics import BOOKKEEPING
from tropism.printable import escaped, one_line
from tropism.train.options import RunOptions, StoreOptions

METHOD_NAMES = {
    "kto": "KTO (Kahneman-Tversky optimization, on single labeled completions)",
    "dpo": "DPO (direct preference optimization, on pairs of completions)",
    "sft": "SFT (supervised fine-tuning, on completions to imitate)",
    "kd": "KD (knowledge distillation from a teacher)",
}
_TRAINING = {"epochs": "epochs", "batch_size": "batch size", "learning_rate": "learning rate (peak)",
             "schedule": "schedule", "warmup_ratio": "warm-up ratio", "optimizer": "optimizer",
             "weight_decay": "weight decay", "max_grad_norm": "gradient norm clipped to", "seed": "seed"}


def render(run: ExportedRun, chosen: Chosen, facts: Mapping[str, Any], name: str, adapter_config: Any = None) -> str:
    """The card as Markdown with the hub's front matter.

    Args:
        facts: the content of `export.json`.
        name: name of the model.
        adapter_config: peft's config of a trained adapter.
    """
    adapter = bool(facts["adapter"]) and not facts["merged"]
    options = {key: _shown(key, value) for key, value in run.options.items() if value is not None}
    method = str(run.manifest.get("method") or options.get("method"))
    known = METHODS.get(method)
    shared = {*RunOptions.model_fields, *DataOptions.model_fields, *StoreOptions.model_fields, "method",
              "allow_reference_mismatch"}
    own = [key for key in (known.model_fields if known else ()) if key in options and key not in shared]
    if not options.get("teacher"):  # without one none of these has an effect
        own = [key for key in own if key not in ("kd_weight", "divergence", "divergence_mix", "temperature",
                                                 "temperature_scaling", "top_k")]
    measured, columns, figures = _measured(run, chosen)
    served = serving.Serving(**facts.get("serving", {}))
    environment = jinja2.Environment(  # our own template writes Markdown, not HTML
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, finalize=_text,
        undefined=jinja2.StrictUndefined, autoescape=False)  # noqa: S701
    environment.filters |= {"code": _code, "literal": _literal, "figure": _figure}
    source = resources.files("tropism.commands.export") / "card.md.jinja"
    template = environment.from_string(source.read_text("utf-8"))
    return template.render(
        front_matter=_Markdown(front_matter(run, chosen, facts, method, name)), name=name,
        directory=name, base=facts["base"], method=METHOD_NAMES.get(method, method), loss=options.get("loss"),
        what=_what(adapter, bool(facts["merged"]), options),
        versions={"tropism": "", **run.manifest.get("libraries", {})},
        checkpoint=chosen.trainer is not None, step=chosen.step, best=chosen.best, planned=_planned(run),
        adapter=adapter, dtype=facts["dtype"], rounding=facts["rounding"],
        stops=list(facts["stop_tokens"].items()), checked=served.checked,
        commands=[(called, _Markdown(line)) for called, line in serving.commands(
            run, facts, name, adapter_config, served)],
        remarks=serving.remarks(run, facts, adapter_config, served),
        training=_training(run, chosen, options), options=[(key, options[key]) for key in own],
        lora=_lora(run, adapter_config),
        data=_data(run), measured=measured, columns=columns, figures=figures,
        fingerprints=list(facts["fingerprints"].items()))


def _shown(key: str, value: Any) -> Any:
    """The value of an option, without the directories of a file or model that it names."""
    named = key in ("adapter", "chat_template", "teacher", "reference")
    return public_name(value) if named and isinstance(value, str) and "\n" not in value else value


def _lora(run: ExportedRun, config: Any | None) -> list[tuple[str, Any]]:
    """Options of the adapter, with rank and scale from its own config, and what it started from."""
    if config is None:
        return []
    rows = {**run.lora, "rank": config.r, "alpha": config.lora_alpha, "dora": config.use_dora,
            "rslora": config.use_rslora}
    if not run.lora:  # then its model is, or contains, the adapter that it started from
        rows |= {"adapter": public_name(run.base), "quantize": (run.options.get("lora") or {}).get("quantize")}
    return [(key, _shown(key, value)) for key, value in rows.items() if value not in (None, False)]


def _what(adapter: bool, merged: bool, options: Mapping[str, Any]) -> str:
    if adapter:
        return "An adapter of a causal language model."
    if not merged:
        return "A causal language model."
    quantized = (options.get("lora") or {}).get("quantize")
    return "A causal language model: its base with the trained adapter merged into the weights" + (
        f" (the adapter was trained on the base quantized to {quantized}, and merged into the unquantized base)."
        if quantized else ".")


def _planned(run: ExportedRun) -> int | None:
    found = run.manifest.get("planned_steps")
    return None if found is None else int(found)


def _training(run: ExportedRun, chosen: Chosen, options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    manifest = run.manifest
    device = str(manifest.get("device", "?")) + (f" ({manifest['device_name']})" if "device_name" in manifest else "")
    rows: list[tuple[str, Any]] = [("optimizer steps", chosen.step)]
    given = manifest.get("given") or {}
    left_out = {"epochs"} if "max_steps" in options else set()
    if "optimizer" in given:  # it has its own rate and decay, and perhaps a scheduler
        left_out |= {"learning_rate", "schedule", "warmup_ratio", "optimizer", "weight_decay"}
    rows += [(called, options[key]) for key, called in _TRAINING.items() if key in options and key not in left_out]
    rows += [(name, f"{kind}, passed in Python") for name, kind in given.items()]
    rows += [("precision", manifest.get("precision", options.get("precision", "?"))),
             ("layout", manifest.get("layout", "?")),
             ("device", f"{manifest.get('world_size', 1)} x {device}")]
    if chosen.trainer is None and "seconds" in manifest:
        rows.append(("wall time", f"{float(manifest['seconds']):.0f} s"))
    rows.append(("run status", manifest.get("status", "?")))
    if "python" in manifest:
        rows.append(("Python", manifest["python"]))
    versions = manifest.get("libraries", {})
    rows.append(("libraries", ", ".join(f"{name} {version}" for name, version in versions.items()) or "?"))
    return rows


def _data(run: ExportedRun) -> list[dict[str, Any]]:
    found = []
    for title, audit in (("Training data", run.audit), ("Evaluation data", run.audit.get("eval"))):
        if not audit:
            continue
        rows = audit.get("rows") or {}
        facts: list[tuple[str, Any]] = [("rows read", rows.get("read", "?")), ("rows kept", rows.get("kept", "?"))]
        dropped = rows.get("dropped") or {}
        facts.append(("rows dropped", ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or 0))
        facts += [(called, rows[key]) for key, called in (("prompt_cut", "prompts truncated"),
                                                          ("completion_cut", "completions truncated")) if rows.get(key)]
        facts += [(f"labeled {label}", count) for label, count in (audit.get("labels") or {}).items()]
        facts += [(called, audit[key]) for key, called in (("prompts", "distinct prompts"),
                                                           ("duplicates", "duplicate rows"),
                                                           ("conflicts", "conflicting labels")) if key in audit]
        if split := audit.get("split"):
            facts += [("rows trained on", split.get("train", "?")), ("rows held out", split.get("eval", "?"))]
            if split.get("prompts_on_both_sides"):
                facts.append(("held-out prompts that were also trained on", split["prompts_on_both_sides"]))
        facts += [(f"commit of {name.partition('@')[0]}", commit)
                  for name, commit in (audit.get("commits") or {}).items()]
        source = ", ".join(public_name(part.strip()) for part in str(audit.get("source", "?")).split(","))
        found.append({"title": title, "source": source, "facts": facts})
    return found


def _measured(run: ExportedRun, chosen: Chosen) -> tuple[str, tuple[str, str], list[tuple[str, str, str]]]:
    """The run's own evaluations, before training and of these weights."""
    nothing = ("", "")
    evaluations = [record for record in run.records if record.get("split") == "eval"]
    if not evaluations:
        return "No rows were held out, so the model was not evaluated on rows that it was not trained on.", nothing, []
    first: dict[str, Any] = next((record for record in evaluations if record["step"] == 0), {})
    last: dict[str, Any] = next((record for record in reversed(evaluations) if record["step"] == chosen.step), {})
    if not last:
        when = ", ".join(str(record["step"]) for record in evaluations)
        return (f"These weights, after step {chosen.step}, were not evaluated. The run evaluated after steps "
                f"{when}.", nothing, [])
    leave_out = {*BOOKKEEPING, "step", "split"}
    keys = [key for key in last if key not in leave_out and not key.endswith(("_low", "_high"))]
    rows = (run.audit.get("split") or {}).get("eval", "the")
    limit = run.options.get("eval_limit")
    held = f"{rows} held-out rows" + (f" (at most {limit} of them evaluated)" if limit else "")
    return (f"Evaluated by the run on {held}, before training and after step {chosen.step}:",
            ("before", "after"), [(key, _interval(first, key), _interval(last, key)) for key in keys])


def _interval(record: Mapping[str, Any], key: str) -> str:
    if key not in record:
        return "-"
    low, high = record.get(f"{key}_low"), record.get(f"{key}_high")
    return _figure(record[key]) + ("" if low is None or high is None else f" [{_figure(low)}, {_figure(high)}]")


def _figure(value: Any) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    text = f"{value:.4f}"
    return text if float(text) else f"{0:.4f}"  # no minus before a zero


# --- text in Markdown -------------------------------------------------------------------------------------------------


class _Markdown(str):
    """Text that is Markdown already. All other values of the template are plain text."""

    __slots__ = ()


_MARKUP = re.compile(r"[\\`*|~$@]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])|:(?=//|[\w+-]+:)|(?<=www)\.")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def _text(value: Any) -> str:
    """A value as one line of plain text, in which Markdown, HTML and links have no effect."""
    if isinstance(value, _Markdown):
        return value
    plain = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    marked = _MARKUP.sub(r"\\\g<0>", one_line(plain))
    return _Markdown(re.sub("[&<>]", lambda found: _ENTITIES[found[0]], marked))


def _code(value: Any) -> str:
    """A value as code."""
    plain = one_line(str(value))
    if plain and plain == plain.strip() and not set(plain) & set("`|<>&"):
        return _Markdown(f"`{plain}`")
    return _Markdown(f"<code>{_text(plain)}</code>")  # a span of backticks cannot hold it everywhere


def _literal(value: str) -> str:
    """A text as Python writes it, without a character that HTML knows."""
    plain = escaped(value.replace("\\", r"\\").replace('"', r"\""))
    return _Markdown('"' + plain.replace("<", r"\x3c").replace("&", r"\x26") + '"')
