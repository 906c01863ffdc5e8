"""Datasets on the Hugging Face Hub: downloaded, or streamed without being downloaded as a whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tropism.data.rows import RawRow
from tropism.data.sources.files import KINDS, PACKINGS, mapping
from tropism.data.sources.python_values import plain_records
from tropism.data.sources.splits import CARD, SplitChoice, Splits, chosen_split
from tropism.errors import DataError

_ADVICE = "Check the name and the connection, log in, or download the files and give their directory."


def download(name: str) -> Path:
    """A directory with the data files and the card of a dataset. Its name is the commit.

    Args:
        name: `owner/name`, or `owner/name@revision`.

    Raises:
        DataError: if that fails.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise DataError(f"{name}: file not found. To read a dataset from the Hub, install huggingface_hub.") from None
    wanted = [f"*{suffix}{packing}" for suffix in KINDS for packing in ("", *PACKINGS)] + [CARD]
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, repo_type="dataset", revision=revision or None,
                                      allow_patterns=wanted))
    except Exception as error:  # downloads fail in many ways
        raise DataError(f"{name}: file not found, and the dataset could not be downloaded from the Hub "
                        f"({_reason(error)}). Check the name, log in, or download the files and give their directory."
                        ) from None


@dataclass(frozen=True, slots=True)
class Stream:
    """One split of a dataset, whose rows are read as they are needed. The library `datasets` retries if the connection
    drops.

    Args:
        name: `owner/name`.
        commit: that is read, whatever its branch names later.
        split: with the configuration before it, if there are several.
        rows: an iterable dataset.
        said: a sentence about the split, if there are several.
    """

    name: str
    commit: str
    split: str
    rows: Any
    said: str = ""

    @classmethod
    def of(cls, name: str, split: SplitChoice) -> "Stream":
        """Find a dataset and choose its split. No row is read.

        Args:
            name: `owner/name`, or `owner/name@revision`.

        Raises:
            DataError: if `datasets` is missing, the dataset is not found, or the split is not there.
        """
        try:
            import datasets  # slow to import, and an extra
        except ImportError:
            raise DataError(f"{name}: --streaming of a dataset on the Hub needs the package datasets. Install it with "
                            "`pip install 'tropism[datasets]'`, or omit --streaming to download the dataset.") from None
        from huggingface_hub import HfApi

        repository, _, revision = name.partition("@")
        try:
            commit = str(HfApi().dataset_info(repository, revision=revision or None).sha)
            configs = datasets.get_dataset_config_names(repository, revision=commit)
            first, slash, rest = (split.name or "").partition("/")
            config, wanted = (first, rest) if slash and first in configs else (None, split.name)
            if config is None and len(configs) > 1:
                config = datasets.get_dataset_default_config_name(repository, revision=commit) or next(
                    (one for one in configs if one == "default"), configs[0])
            by_split = datasets.load_dataset(repository, config, revision=commit, streaming=True)
        except Exception as error:  # requests fail in many ways
            raise DataError(f"{name}: the dataset cannot be streamed from the Hub ({_reason(error)}). {_ADVICE}"
                            ) from None
        chosen = chosen_split(list(by_split), wanted, name, split.option, split.held_out)
        named = Splits(name, dict.fromkeys(by_split, ()), config or "", tuple(configs))
        _, said = named.choose(wanted, split.option, split.held_out)
        return cls(repository, commit, f"{config}/{chosen}" if len(configs) > 1 else chosen, by_split[chosen], said)

    def read(self) -> Iterator[RawRow]:
        """Yield the rows. A place is the name, the split and the number of the row.

        Raises:
            DataError: if a row cannot be read, or the connection cannot be restored.
        """
        number, rows = 0, plain_records(self.rows)
        while True:
            try:
                record = next(rows, None)
            except DataError as error:
                raise DataError(f"{self.name}:{self.split}: {error}") from None
            except Exception as error:  # reading fails in many ways
                raise DataError(f"{self.name}:{self.split}: reading from the Hub failed after row {number:,} "
                                f"({_reason(error)}). Run the command again, or omit --streaming to download the "
                                "dataset first.") from None
            if record is None:
                return
            number += 1
            place = f"{self.name}:{self.split}:row {number}"
            yield RawRow(place, mapping(record, place))


def _reason(error: BaseException) -> str:
    reason = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__
