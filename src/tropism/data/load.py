"""A source to encoded rows and their audit."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tropism.data import sources
from tropism.data.audit import Audit
from tropism.data.formats import View, check_columns, understand
from tropism.data.render import Renderer
from tropism.data.rows import Dropped, EncodedRow, RawRow
from tropism.errors import DataError


def load_rows(
    source: str | Path | Iterable[dict[str, Any]], renderer: Renderer, view: View, *,
    strict: bool = False, workers: int = 0,
) -> Audit:
    """Read, understand, render and truncate every row of a source.

    Args:
        source: a file, or rows as dicts.
        renderer: turns rows into ids.
        view: the shape that the method needs.
        strict: a row that would be left out stops the run instead.
        workers: threads that render; the order of rows does not depend on it.

    Raises:
        DataError: on an unreadable row, a bad label, missing columns, or if no row is left.
    """
    name = Path(source).name if isinstance(source, str | Path) else "data"
    raw = list(sources.read(source))
    audit = Audit(source=str(source) if isinstance(source, str | Path) else "rows given in Python", read=len(raw))
    if not raw:
        raise DataError(f"{name}: no rows")
    check_columns(raw, view, name)

    def encode(row: RawRow) -> EncodedRow | Dropped:
        known = understand(row, view)
        return known if isinstance(known, Dropped) else renderer.encode(known)

    if workers:
        with ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(encode, raw))
    else:
        results = [encode(row) for row in raw]
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
