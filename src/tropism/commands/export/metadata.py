"""The front matter of a model card: what the Hub reads about a model, in its own form."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from tropism.commands.export.read_run import Chosen, ExportedRun
from tropism.data.sources.resolve import hub_names
from tropism.model.source import public_name
from tropism.printable import one_line

_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_METRICS = {"rewards/auc": ("roc_auc", "AUC of the reward"),
            "rewards/accuracies": ("accuracy", "accuracy of the reward")}
"""Metrics of held-out rows with their type on the Hub. Others have none."""


def front_matter(run: ExportedRun, chosen: Chosen, facts: Mapping[str, Any], method: str, name: str) -> str:
    """The front matter as YAML, with a line end. It names only models and data sets on the Hub, and no license.

    Args:
        facts: the content of `export.json`.
        name: of the model.
    """
    adapter = bool(facts["adapter"]) and not facts["merged"]
    base = str(facts["base"]).partition("@")[0]
    named = not os.path.exists(base) and _HUB.fullmatch(base)
    relation = {"base_model_relation": "adapter" if adapter else "finetune"} if named else {}
    results = list(_results(run, chosen))
    data = ModelCardData(
        base_model=base if named else None, datasets=_datasets(run) or None,
        library_name="peft" if adapter else "transformers", pipeline_tag="text-generation",
        tags=["tropism", one_line(method), *(["lora"] if facts["adapter"] else [])],
        eval_results=results or None, model_name=(one_line(name) or "model") if results else None, **relation)
    return data.to_yaml() + "\n"


def _datasets(run: ExportedRun) -> list[str]:
    sources = [str(run.options[name]) for name in ("data", "eval_data") if run.options.get(name)]
    return list(dict.fromkeys(name for source in sources for name in hub_names(source)))


def _results(run: ExportedRun, chosen: Chosen) -> Iterator[EvalResult]:
    """The last evaluation of these weights, with its number of rows and its interval."""
    record: dict[str, Any] = next((one for one in reversed(run.records)
                                  if one.get("split") == "eval" and one.get("step") == chosen.step), {})
    source = str(run.options.get("eval_data") or run.options.get("data") or "the data")
    names = hub_names(source)
    shown = ", ".join(public_name(part.strip()) for part in source.split(","))
    rows = _rows(run)
    for key, (kind, title) in _METRICS.items():
        value = record.get(key)
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        interval = [round(float(bound), 4) for bound in (record.get(f"{key}_low"), record.get(f"{key}_high"))
                    if isinstance(bound, int | float) and math.isfinite(bound)]
        yield EvalResult(
            task_type="text-generation", dataset_type=names[0] if len(names) == 1 else "held-out",
            dataset_name=f"held-out rows of {one_line(shown)}", metric_type=kind,
            metric_name=f"{title} on held-out rows" + ("" if rows is None else f" (n = {rows})"),
            metric_value=round(float(value), 4),
            metric_args=({} if rows is None else {"rows": rows}) | (
                {"interval_95": interval} if len(interval) == 2 else {}) or None)


def _rows(run: ExportedRun) -> int | None:
    """Number of rows that an evaluation reads; None if the run does not tell."""
    rows, limit = (run.audit.get("split") or {}).get("eval"), run.options.get("eval_limit")
    if type(rows) is not int:
        return None
    return min(rows, limit) if type(limit) is int else rows
