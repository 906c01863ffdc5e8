"""The results of a sweep side by side."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tropism.commands.sweep.plan import Run
from tropism.commands.sweep.processes import Outcome
from tropism.errors import TropismError, count_of
from tropism.files import write_whole
from tropism.observe.console import Voice
from tropism.report.held_out import HeldOut, held_out
from tropism.report.read import RunReport, read_run

TABLE = "sweep.jsonl"
_NAMES = {"rewards/auc": "reward AUC", "rewards/accuracies": "reward accuracy", "nll/token": "NLL per token"}


@dataclass(frozen=True)
class Line:
    """One run.

    Args:
        values: of the options that vary.
        outcome: of the run.
        read: the run, if it is done and can be read.
    """

    run: Run
    values: dict[str, Any]
    outcome: Outcome
    read: RunReport | None

    def last(self, key: str) -> float | None:
        """The last value of a metric, of the held-out rows where they have it."""
        for split in ("eval", "train") if self.read is not None else ():
            assert self.read is not None
            values = self.read.series(split, key)[1]
            if len(values):
                return float(values[-1])
        return None


@dataclass(frozen=True)
class Table:
    """All runs of a sweep.

    Args:
        lines: one for each run.
        compared: those that are compared.
        metric: of the compared runs, in this order; None if they have no rows in common.
    """

    lines: list[Line]
    compared: list[Line]
    metric: HeldOut | None

    @property
    def best(self) -> Line | None:
        """The best of several runs."""
        return self.compared[self.metric.best] if self.metric and len(self.compared) > 1 else None

    def figures(self, line: Line) -> dict[str, float]:
        """The metric of a run with its interval, and the difference to the best with its paired interval."""
        if self.metric is None or line not in self.compared:
            return {}
        number = self.compared.index(line)
        low, high = self.metric.interval(number)
        found = {"value": self.metric.values[number], "low": low, "high": high}
        if self.best not in (None, line):
            difference = self.metric.difference(number, self.metric.best)
            found |= dict(zip(("difference", "difference_low", "difference_high"), difference, strict=True))
        return found


def table_of(runs: Sequence[Run], outcomes: Mapping[str, Outcome], swept: Sequence[str]) -> Table:
    """The results of runs, from their directories. A run whose files are damaged counts as failed."""
    lines = []
    for run in runs:
        outcome, read = outcomes.get(run.name, Outcome("not run")), None
        if outcome.status == "done":
            try:
                read = read_run(run.path, run.name)
                read.scores  # noqa: B018 (reads the file)
            except TropismError as error:
                outcome, read = Outcome("failed", str(error)), None
        lines.append(Line(run, run.values(swept), outcome, read))
    compared = [line for line in lines if line.read is not None and line.read.scores]
    return Table(lines, compared, held_out([line.read for line in compared if line.read]) if compared else None)


def write(table: Table, directory: Path) -> None:
    """Write `sweep.jsonl`: a line for each run.

    Raises:
        OutputError: if the disk refuses.
    """
    text = "".join(json.dumps(_record(table, line), ensure_ascii=False, allow_nan=False) + "\n" for line in table.lines)
    write_whole(directory / TABLE, text.encode(errors="backslashreplace"))


def _record(table: Table, line: Line) -> dict[str, Any]:
    found: dict[str, Any] = {"run": line.run.name, **line.values, "status": line.outcome.status}
    if line.outcome.error:
        found["error"] = line.outcome.error
    if line.read is None:
        return found
    verdict = line.read.verdict
    figures = {name: value for name, value in table.figures(line).items() if math.isfinite(value)}
    metric = {"metric": table.metric.key, "rows": table.metric.rows} if table.metric and figures else {}
    return {**found, "verdict": verdict.word if verdict else None, **metric, **figures,
            **{key: line.last(key) for key in ("kl", "kl/raw", "loss")},
            **{name: line.read.manifest[name] for name in ("steps", "seconds")}}


def show(table: Table, directory: Path, voice: Voice) -> None:
    """Print the table, what it says and what it does not, and the next commands."""
    metric, best = table.metric, table.best
    columns = ["run", "verdict"]
    title = count_of(len(table.lines), "run")
    if metric is not None:
        title += f", {count_of(metric.rows, 'held-out row')} (95% intervals in brackets)"
        columns += [_NAMES[metric.key], *(["minus best"] if best else [])]
    columns += [*(["KL"] if _has_kl(table) else []), "loss", "time"]
    voice.say("")
    voice.table(title, tuple(columns), [_row(table, line) for line in table.lines])
    if metric is not None and not metric.all_rows:
        voice.warn("the runs held out different rows. The table compares them on the rows that all of them have.")
    if metric is None and len(table.compared) > 1:
        voice.warn("the runs have no held-out rows in common, so they cannot be compared. Hold out the same rows with "
                   "--eval-data FILE.")
    for line in table.lines:
        if line.outcome.error:
            voice.warn(f"{line.run.name} {line.outcome.status}: {line.outcome.error}",
                       "warning" if line.outcome.status == "failed" else "note")
    if best is not None:
        _show_best(table, best, voice)
    if any(line.read for line in table.lines):
        voice.say("next:", f"  tropism report {shlex.quote(str(directory))}")
        if best is not None:
            run = shlex.quote(str(best.run.path))
            voice.say(f"  tropism evaluate {run} --data OTHER_ROWS", f"  tropism export {run} --to DIR")


def _show_best(table: Table, best: Line, voice: Voice) -> None:
    """What the largest value of several does not show."""
    assert table.metric is not None
    number, name = len(table.compared), _NAMES[table.metric.key]
    unclear = sum(found["difference_low"] <= 0 <= found["difference_high"] for line in table.compared
                  if "difference" in (found := table.figures(line)))
    voice.say(f"best: {best.run.name}")
    voice.warn(f"this is the best of {number} runs on the rows that chose it, so its {name} and its interval are "
               "optimistic. Evaluate it on other rows before you rely on it.")
    if unclear:
        few = f"{unclear} of the {number - 1} other runs cannot" if unclear < number - 1 else "no other run can"
        voice.warn(f"{few} be told from the best: the interval of the difference contains 0.")


def _row(table: Table, line: Line) -> tuple[str, ...]:
    if line.read is None:
        return (line.run.name, line.outcome.status,
                *["-"] * (2 + _has_kl(table) + (table.metric is not None) + (table.best is not None)))
    verdict, figures, cells = line.read.verdict, table.figures(line), []
    if table.metric is not None:
        cells.append(f"{figures['value']:.3f} [{figures['low']:.3f}, {figures['high']:.3f}]" if figures else "-")
    if table.best is not None:
        cells.append("0 (best)" if line is table.best else "-" if not figures else
                     f"{figures['difference']:+.3f} [{figures['difference_low']:+.3f}, "
                     f"{figures['difference_high']:+.3f}]")
    if _has_kl(table):
        kl, raw = line.last("kl"), line.last("kl/raw")
        cells.append(_number(kl, ".3g") + (f" (raw {raw:.3g})" if raw is not None and raw != kl else ""))
    return (line.run.name, verdict.word if verdict else "-", *cells, _number(line.last("loss"), ".4f"),
            f"{line.read.manifest['seconds']:.0f} s")


def _has_kl(table: Table) -> bool:
    return any(line.last("kl") is not None for line in table.lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
