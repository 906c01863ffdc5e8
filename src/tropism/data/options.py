"""Options of reading and scheduling data."""


from pydantic import Field

from tropism.data.formats.options import FormatOptions
from tropism.data.tokenization.chat_template import TemplateOptions
from tropism.data.tokenization.truncate import LengthOptions


class DataOptions(FormatOptions, TemplateOptions, LengthOptions):
    """What to train on."""

    data: str
    """Training rows: files (JSON, JSONL, Parquet, Arrow, CSV or TSV, also .gz and .zst), a directory of them, or the
    name of a dataset on the hub; several with commas, and `:2` or `:0.5` behind one for twice or half of it."""
    eval_data: str | None = None
    """Held-out rows, in files of their own."""
    eval_fraction: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the prompts to hold out for evaluation, at least one; no prompt is on both sides."""
    shuffle: bool = True
    """Permute the rows afresh in every epoch; false keeps file order."""
    group_prompts: bool = False
    """Permute prompts instead of rows, and keep all rows of a prompt in one step."""
    strict: bool = False
    """Stop where a row would be left out, or where policy and reference differ before training."""
    streaming: bool = False
    """Take rows from the front of the data, and only as many as `max_steps` steps need: for data that are larger than
    a run. Needs max_steps."""
    workers: int | None = Field(None, ge=0)
    """Processes that render the rows of large data, and threads that prepare the next steps. By default a process per
    CPU, at most 8, and no threads. No result depends on it."""
