"""Options for reading records."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from tropism.data.formats.label_words import mapping_key
from tropism.data.reading_limits import ReadingLimits

FormatName = Literal["trl", "openai", "sharegpt", "alpaca", "openrlhf", "coati", "nemo", "anthropic-hh", "axolotl",
                     "ultrafeedback", "oasst", "rating", "feedback", "nemo-rank", "helpsteer", "ms-swift", "shp",
                     "webgpt", "comparison", "arena", "label-studio", "argilla", "open-webui", "langfuse"]


class FormatOptions(ReadingLimits):
    """How the records of a file are read."""

    heading: ClassVar[str] = "Data"

    format: FormatName | None = None
    """Record format, if the columns do not identify it. Default: detected from the columns."""
    split: str | None = None
    """Split to read of a directory saved by `datasets`, a cloned data set, or a dataset on the Hub. With several
    configurations: CONFIGURATION/SPLIT. Default: train."""
    columns: str | None = None
    """Columns to rename, as comma-separated NAME=COLUMN pairs. For example prompt=question,completion=answer."""
    labels: str | None = None
    """Meaning of the words in a label column, as comma-separated WORD=true, WORD=false or WORD=drop. For example
    up=true,down=false. The word null is an empty label. Default: true/false, 0/1, and common pairs such as up/down."""
    label_name: str | None = None
    """Name of the score, question or control to read labels from, in exports of feedback tools that have several."""
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

    @field_validator("labels", mode="before")
    @classmethod
    def _words_as_text(cls, value: Any) -> Any:
        """A mapping from Python or YAML as text: pairs with commas, or JSON if a word has a comma."""
        if isinstance(value, list | tuple):
            return ",".join(map(str, value))
        if not isinstance(value, Mapping):
            return value
        words: dict[str, str] = {}
        for word, verdict in value.items():
            # YAML reads yes, no, on and off as booleans.
            for spelled in {True: ("true", "yes", "on"), False: ("false", "no", "off")}[word] if isinstance(
                    word, bool) else ("null" if word is None else str(word),):
                words.setdefault(spelled, "drop" if verdict is None else str(verdict))
        if any("," in word or not word.strip() or word.lstrip().startswith("{") for word in words):
            return json.dumps(words, ensure_ascii=False)
        return ",".join(f"{word}={verdict}" for word, verdict in words.items())

    @field_validator("labels")
    @classmethod
    def _words(cls, value: str | None) -> str | None:
        _words_of(value)
        return value

    @property
    def words(self) -> dict[str, bool | None]:
        """What each word of a label means, by `label_words.mapping_key`: True, False, or None to drop the row."""
        return _words_of(self.labels)

    @property
    def renames(self) -> dict[str, str]:
        """The name that each renamed column gets."""
        entries = [entry.partition("=") for entry in (self.columns or "").split(",") if entry]
        return {column.strip(): known.strip() for known, _, column in entries}


_MEANINGS: dict[str, bool | None] = {
    "true": True, "1": True, "yes": True, "desirable": True, "false": False, "0": False, "no": False,
    "undesirable": False, "drop": None}


def _words_of(text: str | None) -> dict[str, bool | None]:
    """The words in a value of `--labels`.

    Raises:
        ValueError: for an entry that is not WORD=true, WORD=false or WORD=drop, or for a word with two meanings.
    """
    if text is None:
        return {}
    entries = [entry.rpartition("=")[::2] if "=" in entry else (entry, "") for entry in text.split(",")]
    if text.lstrip().startswith("{"):
        try:
            entries = [(word, str(verdict)) for word, verdict in json.loads(text).items()]
        except (ValueError, RecursionError):
            raise ValueError(f"{text!r} is not valid JSON. Example: up=true,down=false") from None
    found: dict[str, bool | None] = {}
    for word, verdict in entries:
        key, meaning = mapping_key(word), verdict.strip().lower()
        if meaning not in _MEANINGS or not word.strip():
            raise ValueError(f"{word if not verdict else f'{word}={verdict}'!r} is not WORD=true, WORD=false or "
                             "WORD=drop. Example: up=true,down=false")
        if found.setdefault(key, _MEANINGS[meaning]) is not _MEANINGS[meaning]:
            raise ValueError(f"{word.strip()!r} has two meanings")
    return found
