"""Resolves a data source to its parts: files, directories, datasets on the hub, mixtures of them, or dicts."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tropism.data.reading_limits import ReadingLimits
from tropism.data.rows import RawRow
from tropism.data.sources.files import KINDS, PACKINGS, DataFile, mapping
from tropism.data.sources.python_values import plain_records
from tropism.errors import DataError

DataSource = str | Path | Iterable[dict[str, Any]]
"""A path, a text as in `resolve_source`, or rows as dicts."""

_WEIGHTED = re.compile(r"(.+):(\d+(?:\.\d+)?|\.\d+)", re.DOTALL)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Rows of one format: a file, a directory, a dataset on the hub, or a list of dicts.

    Args:
        name: shown in errors.
        files: its files, in order.
        weight: how often its rows are used. A fraction selects that share of the rows, by a hash of their place.
        records: rows as dicts, if there are no files.
    """

    name: str
    files: tuple[DataFile, ...] = ()
    weight: float = 1.0
    records: Iterable[dict[str, Any]] = field(default=())

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


def read(source: DataSource) -> Iterator[RawRow]:
    """Yield the rows of a source; see `resolve_source`.

    Raises:
        DataError: if it is missing, of an unknown type, or a row cannot be read.
    """
    for part in resolve_source(source):
        yield from part.read()


def resolve_source(source: DataSource, limits: ReadingLimits | None = None) -> list[SourcePart]:
    """The parts of a source.

    Args:
        source: rows as dicts, a path, or text: comma-separated files, directories and datasets on the hub. The
            suffix `:2` uses the rows of a part twice, `:0.5` half of them.
        limits: of each file.

    Raises:
        DataError: if a part is not found.
    """
    if not isinstance(source, str | Path):
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
                           limits or ReadingLimits()))
    return parts


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
        elif not file.path.is_dir() and (file.kind or file.path.exists() or not _HUB_NAME.fullmatch(name)):
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


def _part(name: str, label: str, weight: float, prefix: str, limits: ReadingLimits) -> SourcePart:
    path = Path(name).expanduser()
    if path.is_dir():
        files = _in_directory(path, prefix, limits)
        if not files:
            raise DataError(f"{path}: no data file in this directory. Known: {', '.join(KINDS)}")
        return SourcePart(label, files, weight)
    if path.is_file():
        return SourcePart(label, (DataFile(path, label, limits),), weight)
    if _HUB_NAME.fullmatch(name) and DataFile(path, label).kind is None:
        return SourcePart(name, _from_hub(name, prefix, limits), weight)
    if path.exists():
        raise DataError(f"{path}: is not a regular file. Save the data in a file or a directory.")
    raise DataError(f"{path}: file not found")


def _in_directory(path: Path, prefix: str, limits: ReadingLimits) -> tuple[DataFile, ...]:
    """Data files below a directory in order of their names, without hidden files and metadata of datasets."""
    found = []
    for entry in sorted(path.rglob("*")):
        inside = entry.relative_to(path)
        file = DataFile(entry, prefix + _text(inside.as_posix()), limits)
        if (file.kind and entry.is_file() and entry.name not in _NOT_ROWS
                and not any(piece.startswith(".") for piece in inside.parts)):
            found.append(file)
    return tuple(found)


def _from_hub(name: str, prefix: str, limits: ReadingLimits) -> tuple[DataFile, ...]:
    """Data files of a dataset on the hub; only those named `train...`, or in such a folder, if there are any."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise DataError(f"{name}: file not found. To read a dataset from the Hub, install huggingface_hub.") from None
    wanted = [f"*{suffix}{packing}" for suffix in KINDS for packing in ("", *PACKINGS)]
    try:
        path = Path(snapshot_download(name, repo_type="dataset", allow_patterns=wanted))
    except Exception as error:  # downloads fail in many ways
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"{name}: file not found, and the dataset could not be downloaded from the Hub "
                        f"({type(error).__name__}: {reason}). Check the name, log in, or download the files and give "
                        "their directory.") from None
    files = _in_directory(path, prefix, limits)
    train = tuple(file for file in files
                  if any(piece.startswith("train") for piece in file.path.relative_to(path).parts))
    if not files:
        raise DataError(f"{name}: this dataset on the Hub has no data file. Known: {', '.join(KINDS)}")
    return train or files


def _hash_of(place: str) -> float:
    """A hash of a place in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest()) / 2**64
