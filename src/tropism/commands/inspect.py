"""`tropism inspect`: preview data as training will see it, with findings and sample rows token by token."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tropism.commands import files
from tropism.config import METHODS, InspectOptions
from tropism.data.audit.audit import Audit
from tropism.data.audit.findings import Finding, by_severity, histogram, leakage
from tropism.data.audit.layout_savings import layout_savings
from tropism.data.audit.template_findings import find_in_template
from tropism.data.formats import View
from tropism.data.read_rows import check_embedding, read_rows, view_of_source
from tropism.data.row_facts import first_of
from tropism.data.rows import EncodedRow
from tropism.data.sources.python_values import plain_records
from tropism.data.sources.resolve import DataSource, SplitChoice
from tropism.data.tokenization.chat_template import check_effect, make_renderer
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.tokenizer import Piece
from tropism.errors import DataError, ModelError, TropismError, count_of
from tropism.model import load
from tropism.model.config import check_rope
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.observe.page import render_page
from tropism.store import ROWS, tidy
from tropism.train.setup.data import limits

_STYLES = {"warning": "bold red", "notice": "yellow", "info": "cyan"}
_SHOWN = (64, 160)  # tokens of a prompt and of a completion that a terminal shows; the HTML page has all
_LISTED = 20  # dropped rows that are listed with their reasons


@dataclass(frozen=True)
class ShownRow:
    """A row as training sees it.

    Args:
        row: its token ids.
        prompt: tokens of its prompt.
        completions: tokens of each completion.
        supervised: the exact supervised text of each completion; one entry per contiguous span.
    """

    row: EncodedRow
    prompt: list[Piece]
    completions: list[list[Piece]]
    supervised: list[list[str]]

    def to_json(self) -> dict[str, Any]:
        """Token ids, their text and whether they are supervised."""
        return {"id": self.row.id, "place": self.row.place, "label": self.row.desirable,
                "notes": sorted(self.row.notes),
                "prompt": [{"id": piece.id, "text": piece.text} for piece in self.prompt],
                "completions": [{"supervised": texts, "tokens": [
                    {"id": piece.id, "text": piece.text, "supervised": piece.supervised} for piece in pieces]}
                    for pieces, texts in zip(self.completions, self.supervised, strict=True)]}


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection.

    Args:
        model: name of the model.
        view: what a row is.
        audit: of the training data.
        eval_audit: of the evaluation data, if there is any.
        findings: warnings first.
        shown: sample rows token by token.
        max_length: maximum tokens of a prompt with its completion.
    """

    model: str
    view: View
    audit: Audit
    eval_audit: Audit | None
    findings: list[Finding]
    shown: list[ShownRow]
    max_length: int

    @property
    def warnings(self) -> list[Finding]:
        """Findings that most likely spoil the result."""
        return [finding for finding in self.findings if finding.severity == "warning"]

    @property
    def lengths(self) -> dict[str, list[tuple[int, int, int]]]:
        """Histograms, as `findings.histogram` makes them."""
        facts = self.audit.facts
        return {"prompt tokens": histogram(facts.prompt_tokens),
                "completion tokens": histogram(facts.tokens[facts.tokens > 0])}

    def to_json(self) -> dict[str, Any]:
        """The content of `--json`: that of `audit.json` with more findings, and the sample rows."""
        report = {"model": self.model, "view": self.view, "max_length": self.max_length, "format": self.audit.format,
                  **self.audit.to_json(), "findings": [finding.to_json() for finding in self.findings],
                  "histograms": {name: [list(entry) for entry in bins] for name, bins in self.lengths.items()},
                  "shown": [row.to_json() for row in self.shown]}
        if self.eval_audit is not None:
            report["eval"] = self.eval_audit.to_json()
        return report

    def check(self) -> None:
        """Fail for `--strict` if there are warnings.

        Raises:
            TropismError: naming the warnings.
        """
        if self.warnings:
            raise TropismError(f"{self.audit.source}: {count_of(len(self.warnings), 'warning')} (--strict): "
                               + ", ".join(finding.name for finding in self.warnings))


def inspect(data: DataSource, options: InspectOptions, voice: Voice | None = None) -> Inspection:
    """Preview data as training will see it. Needs the model's tokenizer and config, not its weights.

    Args:
        data: a source as training takes it.
        options: model, method, limits, templates.
        voice: shows the progress of reading large data.

    Raises:
        DataError: for data that cannot be read.
        ModelError: for a model that cannot be trained.
        UsageError: for options that exclude each other or have no effect.
    """
    if not isinstance(data, str | Path | Mapping):
        data = list(plain_records(data))  # read more than once
    source = ModelSource.of(options.model)
    tokenizer = load.load_tokenizer(source, trust_remote_code=options.trust_remote_code)
    config = load.load_config(source, trust_remote_code=options.trust_remote_code)
    renderer = make_renderer(tokenizer, limits(options, config), options)
    view = METHODS[options.method].view if options.method else view_of_source(data, options)
    with (voice or Voice(loud=False)).bar("read") as report:
        read = partial(read_rows, renderer=renderer, view=view, workers=options.workers, options=options,
                       cache=options.store_root / ROWS, report=report)
        audit = read(data)
        eval_audit = None if options.eval_data is None else read(
            options.eval_data, split=SplitChoice(options.eval_split, "--eval-split", held_out=True))
    tidy(options.store_root, options.store_bytes)
    check_effect(options, renderer, audit.plain_rows + (eval_audit.plain_rows if eval_audit else 0))
    findings = audit.findings(renderer.text.decode)
    findings.append(layout_savings(audit.rows, options.batch_size))
    if eval_audit is not None:
        findings += leakage(audit.rows, eval_audit.rows)
    if renderer.saw_messages:
        findings += find_in_template(renderer)
    findings += _refused_by_the_model([audit.rows, eval_audit.rows if eval_audit else []], config, renderer)
    shown = [_shown(row, renderer) for row in _choose(audit, options.rows)]
    return Inspection(options.model, view, audit, eval_audit, by_severity(findings), shown,
                      renderer.limits.max_length)


def _refused_by_the_model(parts: Sequence[Sequence[EncodedRow]], config: Any, renderer: Renderer) -> list[Finding]:
    """Findings that would stop a run before its first step."""
    found = []
    try:
        for rows in parts:
            check_embedding(rows, config.get_text_config().vocab_size, renderer.text.tokenizer.convert_ids_to_tokens)
    except DataError as error:
        found.append(Finding("beyond_embedding", "warning", str(error)))
    try:
        check_rope(config, renderer.limits.max_length)
    except ModelError as error:
        found.append(Finding("positions", "warning", str(error)))
    return found


def _choose(audit: Audit, count: int) -> list[EncodedRow]:
    """Sample rows: the first of each label and of each note, then more in file order."""
    first = {*first_of(audit.facts.desirable).tolist(), *(int(rows[0]) for rows in audit.facts.notes.values())}
    order = dict.fromkeys([*sorted(first), *range(min(count, len(audit.rows)))])
    return [audit.rows[number] for number in sorted(list(order)[:count])]


def _shown(row: EncodedRow, renderer: Renderer) -> ShownRow:
    text, prompt = renderer.text, row.prompt_ids.tolist()
    sides, learned = [], []
    for completion in row.completions[:2]:
        ids, mask = completion.ids.tolist(), completion.loss_mask.tolist()
        sides.append(text.pieces(ids, prompt, mask))
        learned.append(text.supervised_text(prompt, ids, mask))
    return ShownRow(row, text.pieces(prompt), sides, learned)


# --- for a terminal ---------------------------------------------------------------------------------------------------


def show(inspection: Inspection, voice: Voice) -> None:
    """Print the result."""
    for audit, name in ((inspection.audit, "data"), (inspection.eval_audit, "eval data")):
        if audit is not None:
            voice.say(f"{name}: {audit.source}: {audit.summary()}")
            for line in audit.reading:
                voice.say(f"  {line}")
            for drop in audit.dropped[:_LISTED]:
                voice.say(f"  dropped: {drop.place}: {drop.reason}: {drop.detail}")
            if (more := sum(audit.reasons.values()) - _LISTED) > 0:
                voice.say(f"  and {more:,} more; --json lists the first 1,000 dropped rows")
    for finding in inspection.findings:
        voice.styled((f"{finding.severity:>7}", _STYLES[finding.severity]), (f": {finding.text}", ""),
                     kind="info" if finding.severity == "info" else "warning")
    for name, bins in inspection.lengths.items():
        voice.say(f"{name}:")
        most = max(count for *_, count in bins)
        for low, high, count in bins:
            voice.say(f"  {low:>6} - {high:<6} {'#' * max(round(40 * count / most), int(count > 0)):<40} {count}")
    for shown in inspection.shown:
        _show_row(shown, voice, color=voice.console.is_terminal and not voice.console.no_color)


def _show_row(shown: ShownRow, voice: Voice, *, color: bool) -> None:
    row = shown.row
    label = {True: ", desirable", False: ", undesirable", None: ""}[row.desirable]
    notes = f" ({', '.join(sorted(row.notes))})" if row.notes else ""
    named = row.place if row.id == row.place else f"{row.place}, id {row.id}"
    voice.say("", f"{named}{label}{notes}: prompt {count_of(len(row.prompt_ids), 'token')}")
    voice.styled(*_colored(shown.prompt, _SHOWN[0], color))
    names = ("chosen", "rejected") if len(shown.completions) == 2 else ("completion",)
    for name, pieces, texts in zip(names, shown.completions, shown.supervised, strict=True):
        learned = sum(piece.supervised for piece in pieces)
        voice.say(f"{name}: {count_of(len(pieces), 'token')}, {learned} supervised")
        voice.styled(*_colored(pieces, _SHOWN[1], color))
        voice.say(f"supervised text: {' ... '.join(json.dumps(text, ensure_ascii=False) for text in texts)}")


def _colored(pieces: Sequence[Piece], most: int, color: bool) -> list[tuple[str, str]]:
    """Tokens in order with their styles: supervised ones in green or, without color, in brackets. Long rows are cut in
    the middle."""
    parts = [("  ", "")]
    left_out = len(pieces) - most
    for number, piece in enumerate(pieces):
        if left_out > 0 and most // 2 <= number < most // 2 + left_out:
            if number == most // 2:
                parts.append((f" ... {left_out} tokens ... ", "dim"))
        elif color:  # neighbors differ, so that token borders are visible
            shade = ("black on green", "black on bright_green") if piece.supervised else ("dim", "default")
            parts.append((piece.visible, shade[number % 2]))
        else:
            parts.append((f"[{piece.visible}]" if piece.supervised else f"{piece.visible}|", ""))
    return parts


# --- files ------------------------------------------------------------------------------------------------------------


def write_json(inspection: Inspection, path: Path) -> None:
    """Write the result as JSON.

    Raises:
        OutputError: if it cannot be written.
    """
    files.write_json(path, inspection.to_json())


def write_html(inspection: Inspection, path: Path) -> None:
    """Write the result as one HTML page that needs no network.

    Raises:
        OutputError: if it cannot be written.
    """
    report = inspection.to_json()
    files.write_text(path, render_page("inspect.html.jinja", report=report, summary=inspection.audit.summary(), rows=[
        {"row": row, "prompt": [piece.visible for piece in shown.prompt],
         "completions": [[(piece.visible, piece.supervised) for piece in pieces] for pieces in shown.completions]}
        for row, shown in zip(report["shown"], inspection.shown, strict=True)]))
