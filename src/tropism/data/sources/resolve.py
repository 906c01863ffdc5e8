"""Resolves a data source to its parts: files, directories, datasets on the hub, mixtures of them, or dicts."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tropism.data.reading_limits import ReadingLimits
from tropism.data.rows import RawRow
from tropism.data.sources import hub
from tropism.data.sources.files import KINDS, DataFile, mapping
from tropism.data.sources.python_values import plain_records
from tropism.data.sources.splits import SplitChoice, chosen_split, find_splits, is_cache
from tropism.errors import DataError

DataSource = str | Path | Iterable[dict[str, Any]]
"""A path, a text as in `resolve_source`, or rows as dicts."""

_WEIGHTED = re.compile(r"(.+):(\d+(?:\.\d+)?|\.\d+)", re.DOTALL)
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Rows of one format: a file, a directory, a dataset on the hub, or a list of dicts.

    Args:
        name: shown in errors.
        files: its files, in order.
        weight: how often its rows are used. A fraction selects that share of the rows, by a hash of their place.
        records: rows as dicts, if there are no files.
        split: a sentence about the chosen split, if there are several.
        stream: of a dataset on the Hub, if there are no files.
        commit: of a dataset on the Hub.
    """

    name: str
    files: tuple[DataFile, ...] = ()
    weight: float = 1.0
    records: Iterable[dict[str, Any]] = field(default=())
    split: str = ""
    stream: hub.Stream | None = None
    commit: str = ""

    def read(self) -> Iterator[RawRow]:
        """Yield the rows in file order; repeated rows come after all others.

        Raises:
            DataError: for a row that cannot be read.
        """
        for _ in range(int(self.weight)):  # read again instead of kept, since it may be large
            yield from self._once()
        share = self.weight % 1
        yield from (row for row in self._once() if _hash_of(row.place) < share) if share else ()

    def _once(self) -> Iterator[RawRow]:
        for number, record in enumerate(plain_records(self.records), start=1):
            yield RawRow(f"row {number}", mapping(record, f"row {number}"))
        for file in self.files:
            yield from file.rows()
        if self.stream is not None:
            yield from self.stream.read()


def read(source: DataSource, split: SplitChoice | None = None) -> Iterator[RawRow]:
    """Yield the rows of a source; see `resolve_source`.

    Raises:
        DataError: if it is missing, of an unknown type, or a row cannot be read.
    """
    for part in resolve_source(source, split=split):
        yield from part.read()


def resolve_source(source: DataSource, limits: ReadingLimits | None = None,
                   split: SplitChoice | None = None, stream: bool = False) -> list[SourcePart]:
    """The parts of a source.

    Args:
        source: rows as dicts, a path, or text: comma-separated files, directories and datasets on the hub. The
            suffix `:2` uses the rows of a part twice, `:0.5` half of them.
        limits: of each file.
        split: of directories that have splits. If a name is given, one of the parts must have it.
        stream: read datasets on the Hub as their rows are needed, instead of downloading them.

    Raises:
        DataError: if a part or a split is not found.
    """
    split = split or SplitChoice()
    if isinstance(source, Mapping):  # a DatasetDict
        if not source or any(isinstance(rows, str | int | float | None) for rows in source.values()):
            raise DataError("the data is a mapping, but not one of splits to rows. Pass a list of rows, or a "
                            "mapping of splits to rows.")
        firsts = [rows[0] for rows in source.values() if isinstance(rows, list | tuple) and rows]
        if any(isinstance(first, str | int | float | list | None) for first in firsts):
            raise DataError(f"the data is a dict of columns ({', '.join(map(str, source))[:200]}), not of splits. Pass "
                            "a table, such as pandas.DataFrame(columns), or a list of rows.")
        name = chosen_split([str(key) for key in source], split.name, "data", split.option, split.held_out)
        others = ", ".join(str(key) for key in source if str(key) != name)
        return [SourcePart("data", records=source[name],
                           split=f"split {name}" + (f" (also there: {others}; choose with {split.option})"
                                                    if others else ""))]
    if not isinstance(source, str | Path):
        _check_has_splits(split, False, "data")
        return [SourcePart("data", records=source)]
    if isinstance(source, Path) or _exists(source):
        named = [(str(source), 1.0)]
    else:
        named = [_weighted(entry.strip(), source) for entry in source.split(",")]
    base_names = Counter(Path(name).name for name in dict(named))
    parts = []
    for name, weight in named:
        label = _text(name if base_names[Path(name).name] > 1 else Path(name).name)
        parts.append(_part(name, label, weight, f"{label}/" if len(named) > 1 else "",
                           limits or ReadingLimits(), split, stream))
    _check_has_splits(split, any(part.split for part in parts), str(source))
    return parts


def _check_has_splits(split: SplitChoice, has: bool, place: str) -> None:
    if split.name is not None and not has:
        raise DataError(f"{place}: {split.option} {split.name}: the data has no splits. Remove {split.option}.")


def check_source(source: str) -> None:
    """Check that the local parts of a source exist. Nothing is read or downloaded.

    Raises:
        DataError: if one is not found, or is of an unknown type.
    """
    for entry in [source] if _exists(source) else source.split(","):
        name, _ = _weighted(entry.strip(), source)
        file = DataFile(Path(name).expanduser(), name)
        if file.path.is_file():
            file.check_kind()
        elif not file.path.is_dir() and (file.path.exists() or not is_hub_name(name)):
            resolve_source(name)  # raises


def _text(name: str) -> str:
    """The name of a file as text: it need not be UTF-8."""
    return name.encode(errors="backslashreplace").decode()


def absolute(source: str) -> str:
    """The source with absolute paths; names of datasets on the hub are unchanged."""
    def absolute_path(entry: str) -> str:
        return os.path.abspath(os.path.expanduser(entry)) if _exists(entry) else entry

    if _exists(source):
        return absolute_path(source)
    entries = []
    for entry in source.split(","):
        match = None if _exists(entry.strip()) else _WEIGHTED.fullmatch(entry.strip())
        entries.append(f"{absolute_path(match.group(1))}:{match.group(2)}" if match else absolute_path(entry.strip()))
    return ",".join(entries)


def pinned(source: str, commits: Mapping[str, str]) -> str:
    """The source with commits of datasets on the Hub in place of their branches.

    Args:
        commits: by the names of the datasets in the source.
    """
    entries = [entry.strip() for entry in source.split(",")]
    for number, entry in enumerate(entries):
        name, _ = _weighted(entry, source)
        if name in commits:
            entries[number] = f"{name.partition('@')[0]}@{commits[name]}{entry[len(name):]}"
    return ",".join(entries)


def without_commits(source: str) -> str:
    """The source as it was before `pinned`, if no revision was given."""
    return source if _exists(source) else re.sub(rf"@{_COMMIT.pattern}(?=[:,]|$)", "", source)


def hub_names(source: str) -> list[str]:
    """The names of datasets on the Hub in a source, each once."""
    if _exists(source):
        return []
    found = [name for entry in source.split(",") if entry.strip()
             for name in [_weighted(entry.strip(), source)[0]] if not _exists(name) and is_hub_name(name)]
    return list(dict.fromkeys(name.partition("@")[0] for name in found))


def is_hub_name(name: str) -> bool:
    """Whether this is the name of a dataset on the Hub, perhaps with a revision, and not that of a data file."""
    return _HUB_NAME.fullmatch(name) is not None and DataFile(Path(name), name).kind is None


def _exists(name: str) -> bool:
    return os.path.exists(os.path.expanduser(name))  # Path.exists raises for names that are too long


def _weighted(entry: str, source: str) -> tuple[str, float]:
    if not entry:
        raise DataError(f"{source}: a name is missing between two commas")
    match = _WEIGHTED.fullmatch(entry)
    if match is None or _exists(entry):
        return entry, 1.0
    weight = float(match.group(2))
    if not weight:
        raise DataError(f"{entry}: a weight of 0 uses no rows. Remove this part.")
    return match.group(1), weight


def _part(name: str, label: str, weight: float, prefix: str, limits: ReadingLimits, split: SplitChoice,
          stream: bool) -> SourcePart:
    path = Path(name).expanduser()
    if path.is_dir():
        return _of_directory(path, label, weight, prefix, limits, split)
    if path.is_file():
        return SourcePart(label, (DataFile(path, label, limits),), weight)
    if is_hub_name(name):
        if stream:
            found = hub.Stream.of(name, split)
            return SourcePart(name, (), weight, split=found.said, stream=found, commit=found.commit)
        place = hub.download(name)
        return replace(_of_directory(place, name, weight, prefix, limits, split, name),
                       commit=place.name if _COMMIT.fullmatch(place.name) else "")
    if path.exists():
        raise DataError(f"{path}: is not a regular file. Save the data in a file or a directory.")
    raise DataError(f"{path}: file not found")


def _of_directory(path: Path, label: str, weight: float, prefix: str, limits: ReadingLimits,
                  split: SplitChoice, hub: str | None = None) -> SourcePart:
    """The rows of a directory: of one split, if it has several.

    Args:
        hub: name of the dataset on the hub that it holds.
    """
    files = _in_directory(path, prefix, limits)
    if not files:
        here = f"{path}: no data file in this directory" if hub is None else (
            f"{hub}: this dataset on the Hub has no data file")
        raise DataError(f"{here}. Known: {', '.join(KINDS)}")
    by_path = {file.path: file for file in files}
    splits, wanted = find_splits(path, split.name, list(by_path), split.option)
    if wanted is not None and set(splits.files) == {""}:
        return SourcePart(label, files, weight)
    chosen, said = splits.choose(wanted, split.option, split.held_out)
    return SourcePart(label, tuple(by_path.get(file) or _below(path, file, prefix, limits) for file in chosen), weight,
                      split=said)


def _in_directory(path: Path, prefix: str, limits: ReadingLimits) -> tuple[DataFile, ...]:
    """Data files below a directory in order of their names, without hidden files, caches and metadata of datasets."""
    found = []
    for entry in sorted(path.rglob("*")):
        inside = entry.relative_to(path)
        file = _below(path, entry, prefix, limits)
        if (file.kind and entry.is_file() and entry.name not in _NOT_ROWS and not is_cache(entry)
                and not any(piece.startswith(".") for piece in inside.parts)):
            found.append(file)
    return tuple(found)


def _below(path: Path, file: Path, prefix: str, limits: ReadingLimits) -> DataFile:
    return DataFile(file, prefix + _text(file.relative_to(path).as_posix()), limits)


def _hash_of(place: str) -> float:
    """A hash of a place in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest()) / 2**64
