"""What the report shows of a run, read from its directory alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute, parquet

from tropism.borders import border, read_mapping, read_object
from tropism.errors import DataError, UsageError, first_line
from tropism.observe.file_kinds import check_kind
from tropism.observe.log_files import read_log
from tropism.observe.manifest import read_manifest
from tropism.observe.metrics import BASELINES, is_known
from tropism.observe.rundir import MOVED, SAMPLES_DURING, SCORES, RunDirectory
from tropism.observe.verdict import NO_ROWS, Verdict, judge_ranking
from tropism.train.evaluation.row_files import SCHEMA

Array = npt.NDArray[np.float64]
_MOST_LINES = 2**24  # of the scores
_MOST_DURING = 8  # completions of a prompt in the course of training
_FACTS = ("method", "model", "status", "steps", "planned_steps", "seconds", "device", "device_name", "precision",
          "started", "reason", "error", "libraries", "python")


@dataclass(frozen=True)
class RunReport:
    """A run, as its directory tells of it.

    Args:
        path: the run directory.
        name: by which the page calls it.
        manifest: its facts.
        options: every option with its value.
        audit: the source of its data, and findings.
        records: of `metrics.jsonl`.
        samples, notices, moved: lines of these files.
        during: lines of `samples_during.jsonl`.
    """

    path: Path
    name: str
    manifest: dict[str, Any]
    options: dict[str, Any]
    audit: dict[str, Any]
    records: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    notices: list[dict[str, Any]]
    moved: list[dict[str, Any]]
    during: list[dict[str, Any]]

    def of(self, split: str) -> list[dict[str, Any]]:
        """Records of `train` or `eval`."""
        return [record for record in self.records if record["split"] == split]

    def series(self, split: str, key: str) -> tuple[Array, Array]:
        """Steps and values of a metric where it has a value."""
        found = [(record["step"], record[key]) for record in self.of(split) if record.get(key) is not None]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)

    @property
    def evaluator_metrics(self) -> list[str]:
        """Metrics of the evaluators of the run, without the ends of their intervals."""
        if not self.options.get("evaluator"):
            return []
        keys = dict.fromkeys(key for record in self.of("eval") for key in record if not is_known(key))
        return [key for key in keys if key not in ("step", "split") and not key.endswith(("_low", "_high"))]

    @property
    def sampled(self) -> list[dict[str, Any]]:
        """The sample prompts, each with its completions in order: `prompt`, `held_out`, and `shown` as (when, text). Of
        those in the course of training at most `_MOST_DURING`, at even distances."""
        found: dict[Any, dict[str, Any]] = {}
        for sample in [*self.samples, *self.during]:
            key = (sample.get("id"), sample["prompt"])
            one = found.setdefault(key, {"prompt": sample["prompt"], "held_out": sample["held_out"], "during": [],
                                         **{name: sample[name] for name in ("before", "after") if name in sample}})
            if "step" in sample and not ("after" in one and sample["step"] == self.manifest["steps"]):
                one["during"].append((f"after step {sample['step']}", sample["completion"]))
        for one in found.values():
            lines = one["during"]
            kept = [lines[number * len(lines) // _MOST_DURING] for number in range(_MOST_DURING)] if (
                len(lines) > _MOST_DURING) else lines
            one["shown"] = [*((name, one[name]) for name in ("before",) if name in one), *kept,
                            *((name, one[name]) for name in ("after",) if name in one)]
        return list(found.values())

    @property
    def ranking(self) -> str | None:
        """`rewards/auc` or `rewards/accuracies`, whichever the evaluations have."""
        return next((key for key in ("rewards/auc", "rewards/accuracies") if self.series("eval", key)[0].size), None)

    @property
    def baselines(self) -> dict[str, float]:
        """The baselines of the initial policy, by name."""
        last = self.of("eval")[-1] if self.of("eval") else {}
        return {key.removeprefix(BASELINES): value for key, value in last.items()
                if key.startswith(BASELINES) and value is not None}

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of a finished run; of another one what its evaluations say so far. None before the second."""
        evaluations = [{key: value for key, value in record.items() if value is not None and key != "split"}
                       for record in self.of("eval")]
        own = Verdict.read(self.manifest.get("verdict"))
        if own is not None or self.manifest.get("status") == "done":
            return own
        if not evaluations and "held_out_prompts" not in self.manifest and self.of("train"):
            return Verdict("none", NO_ROWS)
        if len(evaluations) < 2:
            return None
        return judge_ranking(evaluations[0], evaluations[-1], int(self.manifest.get("held_out_prompts", 0)))

    @cached_property
    def scores(self) -> dict[str, Any]:
        """Columns of the held-out completions in `scores.parquet`; empty if there are none.

        Raises:
            DataError: if the file is not one that a run writes.
        """
        file = self.path / SCORES
        check_kind(file)
        if not file.exists():
            return {}
        names = ("id", "place", "side", "label", "tokens", "logps_before", "logps_after", "reward_before",
                 "reward_after", "prompt_key", "completion_key")
        with border(f"{file}: cannot be read", DataError), parquet.ParquetFile(file) as opened:
            if opened.metadata.num_rows > _MOST_LINES:
                raise ValueError(f"it has more than {_MOST_LINES:,} lines")
            table = opened.read(columns=["split", *names])
            held_out = table.filter(compute.equal(table.column("split").cast("string"), "eval")).select(names)
            held_out = held_out.cast(pa.schema([SCHEMA.field(name) for name in names]))
            if any(held_out.column(name).null_count for name in ("tokens", "prompt_key", "completion_key")):
                raise ValueError("a length or a key is missing")
            found = held_out.to_pydict() if held_out.num_rows else {}
        if any(found.get("side", ())) and found["side"] != ["chosen", "rejected"] * (held_out.num_rows // 2):
            raise DataError(f"{file}: the two sides of a pair do not follow each other")
        return found

    @property
    def good(self) -> list[bool | None]:
        """Of each completion in `scores` whether it is chosen or desirable; None for one without a label."""
        return [side == "chosen" if side is not None else label
                for side, label in zip(self.scores.get("side", ()), self.scores.get("label", ()), strict=True)]


def read_run(path: Path, name: str) -> RunReport:
    """Read a run that is done, stopped or still going.

    Raises:
        UsageError: if the directory holds no run.
        DataError: with FILE:LINE, for a damaged file.
    """
    try:
        manifest = read_manifest(path / "manifest.json")
    except FileNotFoundError:
        raise UsageError(f"{path}: no run found: manifest.json is missing") from None
    except ValueError as error:
        raise UsageError(f"{path / 'manifest.json'}: {error}") from None
    return RunReport(path, name, {**dict.fromkeys(_FACTS), **manifest}, _options(path / "config.yaml"),
                     _audit(path / "audit.json"), RunDirectory(path).records(),
                     _lines(path / "samples.jsonl", {"prompt": str, "before": str, "after": str, "held_out": bool}),
                     _lines(path / "notices.jsonl", {"step": int, "text": str}),
                     _lines(path / MOVED, {"place": str, "change": (int, float), "prompt": str, "completion": str}),
                     _lines(path / SAMPLES_DURING, {"step": int, "prompt": str, "completion": str, "held_out": bool}))


def _lines(file: Path, kinds: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lines of a file that have at least these values."""
    check_kind(file)
    found = []
    for number, line in read_log(file):
        wrong = [name for name, kind in kinds.items() if not isinstance(line.get(name), kind)]
        if wrong:
            raise DataError(f"{file}:{number}: {', '.join(map(repr, wrong))} missing, or of another kind")
        found.append(line)
    return found


def _options(file: Path) -> dict[str, Any]:
    """Options by their flat names; empty if the file is absent."""
    if not file.is_file():
        return {}
    found: dict[str, Any] = {}
    for name, value in read_mapping(file)[0].items():
        found |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _audit(file: Path) -> dict[str, Any]:
    found = read_object(file, kind=DataError) if file.is_file() else {}
    findings = found.get("findings")
    return {"source": found.get("source"), "findings": [
        one for one in (findings if isinstance(findings, list) else [])
        if isinstance(one, dict) and {"severity", "text"} <= one.keys()]}


def plain(value: Any) -> str:
    """An option's value as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=first_line)
