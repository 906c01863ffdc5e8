"""What a sweep runs, and its record: `DIR/sweep.yaml`, from which it can be resumed."""

import os
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tropism.borders import read_mapping
from tropism.commands.sweep.values import Combination, Values, combinations, typed
from tropism.config import METHODS, MethodOptions
from tropism.config_file import CODE, checked
from tropism.errors import OutputError, OutputExistsError, TropismError, UsageError
from tropism.files import meant_by, write_whole
from tropism.observe.lock import BEGUN, GUARD
from tropism.observe.rundir import RunDirectory, free_name

RECORD = "sweep.yaml"
OWN = ("output", "resume", "fall_back", *sorted(CODE))
"""Options that each run gets from the sweep."""

Parse = Callable[[str, dict[str, Any], Sequence[str]], tuple[list[str], MethodOptions]]
"""Parses a method, the options of its file and those of the command line, and checks them as a training command would.
Returns that command and its options."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Args:
        combination: of values.
        path: its run directory.
        command: that starts it, behind `tropism`.
        options: as parsed.
    """

    combination: Combination
    path: Path
    command: tuple[str, ...]
    options: MethodOptions

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.combination.name

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """The values of options as parsed."""
        flat = self.options.flattened(self.options.model_dump())
        return {name.replace("-", "_"): flat[name.replace("-", "_")] for name in names}


@dataclass(frozen=True)
class Plan:
    """What a sweep runs.

    Args:
        base: path of the configuration file.
        started_in: directory that relative paths refer to.
        method: that is trained.
        options: those of the file.
        values: those of the command line.
    """

    base: str
    started_in: str
    method: str
    options: dict[str, Any]
    values: Values

    @property
    def swept(self) -> list[str]:
        """Names of the options that have several values."""
        return [name for name, own in self.values.items() if len(own) > 1]

    def runs(self, directory: Path, parse: Parse) -> list[Run]:
        """All runs, each parsed and validated.

        Raises:
            UsageError: naming the first combination that is invalid, or two that are the same.
        """
        found: list[Run] = []
        wrong: dict[str, str] = {}
        every = combinations(self.values, METHODS[self.method])
        for one in every:
            path = directory / one.name
            kept = {name: value for name, value in self.options.items()
                    if name not in OWN and name.replace("_", "-") not in one.unset}
            try:
                command, options = parse(self.method, kept, [*one.given, f"--output={path}"])
                found.append(Run(one, path, tuple(command), options))
            except TropismError as error:
                wrong[one.name] = str(error)
        if wrong:
            name, text = next(iter(wrong.items()))
            if len(wrong) == len(every) and len({*wrong.values()}) == 1:
                raise UsageError(text)  # whatever the combination
            several = f"{len(wrong)} of {len(every)} combinations are invalid. The first: " if len(wrong) > 1 else ""
            raise UsageError(f"{several}{name}: {text}")
        seen: list[tuple[Run, dict[str, Any]]] = []
        for run in found:
            own = {**run.options.model_dump(), "output": None}
            if same := next((before for before, options in seen if options == own), None):
                raise UsageError(f"{same.name} and {run.name} are the same run. Remove one of the values.")
            seen.append((run, own))
        return found

    def write(self, directory: Path) -> None:
        """Record the plan.

        Raises:
            OutputError: if the disk refuses.
        """
        content = {"base": self.base, "started_in": self.started_in, "method": self.method, "options": self.options,
                   "values": self.values}
        head = "# Written by tropism sweep. Resume it with: tropism resume DIR\n"
        text = head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_whole(directory / RECORD, text.encode(errors="backslashreplace"))

    def grown(self, recorded: "Plan", directory: Path) -> "Plan":
        """This plan, if it only adds values to the recorded one: the runs that exist are then part of it.

        Raises:
            UsageError: if anything else differs.
        """
        place = directory / RECORD
        new = f"or choose another directory with --output {free_name(directory)}"
        changed = [name for name in dict.fromkeys([*recorded.options, *self.options])
                   if name not in OWN and recorded.options.get(name) != self.options.get(name)]
        if recorded.method != self.method:
            changed.insert(0, "method")
        if changed:
            raise UsageError(f"{self.base}: {', '.join(changed)} changed since the sweep in {directory} began. Undo "
                             f"the change, {new}")
        if recorded.started_in != self.started_in:
            raise UsageError(f"{place}: the sweep was started in {recorded.started_in}. Run the command there, or: "
                             f"tropism resume {shlex.quote(str(directory))}")
        if ({*self.swept} != {*recorded.swept} or self.values.keys() != recorded.values.keys()
                or any(text not in self.values[name] for name, own in recorded.values.items() for text in own)):
            raise UsageError(f"{place}: the sweep has {typed(recorded.values)}. The command can add values to them, "
                             f"but not leave any out. Use the same ones, {new}")
        return replace(self, values={name: [*own, *(text for text in self.values[name] if text not in own)]
                                     for name, own in recorded.values.items()})


def is_sweep(directory: Path) -> bool:
    """Whether a sweep was started in a directory."""
    return (directory / RECORD).is_file()


def read_plan(directory: Path, decided: Collection[str]) -> Plan:
    """The recorded plan.

    Args:
        decided: options of code that the command line has.

    Raises:
        UsageError: if the file is not one that a sweep writes.
    """
    file = directory / RECORD
    found = read_mapping(file)[0]
    texts, options, values = [found.get(name) for name in ("base", "started_in")], found.get("options"), found.get(
        "values")
    if not (all(isinstance(text, str) for text in texts) and isinstance(options, dict) and isinstance(values, dict)
            and all(isinstance(own, list) and own and all(isinstance(text, str) for text in own)
                    for own in values.values())):
        raise UsageError(f"{file}: not the record of a sweep: 'base', 'started_in', 'method', 'options' or 'values' is "
                         "missing or of another kind")
    method, options = checked({**options, "method": found.get("method")}, lambda key: f"{file}: ", decided=decided)
    if method is None:
        raise UsageError(f"{file}: `method:` is missing")
    known = METHODS[method].flat_fields()
    for name in values:
        if not isinstance(name, str) or (key := name.replace("-", "_")) not in known or key in OWN:
            raise UsageError(f"{file}: values: {name!r} is not an option that a sweep can vary")
    return Plan(str(texts[0]), str(texts[1]), method, options, values)


def check_empty(directory: Path) -> None:
    """Check that a directory is empty or absent.

    Raises:
        OutputExistsError: if it has other files than those that a kill at the start leaves.
    """
    try:
        if not directory.exists() or (directory.is_dir() and all(
                entry.name in ("lock", GUARD, BEGUN) or meant_by(entry.name) == RECORD
                for entry in directory.iterdir())):
            return
    except OSError as error:
        raise OutputError.because(directory, error, what="cannot be read") from error
    what = "not empty" if directory.is_dir() else "not a directory"
    raise OutputExistsError(f"{directory} exists and is {what}, and has no sweep. Choose another directory, such as "
                            f"--output {free_name(directory)}")


def runs_of(paths: Sequence[Path]) -> list[Path]:
    """Run directories that paths name. A sweep stands for its runs, and its own files among the paths are left out, so
    that both `DIR` and `DIR/*` name its runs."""
    found: list[Path] = []
    for path in paths:
        if is_sweep(path):
            found += sorted(entry for entry in path.iterdir() if entry.is_dir() and RunDirectory(entry).holds_run)
        elif not (is_sweep(path.parent) and os.path.lexists(path) and not RunDirectory(path).holds_run):
            found.append(path)
    return found
