"""Options for training and evaluation data."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from tropism.data.formats.options import FormatOptions
from tropism.data.tokenization.chat_template import TemplateOptions
from tropism.data.tokenization.truncate import LengthOptions
from tropism.errors import UsageError
from tropism.options import Everyday


class HeldOutOptions(FormatOptions):
    """Evaluation data, read as the training data is."""

    heading: ClassVar[str] = "Evaluation"

    eval_data: Everyday[str | None] = None
    """Evaluation data: files, a directory, or a dataset on the Hub. Cannot be combined with `--eval-fraction`."""
    eval_split: str | None = None
    """Split to read of `--eval-data`. Default: validation, test or train, the first that is there."""
    eval_fraction: Everyday[float] = Field(0.0, ge=0.0, lt=1.0)
    """Share of prompts to hold out for evaluation (at least one prompt). Never splits the rows of a prompt."""

    @model_validator(mode="after")
    def _one_of_them(self) -> "HeldOutOptions":
        if self.eval_data and self.eval_fraction:
            raise UsageError("--eval-data and --eval-fraction exclude each other. Remove one of them.")
        return self


class DataOptions(HeldOutOptions, TemplateOptions, LengthOptions):
    """What to train on."""

    heading: ClassVar[str] = "Data"

    data: str
    """Training data: files, a directory, or a dataset on the Hub. Separate several with commas. Reads JSON, JSONL,
    Parquet, Arrow, CSV and TSV, optionally compressed (.gz, .zst). The suffix `:2` uses a source twice, `:0.5`
    half of it."""
    shuffle: bool = True
    """Reshuffle rows in every epoch. false keeps the order of the file."""
    group_prompts: bool = False
    """Shuffle prompts instead of rows. All rows of a prompt are then in the same optimizer step."""
    weight_divisor: Literal["count", "sum"] = "count"
    """Divisor of the loss if rows have weights: `count` divides by the number of rows or tokens, as without weights;
    `sum` divides by the sum of their weights."""
    strict: bool = False
    """Stop at the first row that would be dropped. Otherwise the run drops the row and reports it."""
    streaming: bool = False
    """Read only as many rows as `--max-steps` needs, from the start of the data. Meant for large data. A dataset on the
    Hub is streamed instead of downloaded, which needs the extra `datasets`."""
    workers: int | None = Field(None, ge=0)
    """Number of processes that render the rows of large data. 0 renders in the training process. The result does not
    depend on it. Default: one per CPU, at most 8."""
