"""Options of reading and scheduling data."""

from typing import Any, Literal

from pydantic import Field, field_validator

from tropism.data.tokenization.chat_template import TemplateOptions
from tropism.options import Options

FormatName = Literal["trl", "openai", "sharegpt", "alpaca", "openrlhf", "coati", "nemo", "anthropic-hh", "axolotl",
                     "ultrafeedback", "oasst", "rating", "feedback"]


class FormatOptions(Options):
    """How the records of a file are understood; by default, as their columns say."""

    format: FormatName | None = None
    """Format of the records, where their columns do not say it."""
    columns: str | None = None
    """Columns to rename before the records are looked at, comma-separated: prompt=question,completion=answer."""
    label_threshold: float | None = None
    """Rating from which on a completion is desirable, for data that have ratings or scores instead of labels."""
    pair_by_prompt: bool = False
    """Make pairs of labelled completions: the first desirable of a prompt with its first undesirable, and so on."""

    @field_validator("columns", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """A mapping or list from Python or YAML is what the command line writes with commas."""
        if isinstance(value, dict):
            value = [f"{known}={column}" for known, column in value.items()]
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("columns")
    @classmethod
    def _renames(cls, value: str | None) -> str | None:
        for entry in value.split(",") if value is not None else ():
            known, equals, column = entry.partition("=")
            if not (known.strip() and equals and column.strip()):
                raise ValueError(f"{entry!r} is not NAME=COLUMN, as in prompt=question,completion=answer")
        return value

    @property
    def renames(self) -> dict[str, str]:
        """The name that each renamed column gets."""
        entries = [entry.partition("=") for entry in (self.columns or "").split(",") if entry]
        return {column.strip(): known.strip() for known, _, column in entries}


class LengthOptions(Options):
    """How long a row may be."""

    max_length: int | None = Field(None, ge=2)
    """Tokens of a prompt with its completion; by default the model's limit, at most 2048."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Tokens of a prompt; a longer one is cut from the left."""


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
