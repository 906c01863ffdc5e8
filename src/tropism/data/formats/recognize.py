"""Which format a file is in, by the columns of its records."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.known_formats import FORMATS
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.plain_records import Format, Shape
from tropism.data.rows import RawRow, View
from tropism.errors import DataError

_PROBED = 1000  # records of each set of columns whose values are looked at

NATIVE: dict[View, tuple[View, ...]] = {
    "unpaired": ("unpaired", "paired"), "paired": ("paired", "unpaired"), "single": ("single", "unpaired")}
"""What rows of a wanted view can be made of, best first."""

_HELD: dict[View, str] = {"unpaired": "labeled completions", "paired": "pairs", "single": "completions to imitate"}


@dataclass(frozen=True, slots=True)
class Reading:
    """How the records of a file become rows.

    Args:
        format: the file's.
        shape: the columns by which it was known.
        wanted: what the method needs; the rows of the file are `shape.view`.
        options: what the user said.
    """

    format: Format
    shape: Shape
    wanted: View
    options: FormatOptions

    def __str__(self) -> str:
        """The sentence that says what was seen, and how to have it otherwise."""
        how = {("paired", "unpaired"): ", each pair as a desirable and an undesirable row",
               ("unpaired", "paired"): ", paired by prompt"}.get((self.shape.view, self.wanted), "")
        return f"read as {self.format.name} {self.shape}{how}; --format and --columns read it otherwise"


def renamed(rows: Sequence[RawRow], names: Mapping[str, str]) -> list[RawRow]:
    """Rows with renamed columns; one that had the new name before gives way.

    Args:
        rows: of a file.
        names: the new name of each column.
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
    """How to read a file for a method.

    Args:
        rows: of the file, columns renamed.
        wanted: what the method needs.
        source: name of the file, for errors.
        options: what the user said.

    Raises:
        DataError: if no format or several are possible, or what the user said has no effect.
    """
    options = options or FormatOptions()
    for view in NATIVE[wanted]:
        if view == "unpaired" and wanted == "paired" and not options.pair_by_prompt:
            continue
        claims = _claims(rows, view, options)
        if claims:
            known, shape = _decide(claims, source)
            reading = Reading(known, shape, wanted, options)
            _check_effect(reading, source)
            return reading
    raise DataError(_refusal(rows, wanted, source, options))


def view_of(rows: Sequence[RawRow], options: FormatOptions | None = None) -> View:
    """What a file holds, by its columns: pairs, labeled completions, or completions."""
    options = options or FormatOptions()
    if _claims(rows, "paired", options):
        return "paired"
    if _claims(rows, "unpaired", options):
        return "paired" if options.pair_by_prompt else "unpaired"
    return "single"


Claim = tuple[Format, Shape]


def _claims(rows: Iterable[RawRow], view: View, options: FormatOptions) -> list[Claim]:
    """Formats and shapes whose columns some rows have, and whose look at the values does not disagree."""
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
            # Who names a format is believed, but a rating means nothing without a threshold.
            forced = options.format is not None and known.name != "rating"
            if any(forced or known.fits(record, shape, options) for columns in having for record in probes[columns]):
                found[known, shape] = sum(sizes[columns] for columns in having)
    # A few odd rows do not decide for a whole file.
    return [claim for claim, count in found.items() if 2 * count >= max(found.values())]


def _decide(claims: list[Claim], source: str) -> Claim:
    """The claim with the most columns; among equals one that looked at values, then trl.

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
        raise DataError(f"{source}: its columns can be read as {readings}; say which with --format")
    return best[0]


def _check_effect(reading: Reading, source: str) -> None:
    """What the user said must change something.

    Raises:
        DataError: naming the option that does not.
    """
    options, view = reading.options, reading.shape.view
    name = reading.format.name
    if options.label_threshold is not None and not (
            name == "rating" or (name == "ultrafeedback" and view == "unpaired")):
        raise DataError(f"{source}: label_threshold has no effect on {name} {reading.shape}: it is for columns "
                        "'rating' and 'score' beside a completion")
    if options.pair_by_prompt and (view, reading.wanted) != ("unpaired", "paired"):
        raise DataError(f"{source}: pair_by_prompt has no effect: it makes pairs of labeled completions, and this is "
                        f"{name} {reading.shape} for a method that takes {_HELD[reading.wanted]}")


def _found(rows: Sequence[RawRow]) -> str:
    found: dict[str, None] = {}
    for row in rows[:1000]:
        found.update(dict.fromkeys(row.record))
    return ", ".join(found) or "none"


def _refusal(rows: Sequence[RawRow], wanted: View, source: str, options: FormatOptions) -> str:
    """Why no format fits, and what to do."""
    open_threshold = options.model_copy(update={"label_threshold": 0.0})
    if options.label_threshold is None and wanted != "single" and options.format in (None, "rating"):
        rated = [claim for claim in _claims(rows, "unpaired", open_threshold) if claim[0].name == "rating"]
        if rated and (wanted == "unpaired" or options.pair_by_prompt):
            column = rated[0][1].label
            return (f"{source}: '{column}' is a rating, not a label: say with --label-threshold NUMBER from where on a "
                    f"completion is desirable. Ratings: {_distribution(rows, column)}")
    known = FORMATS[options.format or "trl"]
    shapes = [shape for view in NATIVE[wanted][:1] for shape in known.shapes if shape.view == view]
    if options.format and not shapes:
        return (f"{source}: format {known.name} holds no {_HELD[wanted]}; it has the columns "
                f"{' or '.join(map(str, known.shapes))}")
    hint = ""
    plain = options.model_copy(update={"format": None})
    if wanted == "paired" and _claims(rows, "unpaired", plain):
        hint = (" These are single labeled completions: use `tropism kto`, or make pairs of those that answer one "
                "prompt with --pair-by-prompt.")
    elif wanted == "single" and _claims(rows, "paired", plain):
        hint = (" These are pairs: use `tropism dpo`, or imitate one side of them with --columns completion=chosen.")
    elif wanted == "unpaired" and _claims(rows, "single", plain):
        hint = " These are completions without labels: use `tropism sft`."
    needed = " or ".join(map(str, shapes))
    others = "" if options.format else "; rename them with --columns, as in --columns prompt=question"
    return f"{source}: no row has the columns {needed}, or those of another known format; found: {_found(rows)}" \
           f"{others}.{hint}"


def _distribution(rows: Sequence[RawRow], column: str) -> str:
    """`1: 20 rows, 2: 31 rows`; of many different ratings the quartiles."""
    values = sorted(fields.rating(row.record[column], column, row.place) for row in rows
                    if row.record.get(column) is not None)
    counts = Counter(values)
    if len(counts) <= 12:
        return ", ".join(f"{value:g}: {count} rows" for value, count in counts.items()) or "none"
    quartiles = [values[(len(values) - 1) * quarter // 4] for quarter in range(5)]
    return f"{len(values)} from {quartiles[0]:g} to {quartiles[4]:g}, quartiles " + ", ".join(
        f"{value:g}" for value in quartiles[1:4])
