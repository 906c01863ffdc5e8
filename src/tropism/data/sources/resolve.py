"""Where rows come from: files, directories, datasets on the hub, mixtures of them, or a list of dicts."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tropism.data.rows import RawRow
from tropism.data.sources.files import KINDS, PACKINGS, DataFile, mapping
from tropism.errors import DataError

DataSource = str | Path | Iterable[dict[str, Any]]
"""A path; a text as in `resolve_source`; or rows as dicts."""

_WEIGHTED = re.compile(r"(.+):(\d+(?:\.\d+)?|\.\d+)")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Rows that belong together and have one format: a file, a directory, a dataset of the hub, a list of dicts.

    Args:
        name: what errors call it.
        files: its files, in order.
        weight: how often its rows are taken; of a fraction, as many as it says, chosen by a hash of their place.
        records: rows as dicts, where there are no files.
    """

    name: str
    files: tuple[DataFile, ...] = ()
    weight: float = 1.0
    records: Iterable[dict[str, Any]] = field(default=())

    def read(self) -> Iterator[RawRow]:
        """Yield the rows, in file order; repeated rows after all others.

        Raises:
            DataError: for a line that cannot be read.
        """
        for _ in range(int(self.weight)):  # read again, not remembered: it may be large
            yield from self._once()
        share = self.weight % 1
        yield from (row for row in self._once() if _point(row.place) < share) if share else ()

    def _once(self) -> Iterator[RawRow]:
        for number, record in enumerate(self.records, start=1):
            yield RawRow(f"row {number}", mapping(record, f"row {number}"))
        for file in self.files:
            yield from file.rows()


def read(source: DataSource) -> Iterator[RawRow]:
    """Yield the rows of a source, as `resolve_source` takes it.

    Raises:
        DataError: if it is missing, of an unknown kind, or a line of it cannot be read.
    """
    for part in resolve_source(source):
        yield from part.read()


def resolve_source(source: DataSource) -> list[SourcePart]:
    """The parts of a source.

    Args:
        source: rows as dicts, a path, or text: files, directories and names of datasets on the hub with commas between
            them; `:2` or `:0.5` behind one takes its rows twice, or half of them.

    Raises:
        DataError: if one is missing.
    """
    if not isinstance(source, str | Path):
        return [SourcePart("data", records=source)]
    if isinstance(source, Path) or _exists(source):
        named = [(str(source), 1.0)]
    else:
        named = [_weighted(entry.strip(), source) for entry in source.split(",")]
    short = Counter(Path(name).name for name, _ in {entry[0]: entry for entry in named}.values())
    parts = []
    for name, weight in named:
        label = name if short[Path(name).name] > 1 else Path(name).name
        parts.append(_part(name, label, weight, prefix=f"{label}/" if len(named) > 1 else ""))
    return parts


def absolute(source: str) -> str:
    """The same source from any working directory; names of datasets on the hub stay."""
    def located(entry: str) -> str:
        return os.path.abspath(os.path.expanduser(entry)) if _exists(entry) else entry

    if _exists(source):
        return located(source)
    entries = []
    for entry in source.split(","):
        match = None if _exists(entry.strip()) else _WEIGHTED.fullmatch(entry.strip())
        entries.append(f"{located(match.group(1))}:{match.group(2)}" if match else located(entry.strip()))
    return ",".join(entries)


def _exists(name: str) -> bool:
    return os.path.exists(os.path.expanduser(name))  # unlike a Path, not shocked by a list longer than a file's name


def _weighted(entry: str, source: str) -> tuple[str, float]:
    if not entry:
        raise DataError(f"{source}: a name is missing between the commas")
    match = _WEIGHTED.fullmatch(entry)
    if match is None or _exists(entry):
        return entry, 1.0
    weight = float(match.group(2))
    if not weight:
        raise DataError(f"{entry}: a weight of 0 takes no row; leave it out")
    return match.group(1), weight


def _part(name: str, label: str, weight: float, prefix: str) -> SourcePart:
    path = Path(name).expanduser()
    if path.is_dir():
        files = _in_directory(path, prefix)
        if not files:
            raise DataError(f"{path}: no data file in this directory; known are {', '.join(KINDS)}")
        return SourcePart(label, files, weight)
    if path.is_file():
        return SourcePart(label, (DataFile(path, label),), weight)
    if _HUB_NAME.fullmatch(name) and DataFile(path, label).kind is None:
        return SourcePart(name, _from_hub(name, prefix), weight)
    raise DataError(f"{path}: no such file")


def _in_directory(path: Path, prefix: str) -> tuple[DataFile, ...]:
    """Data files below a directory by their names; hidden ones and descriptions of the data are none."""
    found = []
    for entry in sorted(path.rglob("*")):
        inside = entry.relative_to(path)
        file = DataFile(entry, prefix + inside.as_posix())
        if (file.kind and entry.is_file() and entry.name not in _NOT_ROWS
                and not any(piece.startswith(".") for piece in inside.parts)):
            found.append(file)
    return tuple(found)


def _from_hub(name: str, prefix: str) -> tuple[DataFile, ...]:
    """Data files of a dataset on the hub; of one that has files or folders called `train...`, only these."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise DataError(f"{name}: no such file; to read it from the hub, pip install huggingface_hub") from None
    wanted = [f"*{suffix}{packing}" for suffix in KINDS for packing in ("", *PACKINGS)]
    try:
        path = Path(snapshot_download(name, repo_type="dataset", allow_patterns=wanted))
    except Exception as error:  # every way in which a download fails ends the same for the user
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"{name}: no such file, and no dataset of this name could be fetched from the hub "
                        f"({type(error).__name__}: {reason}). Check the name, log in, or download its files and name "
                        "the directory") from None
    files = _in_directory(path, prefix)
    train = tuple(file for file in files
                  if any(piece.startswith("train") for piece in file.path.relative_to(path).parts))
    if not files:
        raise DataError(f"{name}: this dataset of the hub has no data file; known are {', '.join(KINDS)}")
    return train or files


def _point(place: str) -> float:
    """A place as a number in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest()) / 2**64
