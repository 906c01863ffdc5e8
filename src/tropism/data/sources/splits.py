"""The splits of a directory of data: saved by `datasets`, cloned from a hub, or named by its files.

What a file says about other files is data: only names inside the directory are read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tropism.borders import parse_mapping, read_bytes, read_object
from tropism.errors import DataError, UsageError, clause, first_line

TRAIN = "train"
STATE, INFO, DICT, CARD = "state.json", "dataset_info.json", "dataset_dict.json", "README.md"
_HELD_OUT = ("validation", "test")
_KEYWORDS = {TRAIN: ("train", "training"), "validation": ("validation", "valid", "val", "dev"),
             "test": ("test", "testing", "eval", "evaluation")}
_SPLIT_OF = {keyword: split for split, keywords in _KEYWORDS.items() for keyword in keywords}
_WORDS = re.compile(r"[a-zA-Z]+")
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_CARD_BYTES = 2**22
_OF_CLONES = (CARD, ".git", ".gitattributes", ".cache")
_CACHED = re.compile(r"cache-.*\.arrow")
"""Files in which `datasets` caches results beside the data."""


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """Which split of a directory or a `DatasetDict` is read.

    Args:
        name: of the split; None for `train`, or for a held-out one of evaluation data.
        option: by which the user chooses.
        held_out: this is evaluation data.
    """

    name: str | None = None
    option: str = "--split"
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class Splits:
    """The files of a directory by split.

    Args:
        place: the directory, for errors.
        files: files of each split, in order. An empty name is a data set without named splits.
        config: chosen configuration of the card; empty without one.
        configs: all configurations.
        missing: for splits of which files are not there, the error if they are chosen.
    """

    place: str
    files: Mapping[str, Sequence[Path]]
    config: str = ""
    configs: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    def choose(self, wanted: str | None, option: str, held_out: bool) -> tuple[Sequence[Path], str]:
        """The files of a split, and a sentence about it for the log, empty if there is nothing to choose.

        Args:
            wanted: its name; None for train, or for the held-out one of evaluation data.
            option: by which the user chooses.
            held_out: this is evaluation data.

        Raises:
            DataError: if the split is not there, or none is the obvious one.
        """
        name = chosen_split(list(self.files), wanted, self.place, option, held_out)
        if name in self.missing:
            raise DataError(self.missing[name])
        others = [other for other in self.files if other != name]
        said = f"split {name}" if name and (others or wanted is not None) else ""
        if others:
            said += f" (also there: {', '.join(others)}; choose with {option})"
        if len(self.configs) > 1:
            rest = ", ".join(other for other in self.configs if other != self.config)
            said += f"{' ' if said else ''}of configuration {self.config} (also there: {rest}; choose with {option} " \
                    f"CONFIGURATION/{name or 'SPLIT'})"
        return self.files[name], said


def chosen_split(names: Sequence[str], wanted: str | None, place: str, option: str, held_out: bool) -> str:
    """The name of the split to read; see `Splits.choose`.

    Raises:
        DataError: if it is not there, or none is the obvious one.
    """
    if wanted is not None:
        if wanted in names:
            return wanted
        listed = ", ".join(name for name in names if name)
        raise DataError(f"{place}: {option} {wanted}: no split of this name. "
                        + (f"Splits: {listed}" if listed else f"The data has no splits. Remove {option}."))
    for kind in (*(_HELD_OUT if held_out else ()), TRAIN):
        if name := _of_kind(names, kind):
            return name
    if len(names) == 1:
        return names[0]
    raise DataError(f"{place}: no split is called {TRAIN}. Choose one with {option}. Splits: {', '.join(names)}")


def held_out_split(names: Sequence[str]) -> str | None:
    """The name of the held-out split that evaluation data has: validation, or else test; None if neither is there."""
    return next(filter(None, (_of_kind(names, kind) for kind in _HELD_OUT)), None)


def _of_kind(names: Sequence[str], kind: str) -> str | None:
    """The split of this name, or else the first whose name means the same."""
    return kind if kind in names else next((name for name in names if _SPLIT_OF.get(name.lower()) == kind), None)


def find_splits(path: Path, wanted: str | None, data_files: Sequence[Path],
                option: str = "--split") -> tuple[Splits, str | None]:
    """The splits of a directory, and the wanted one without the configuration that may precede it.

    Args:
        wanted: a split, or CONFIGURATION/SPLIT.
        data_files: all data files below the directory, in order.
        option: by which the user chooses.

    Raises:
        DataError: if metadata names files that are missing or outside, or a configuration is not there.
    """
    place = str(path)
    if (path / DICT).is_file():
        names = read_object(path / DICT, kind=DataError).get("splits")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise DataError(f"{path / DICT}: 'splits' is not a list of names")
        return Splits(place, {name: _saved(_inside(path, name, path / DICT)) for name in names}), wanted
    if _is_saved(path):
        split = read_object(path / STATE, kind=DataError).get("_split")
        return Splits(place, {split if isinstance(split, str) else "": _saved(path)}), wanted
    if configs := _configs_of_card(path / CARD):
        return _of_card(path, configs, wanted, data_files, option)
    saved = {directory: _saved(directory) for directory in dict.fromkeys(file.parent for file in data_files)
             if _is_saved(directory)}
    files = [file for file in data_files if not is_cache(file) and file in saved.get(file.parent, (file,))]
    named: dict[str, list[Path]] = {}
    for file in files:
        named.setdefault(_split_by_name(file.relative_to(path)) or "", []).append(file)
    if len(named) <= 1:
        return Splits(place, {next(iter(named), ""): files}), wanted
    rest, cloned = named.pop("", []), any((path / name).exists() for name in _OF_CLONES)
    if rest and not cloned:  # a clone has other files too, a directory of the user's own only rows
        named[TRAIN] = sorted([*named.get(TRAIN, []), *rest])
    order = [name for name in _KEYWORDS if name in named]
    return Splits(place, {name: named[name] for name in order}), wanted


def _split_by_name(path: Path) -> str | None:
    """The split that a file's name or directory says, by the rules of the hub; None if neither does."""
    for part in (path.name.partition(".")[0], *reversed(path.parts[:-1])):
        found = [_SPLIT_OF[word.lower()] for word in _WORDS.findall(part) if word.lower() in _SPLIT_OF]
        if found:
            return found[0]
    return None


def _is_saved(directory: Path) -> bool:
    """Whether `datasets` saved a data set here. Other programs have files called state.json too."""
    return (directory / STATE).is_file() and (directory / INFO).is_file()


def _saved(directory: Path) -> list[Path]:
    """The files that the state of a saved data set names.

    Raises:
        DataError: if it names none, or one that is missing or outside.
    """
    file = directory / STATE
    if not file.is_file():
        raise DataError(f"{file}: file not found, so the files of this split are unknown")
    entries = read_object(file, kind=DataError).get("_data_files")
    named = [entry.get("filename") if isinstance(entry, dict) else None
             for entry in (entries if isinstance(entries, list) else [])]
    names = [name for name in named if isinstance(name, str)]
    if not names or len(names) < len(named):
        raise DataError(f"{file}: '_data_files' does not name the files of the data")
    found = [_inside(directory, name, file) for name in names]
    for one in found:
        if not one.is_file():
            raise DataError(f"{one}: file not found. {file} names it.")
    return found


def _inside(directory: Path, name: str, said_by: Path) -> Path:
    """A path below a directory.

    Raises:
        DataError: for an absolute name, or one that leads outside.
    """
    found = Path(name)
    if not name or "\0" in name or found.is_absolute() or ".." in found.parts:
        raise DataError(f"{said_by}: names {name[:100]!r}, which is not inside of {directory}")
    return directory / found


def _configs_of_card(card: Path) -> list[dict[str, Any]]:
    """The configurations in the front matter of a data card; none if it has no valid one."""
    if not card.is_file():
        return []
    text = read_bytes(card, _CARD_BYTES, DataError).decode(errors="replace")
    front = _FRONT.match(text)
    if front is None or "configs" not in front[1]:
        return []
    try:
        values, _ = parse_mapping(front[1], card)
    except UsageError as error:
        raise DataError(f"{clause(first_line(error))}. Correct the first lines of the card, or name the data files "
                        "themselves.") from error
    configs = values.get("configs")
    entries = [entry for entry in configs if isinstance(entry, dict)] if isinstance(configs, list) else []
    return [entry for entry in entries if entry.get("data_files") or entry.get("data_dir")]


def _of_card(path: Path, configs: list[dict[str, Any]], wanted: str | None,
             data_files: Sequence[Path], option: str) -> tuple[Splits, str | None]:
    """The splits of one configuration of a card."""
    by_name = {str(entry.get("config_name", "default")): entry for entry in configs}
    config, split = next((name for name, entry in by_name.items() if entry.get("default") is True),
                         "default" if "default" in by_name else ""), wanted
    first, slash, rest = (wanted or "").partition("/")
    if slash and first in by_name:
        config, split = first, rest
    elif wanted in by_name and not config:
        config, split = str(wanted), None
    if not config and len(by_name) > 1:
        raise DataError(f"{path}: the data has several configurations. Choose one with {option} "
                        f"CONFIGURATION/{TRAIN}. Configurations: {', '.join(by_name)}")
    config = config or next(iter(by_name))
    missing: dict[str, str] = {}
    found = {name: sorted(dict.fromkeys(files))
             for name, files in _card_files(path, by_name[config], data_files, missing)}
    return Splits(str(path), found, config, tuple(by_name), missing), split


def _card_files(path: Path, entry: Mapping[str, Any], data_files: Sequence[Path],
                missing: dict[str, str]) -> Iterator[tuple[str, list[Path]]]:
    """Splits of a configuration with their files.

    Args:
        missing: takes an error for each split of which files are not there.
    """
    base = _inside(path, str(entry.get("data_dir") or "."), path / CARD)
    described = entry.get("data_files")
    if described is None:
        inside = [file for file in data_files if file.is_relative_to(base)]
        named: dict[str, list[Path]] = {}
        for file in inside:
            named.setdefault(_split_by_name(file.relative_to(base)) or TRAIN, []).append(file)
        yield from named.items()
        return
    if isinstance(described, dict):
        described = [{"split": name, "path": patterns} for name, patterns in described.items()]
    splits = described if isinstance(described, list) and all(isinstance(one, dict) for one in described) else [
        {"split": TRAIN, "path": described}]
    for one in splits:
        patterns = one.get("path")
        patterns = patterns if isinstance(patterns, list) else [patterns]
        if not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise DataError(f"{path / CARD}: the data files of split {str(one.get('split'))[:50]} are not names")
        files: list[Path] = []
        split = str(one.get("split") or TRAIN)
        for pattern in patterns:
            _inside(base, pattern, path / CARD)
            matched = _matching(base, pattern, path / CARD, data_files)
            if not matched:
                missing[split] = (f"{path / CARD}: no data file in this directory matches {pattern[:100]!r}, although "
                                  f"the card names it for split {split[:50]}. Download the files, or name the data "
                                  "files themselves.")
            files += matched
        yield split, files


def _matching(base: Path, pattern: str, card: Path, data_files: Sequence[Path]) -> list[Path]:
    """The data files that a pattern matches."""
    try:
        pattern = f"{pattern}/*" if pattern.endswith("**") else pattern  # all files, as on the hub
        found = set(base.glob(pattern.removeprefix("./")))
    except (ValueError, IndexError, NotImplementedError, OSError) as error:
        raise DataError(f"{card}: {pattern[:100]!r} is not a pattern of files: {first_line(error)}") from None
    return [file for file in data_files if file in found or any(parent in found for parent in file.parents
                                                                if parent != base)]


def is_cache(file: Path) -> bool:
    """Whether a file is one in which `datasets` caches results."""
    return _CACHED.fullmatch(file.name) is not None

