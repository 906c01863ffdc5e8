"""A source to encoded rows and their audit."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tropism.data.audit import Audit
from tropism.data.formats import Reading, View, pair_by_prompt, recognise, understand, view_of
from tropism.data.formats.recognise import renamed
from tropism.data.options import FormatOptions
from tropism.data.render import Renderer
from tropism.data.rows import Dropped, EncodedRow, RawRow, Row
from tropism.data.sources import Source, open_source
from tropism.errors import DataError


def load_rows(
    source: Source, renderer: Renderer, view: View, *,
    strict: bool = False, workers: int = 0, options: FormatOptions | None = None,
) -> Audit:
    """Read, understand, render and truncate every row of a source.

    Args:
        source: files as `sources.open_source` takes them, or rows as dicts.
        renderer: turns rows into ids.
        view: the shape that the method needs.
        strict: a row that would be left out stops the run instead.
        workers: threads that render; the order of rows does not depend on it.
        options: how the records are to be understood.

    Returns:
        the audit; its `format` is the sentence that says how the records were read.

    Raises:
        DataError: on an unreadable row, a bad label, missing or ambiguous columns, or if no row is left.
    """
    options = options or FormatOptions()
    parts = _parts(source, options)
    name = ", ".join(dict.fromkeys(part for part, _ in parts))
    audit = Audit(source=str(source) if isinstance(source, str | Path) else "rows given in Python",
                  read=sum(len(raw) for _, raw in parts))
    readings = [(recognise(raw, view, part, options), raw) for part, raw in parts]
    audit.format = "; ".join(dict.fromkeys(str(reading) for reading, _ in readings))
    known = [row for reading, raw in readings for row in _rows(raw, reading)]
    if options.pair_by_prompt:
        known = pair_by_prompt(known)

    def encode(row: Row | Dropped) -> EncodedRow | Dropped:
        return row if isinstance(row, Dropped) else renderer.encode(row)

    if workers:
        with ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(encode, known))
    else:
        results = [encode(row) for row in known]
    for result in results:
        if isinstance(result, Dropped):
            if strict:
                raise DataError(f"{result.place}: {result.reason}: {result.detail} (--strict)")
            audit.dropped.append(result)
        else:
            audit.rows.append(result)
    if not audit.rows:
        raise DataError(f"{name}: no row is left to train on; {audit.summary()} "
                        f"(first: {audit.dropped[0].place}: {audit.dropped[0].detail})")
    return audit


def view_of_source(source: Source, options: FormatOptions | None = None) -> View:
    """What a source holds: pairs, labelled completions, or completions.

    Raises:
        DataError: if it cannot be read.
    """
    options = options or FormatOptions()
    return view_of([row for _, raw in _parts(source, options) for row in raw], options)


def _parts(source: Source, options: FormatOptions) -> list[tuple[str, list[RawRow]]]:
    """Names and rows of the parts of a source, columns renamed; each part has a format of its own."""
    parts = [(part.name, list(part.read())) for part in open_source(source)]
    for part, raw in parts:
        if not raw:
            raise DataError(f"{part}: no rows")
    for column in options.renames:
        if not any(column in row.record for _, raw in parts for row in raw):
            found = dict.fromkeys(key for _, raw in parts for row in raw[:1000] for key in row.record)
            raise DataError(f"{parts[0][0]}: no row has the column '{column}' that --columns names; found: "
                            f"{', '.join(found) or 'none'}")
    return [(part, renamed(raw, options.renames)) for part, raw in parts]


def _rows(raw: Iterable[RawRow], reading: Reading) -> Iterator[Row | Dropped]:
    """The rows of records, in file order.

    Of two neighbouring pairs that are split, the first gives its desirable side first and the second its undesirable
    one: in file order no class comes in runs, and as partners for the reference point, which are taken from the next
    prompt, both classes serve.
    """
    split = reading.shape.view == "paired" and reading.wanted == "unpaired"
    for number, record in enumerate(raw):
        rows = understand(record, reading)
        yield from reversed(rows) if split and number % 2 else rows


def check_embedding(rows: Iterable[EncodedRow], embedding_rows: int, spell: Any) -> None:
    """Every id must have an embedding.

    Raises:
        DataError: naming the first token that has none, and its row.
    """
    for row in rows:
        partner = () if row.partner is None else (row.partner,)
        for ids in (row.prompt_ids, *(completion.ids for completion in (*row.completions, *partner))):
            if len(ids) and int(ids.max()) >= embedding_rows:
                bad = int(ids.max())
                raise DataError(f"{row.place}: token {spell(bad)!r} has id {bad}, but the model embeds only "
                                f"{embedding_rows} tokens; tokenizer and model do not belong together")
