"""Looks at a model and data: how long the rows are before truncation, and whether the chat template applies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tropism.config import MethodOptions
from tropism.data.audit.audit import Audit
from tropism.data.read_rows import read_rows
from tropism.data.row_blocks import RowTable
from tropism.data.row_facts import Integers
from tropism.data.rows import EncodedRow
from tropism.data.tokenization.chat_template import make_renderer
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import ModelError
from tropism.model import load
from tropism.model.config import max_positions
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.store import ROWS

_NO_LIMIT = 2**31 - 1
_TEMPLATES = ("chatml", "llama3", "gemma", "phi3", "plain")
"""Built-in templates in the order in which they are tried. The last one needs no control tokens."""


@dataclass(frozen=True)
class Look:
    """What a model and data are like.

    Args:
        audit: of all rows, none of them truncated.
        positions: tokens that all models of the run have positions for; None without a limit.
        template: values of `as_messages` and `chat_template` that the rows need; empty if they need none.
        has_template: the tokenizer has a chat template of its own.
    """

    audit: Audit
    positions: int | None
    template: dict[str, Any]
    has_template: bool

    @property
    def lengths(self) -> Integers:
        """`[n]` tokens of each row: of its prompt and its longest completion."""
        facts = self.audit.facts
        return facts.prompt_tokens + facts.tokens.max(axis=1)

    def rows_within(self, tokens: int) -> Sequence[EncodedRow]:
        """The rows of at most so many tokens."""
        kept = np.flatnonzero(self.lengths <= tokens)
        rows = self.audit.rows
        return rows.take(kept) if isinstance(rows, RowTable) else [rows[number] for number in kept.tolist()]


def look(options: MethodOptions, voice: Voice) -> Look:
    """Read the data with the tokenizer of the model. Weights are not read.

    Args:
        options: as the user gave them, and defaults.

    Raises:
        TropismError: for a model or data that training would refuse too.
    """
    names = [options.model, options.values.get("reference"), options.values.get("teacher")]
    sources = [ModelSource.of(name) for name in names if name not in (None, "live")]
    remote = options.trust_remote_code
    known = [positions for source in sources
             if (positions := max_positions(load.load_config(source, trust_remote_code=remote))) is not None]

    def read(**template: Any) -> tuple[Audit, bool]:
        tokenizer = load.load_tokenizer(sources[0], trust_remote_code=remote)
        own = bool(tokenizer.chat_template)
        renderer = make_renderer(tokenizer, Limits(_NO_LIMIT), options.model_copy(update=template))
        return _read(options, renderer, voice), own

    template: dict[str, Any] = {}
    try:
        audit, own = read()
    except ModelError:
        template = _template_for(options, sources[0])
        if not template:
            raise
        audit, own = read(**template)
    if audit.plain_rows and own and not (options.as_messages or options.plain_text):
        template = {"as_messages": True}
        audit, own = read(**template)
    return Look(audit, min(known, default=None), template, own)


def _read(options: MethodOptions, renderer: Renderer, voice: Voice) -> Audit:
    with voice.bar("read") as report:
        return read_rows(options.data, renderer, options.view, workers=options.workers, options=options,
                         cache=options.store_root / ROWS, most=options.most_rows, report=report)


def _template_for(options: MethodOptions, source: ModelSource) -> dict[str, Any]:
    """A built-in chat template that the tokenizer has the tokens for, if it has no template of its own."""
    tokenizer = load.load_tokenizer(source, trust_remote_code=options.trust_remote_code)
    if tokenizer.chat_template or options.chat_template is not None:
        return {}
    for name in _TEMPLATES:
        try:
            make_renderer(tokenizer, Limits(_NO_LIMIT), options.model_copy(update={"chat_template": name}))
        except ModelError:
            continue
        return {"chat_template": name}
    return {}
