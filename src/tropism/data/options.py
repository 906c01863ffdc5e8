"""Options of reading and scheduling data."""

from pydantic import Field

from tropism.options import Options


class DataOptions(Options):
    """What to train on."""

    data: str
    """Training rows: a JSON, JSONL, Parquet or CSV file."""
    eval_data: str | None = None
    """Held-out rows, in a file of their own."""
    eval_fraction: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the prompts to hold out for evaluation, at least one; no prompt is on both sides."""
    max_length: int | None = Field(None, ge=2)
    """Tokens of a prompt with its completion; by default the model's limit, at most 2048."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Tokens of a prompt; a longer one is cut from the left."""
    shuffle: bool = True
    """Permute the rows afresh in every epoch; false keeps file order."""
    group_prompts: bool = False
    """Permute prompts instead of rows, and keep all rows of a prompt in one step."""
    strict: bool = False
    """Stop where a row would be left out, or where policy and reference differ before training."""
    workers: int = Field(0, ge=0)
    """Threads that render rows and prepare the next steps; no result depends on it."""


