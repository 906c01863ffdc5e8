"""Recognizes the format of a file by the columns of its records."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.context import CONTEXT_COLUMNS, context_columns
from tropism.data.formats.format import Format, Shape
from tropism.data.formats.json_text import decoded, json_columns
from tropism.data.formats.known_formats import FORMATS
from tropism.data.formats.options import FormatOptions
from tropism.data.rows import RawRow, View
from tropism.errors import DataError, count_of

_PROBED = 1000  # records of each set of columns whose values are checked

_MESSAGE_COLUMNS = {*CONTEXT_COLUMNS, *(name for known in FORMATS.values() for shape in known.shapes
                                        for name in shape.columns)}

NATIVE: dict[View, tuple[View, ...]] = {
    "unpaired": ("unpaired", "paired"), "paired": ("paired", "unpaired"), "single": ("single", "unpaired")}
"""Views from which rows of a wanted view can be made, best first."""

_CONTENT: dict[View, str] = {"unpaired": "labeled completions", "paired": "pairs",
                             "single": "completions without labels"}


@dataclass(frozen=True, slots=True)
class Reading:
    """How the records of a file become rows.

    Args:
        format: of the file.
        shape: columns by which it was recognized; `shape.view` is the view of the file.
        wanted: view that the method needs.
        options: as the user gave them.
        json_columns: columns whose messages are JSON text.
        beside: columns that add to the prompt what only messages have.
        chat: they are beside plain text, so the plain text of all rows becomes messages.
    """

    format: Format
    shape: Shape
    wanted: View
    options: FormatOptions
    json_columns: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    chat: bool = False

    def __str__(self) -> str:
        """One line for the log: the format, and the options that override it."""
        how = {("paired", "unpaired"): ", each pair as a desirable and an undesirable row",
               ("unpaired", "paired"): ", paired by prompt"}.get((self.shape.view, self.wanted), "")
        context = f", with {' and '.join(self.beside)}" if self.beside else ""
        return f"read as {self.format.name} {self.shape}{context}{how}; override with --format and --columns"


def renamed(rows: Sequence[RawRow], names: Mapping[str, str]) -> list[RawRow]:
    """Rows with renamed columns. A column that already has the new name is replaced.

    Args:
        rows: of a file.
        names: new name of each column.
    """
    if not names:
        return list(rows)
    found = []
    for row in rows:
        new = {names[key] for key in row.record if key in names}
        found.append(RawRow(row.place, {names.get(key, key): value for key, value in row.record.items()
                                        if key in names or key not in new}))
    return found


def recognize(rows: Sequence[RawRow], wanted: View, source: str, options: FormatOptions | None = None) -> Reading:
    """Decide how to read a file for a method.

    Args:
        rows: of the file, columns renamed.
        wanted: view that the method needs.
        source: name of the file, for errors.
        options: as the user gave them.

    Raises:
        DataError: if no format or several formats match, or an option has no effect.
    """
    options = options or FormatOptions()
    columns = json_columns(rows, _MESSAGE_COLUMNS)
    rows = [decoded(row, columns) for row in rows]
    for view in NATIVE[wanted]:
        if view == "unpaired" and wanted == "paired" and not options.pair_by_prompt:
            continue
        claims = _claims(rows, view, options)
        if claims:
            known, shape = _decide(claims, source)
            beside = {name: None for row in rows for name in context_columns(row.record)}
            chat = any(context_columns(row.record) for row in rows
                       if all(isinstance(row.record.get(name), str) for name in (shape.prompt, *shape.completions)))
            reading = Reading(known, shape, wanted, options, columns, tuple(beside), chat)
            _check_effect(reading, source)
            return reading
    raise DataError(_refusal(rows, wanted, source, options))


def view_of(rows: Sequence[RawRow], options: FormatOptions | None = None) -> View:
    """The view of a file by its columns: pairs, labeled completions, or completions."""
    options = options or FormatOptions()
    columns = json_columns(rows, _MESSAGE_COLUMNS)
    rows = [decoded(row, columns) for row in rows]
    if _claims(rows, "paired", options):
        return "paired"
    if _claims(rows, "unpaired", options):
        return "paired" if options.pair_by_prompt else "unpaired"
    return "single"


Claim = tuple[Format, Shape]


def _claims(rows: Iterable[RawRow], view: View, options: FormatOptions) -> list[Claim]:
    """Formats and shapes whose columns some rows have and whose check of the values passes."""
    probes: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    sizes: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        columns = tuple(row.record)
        sizes[columns] += 1
        seen = probes.setdefault(columns, [])
        if len(seen) < _PROBED:
            seen.append(row.record)
    formats = list(FORMATS.values()) if options.format is None else [FORMATS[options.format]]
    found: dict[Claim, int] = {}
    for known in formats:
        for shape in known.shapes:
            if shape.view != view:
                continue
            having = [columns for columns in probes if set(shape.columns) <= set(columns)]
            # A format that the user names is not checked, except that ratings need a threshold.
            forced = options.format is not None and known.name != "rating"
            if any(forced or known.matches(record, shape, options) for columns in having for record in probes[columns]):
                found[known, shape] = sum(sizes[columns] for columns in having)
    # A few odd rows do not decide the format of the file.
    return [claim for claim, count in found.items() if 2 * count >= max(found.values())]


def _decide(claims: list[Claim], source: str) -> Claim:
    """The claim with the most columns; among equals one that checked values, then trl.

    Raises:
        DataError: if that leaves several formats.
    """
    best = [claim for claim in claims
            if not any(set(claim[1].columns) < set(other.columns) for _, other in claims)]
    best = [claim for claim in best if claim[0].decisive] or best
    best = [claim for claim in best if claim[0].name == "trl"] or best
    names = {known.name: shape for known, shape in reversed(best)}
    if len(names) > 1:
        readings = " or ".join(f"{name} {shape}" for name, shape in reversed(names.items()))
        raise DataError(f"{source}: the columns match several formats: {readings}. Choose one with --format.")
    return best[0]


def _check_effect(reading: Reading, source: str) -> None:
    """Check that the user's options have an effect.

    Raises:
        DataError: naming the option that has none.
    """
    options, view = reading.options, reading.shape.view
    name = reading.format.name
    if options.label_threshold is not None and not (
            name == "rating" or (name == "ultrafeedback" and view == "unpaired")):
        raise DataError(f"{source}: --label-threshold has no effect on {name} {reading.shape}. It applies to the "
                        "columns 'rating' and 'score' of a completion.")
    if options.pair_by_prompt and (view, reading.wanted) != ("unpaired", "paired"):
        raise DataError(f"{source}: --pair-by-prompt has no effect. It pairs labeled completions, but the file is "
                        f"{name} {reading.shape} and the method takes {_CONTENT[reading.wanted]}.")


def _columns_of(rows: Sequence[RawRow]) -> str:
    found: dict[str, None] = {}
    for row in rows[:1000]:
        found.update(dict.fromkeys(row.record))
    return ", ".join(found) or "none"


def _refusal(rows: Sequence[RawRow], wanted: View, source: str, options: FormatOptions) -> str:
    """The error message if no format matches."""
    open_threshold = options.model_copy(update={"label_threshold": 0.0})
    if options.label_threshold is None and wanted != "single" and options.format in (None, "rating"):
        rated = [claim for claim in _claims(rows, "unpaired", open_threshold) if claim[0].name == "rating"]
        if rated and (wanted == "unpaired" or options.pair_by_prompt):
            column = rated[0][1].label
            return (f"{source}: '{column}' is a rating, not a label. Set the lowest desirable rating with "
                    f"--label-threshold NUMBER. Ratings: {_distribution(rows, column)}")
    known = FORMATS[options.format or "trl"]
    shapes = [shape for view in NATIVE[wanted][:1] for shape in known.shapes if shape.view == view]
    if options.format and not shapes:
        return (f"{source}: format {known.name} does not contain {_CONTENT[wanted]}. Its columns are "
                f"{' or '.join(map(str, known.shapes))}")
    hint = ""
    plain = options.model_copy(update={"format": None})
    if wanted == "paired" and _claims(rows, "unpaired", plain):
        hint = (" The file has labeled completions: use `tropism kto`, or pair those of the same prompt with "
                "--pair-by-prompt.")
    elif wanted == "single" and (pairs := _claims(rows, "paired", plain)):
        chosen = ("train on the chosen side with --columns completion=chosen"
                  if any("chosen" in shape.completions for _, shape in pairs)
                  else "write the chosen sides with `tropism convert --to single`")
        hint = f" The file has pairs: use `tropism dpo`, or {chosen}."
    elif wanted == "unpaired" and _claims(rows, "single", plain):
        hint = " The file has completions without labels: use `tropism sft`."
    needed = " or ".join(map(str, shapes))
    other, rename = ("", "") if options.format else (
        ", or those of another supported format", " Rename columns with --columns, as in --columns prompt=question.")
    return f"{source}: no row has the columns {needed}{other}. Found: {_columns_of(rows)}.{hint}{rename}"


def _distribution(rows: Sequence[RawRow], column: str) -> str:
    """`1: 20 rows, 2: 31 rows`; the quartiles for more than 12 different ratings."""
    values = sorted(fields.rating(row.record[column], column, row.place) for row in rows
                    if row.record.get(column) is not None)
    counts = Counter(values)
    if len(counts) <= 12:
        return ", ".join(f"{value:g}: {count_of(count, 'row')}" for value, count in counts.items()) or "none"
    quartiles = [values[(len(values) - 1) * quarter // 4] for quarter in range(5)]
    return f"{len(values)} rows, from {quartiles[0]:g} to {quartiles[4]:g}, quartiles " + ", ".join(
        f"{value:g}" for value in quartiles[1:4])
