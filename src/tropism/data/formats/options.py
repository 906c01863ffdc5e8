"""Options for reading records."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from tropism.data.reading_limits import ReadingLimits

FormatName = Literal["trl", "openai", "sharegpt", "alpaca", "openrlhf", "coati", "nemo", "anthropic-hh", "axolotl",
                     "ultrafeedback", "oasst", "rating", "feedback", "nemo-rank", "helpsteer", "ms-swift", "shp",
                     "webgpt"]


class FormatOptions(ReadingLimits):
    """How the records of a file are read."""

    heading: ClassVar[str] = "Data"

    format: FormatName | None = None
    """Record format, if the columns do not identify it. Default: detected from the columns."""
    columns: str | None = None
    """Columns to rename, as comma-separated NAME=COLUMN pairs. For example prompt=question,completion=answer."""
    label_threshold: float | None = Field(None, allow_inf_nan=False)
    """Lowest rating that counts as desirable. For data with ratings or scores instead of labels."""
    pair_by_prompt: bool = False
    """Build pairs from labeled completions of the same prompt. The first desirable one is paired with the first
    undesirable one, and so on."""

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
                raise ValueError(f"{entry!r} is not NAME=COLUMN. Example: prompt=question,completion=answer")
        return value

    @property
    def renames(self) -> dict[str, str]:
        """The name that each renamed column gets."""
        entries = [entry.partition("=") for entry in (self.columns or "").split(",") if entry]
        return {column.strip(): known.strip() for known, _, column in entries}
