"""The run directory: the files that training writes and other commands read."""

import json
import math
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tropism.errors import OutputError, OutputExistsError, UsageError
from tropism.files import append_line, check_writable, meant_by, write_whole
from tropism.observe.file_kinds import check_kind
from tropism.observe.lock import BEGUN, GUARD, check_owned
from tropism.observe.log_files import read_log

SAMPLES_DURING = "samples_during.jsonl"
"""Completions of `--sample-every`."""

GROWING = ("metrics.jsonl", "samples.jsonl", SAMPLES_DURING, "notices.jsonl", "skipped.jsonl")
"""Files that grow line by line. A resumed run truncates them to its checkpoint."""

EVAL_ROWS = "eval_rows.jsonl"
"""The held-out rows, written before step 1."""
SCORES = "scores.parquet"
"""The scores of rows before and after training, written at the end."""

MOVED = "moved.jsonl"
"""The held-out completions whose reward changed most, written at the end."""

REPORT = "report.html"
"""The page of `tropism report`, written at the end if matplotlib is installed."""

PROFILE = "profile.json"
"""The trace of `--profile`, for Perfetto."""

_FILES = (*GROWING, EVAL_ROWS, SCORES, MOVED, PROFILE, REPORT, "config.yaml", "manifest.json", "audit.json",
          "checkpoints/best.json")
_DIRECTORIES = ("checkpoints", "model", ".model.partial", "logs")

_REPLACED = re.compile(r"config\.yaml|writable|[a-z]+\.json|(eval_rows|moved)\.jsonl|scores\.parquet|report\.html")
"""Files that are written under a temporary name, then renamed."""


class RunDirectory:
    """Writes the files of a run. They can be read at any time: each is replaced atomically or appended by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse_if_used(self) -> None:
        """Check that the directory is empty or absent.

        Raises:
            OutputExistsError: if it contains anything but the files that a kill at the start leaves.
        """
        path = self.path
        if path.is_symlink() and not path.exists():
            raise OutputExistsError(f"{path} is a symbolic link to {os.readlink(path)}, which does not exist. Create "
                                    "that directory, or choose another one with --output.")
        try:
            if not path.exists() or (path.is_dir() and all(_is_left_over(entry.name) for entry in path.iterdir())):
                return
        except OSError as error:
            raise OutputError.because(path, error, what="cannot be read") from error
        on = f", or resume the run in it: tropism resume {shlex.quote(str(path))}" if self.holds_run else ""
        what = "not empty" if path.is_dir() else "not a directory"
        raise OutputExistsError(f"{path} exists and is {what}. Choose another directory, such as --output "
                                f"{free_name(path)}{on}")

    def check_resume(self, resume: str) -> Path | None:
        """Check that a run can start or resume here.

        Args:
            resume: `never`, `auto`, or the run's directory or one of its checkpoints.

        Returns:
            The checkpoint that the user named; None otherwise.

        Raises:
            OutputExistsError: if the directory holds other files, or a run and `resume` is `never`; if a file of the
                run is a link, pipe or device.
            UsageError: if `resume` is neither the run directory nor a checkpoint in it, or there is no run.
        """
        self.check_kinds()
        named = None
        if resume not in ("auto", "never"):
            named = Path(resume).expanduser().resolve()
            if named != self.path.resolve() and named.parent != self.checkpoints.resolve():
                raise UsageError(f"--resume {resume} is neither {self.path} nor a checkpoint in it. A run resumes in "
                                 "its own directory, so pass that directory as --output.")
            if not self.holds_run:
                raise UsageError(f"{self.path}: no run to resume: config.yaml and manifest.json not found")
        if resume == "never" or not self.holds_run:
            self.refuse_if_used()
        return named if named is not None and named.parent == self.checkpoints.resolve() else None

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return (any((self.path / name).exists() for name in ("config.yaml", "manifest.json"))
                or any(self.path.glob("checkpoints/step-*/COMPLETE")))

    def check_kinds(self) -> None:
        """Check, before any is opened, that the files and directories of a run are files and directories. The run
        directory itself may be reached through a link.

        Raises:
            OutputExistsError: naming the first pipe, link or device.
        """
        for name in _FILES:
            check_kind(self.path / name)
        for place in (*(self.path / name for name in _DIRECTORIES), *self.path.glob("checkpoints/step-*")):
            check_kind(place, directory=True)

    def check_owned(self) -> None:
        """Check that this process still owns the directory, if it took it.

        Raises:
            OutputError: if the directory is gone, or another process took over.
        """
        check_owned(self.path)

    def create(self) -> None:
        """Create the directory if absent, check that it can be written, and remove incomplete files of a killed run.

        Raises:
            OutputError: if it cannot be created or written.
        """
        check_writable(self.path)
        try:
            for entry in self.path.iterdir():
                if _is_temporary(entry.name):
                    entry.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError.because(self.path, error) from error

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> tuple[Path, ...]:
        """Files that grow line by line."""
        return tuple(self.path / name for name in GROWING)

    def offsets(self) -> dict[str, int]:
        """Current sizes of the growing files."""
        return {file.name: file.stat().st_size for file in self.logs if file.exists()}

    def truncate(self, offsets: dict[str, int]) -> None:
        """Truncate the growing files to earlier sizes. Files without one are deleted.

        Raises:
            OutputError: if the disk refuses.
        """
        self.check_owned()
        for file in self.logs:
            try:
                if not file.exists():
                    continue
                if file.name in offsets:
                    os.truncate(file, offsets[file.name])
                else:
                    file.unlink()
            except OSError as error:
                raise OutputError(f"{file}: cannot be written: {error.strerror}") from error

    def records(self) -> list[dict[str, Any]]:
        """Records of `metrics.jsonl` so far, without an incomplete last line.

        Raises:
            DataError: for a damaged line.
        """
        return [record for _, record in read_log(self.path / "metrics.jsonl")]

    @property
    def model(self) -> Path:
        """Directory of the trained model."""
        return self.path / "model"

    def write_config(self, options: dict[str, Any]) -> None:
        """Write `config.yaml`: every option with its value."""
        self._replace("config.yaml", yaml.safe_dump(options, sort_keys=False, allow_unicode=True))

    def write_json(self, name: str, value: Any) -> None:
        """Write or replace a JSON file."""
        self._replace(name, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_lines(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        """Write or replace `eval_rows.jsonl` or `moved.jsonl`."""
        self._replace(name, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def write_profile(self, trace: str) -> None:
        """Write or replace `profile.json`."""
        self._replace(PROFILE, trace)

    def remove(self, name: str) -> None:
        """Remove a file of an earlier attempt, if it exists.

        Raises:
            OutputError: if the disk refuses.
        """
        check_owned(self.path, self.path / name)
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise OutputError.because(self.path / name, error, what="cannot be removed") from error

    def append_record(self, record: dict[str, Any]) -> None:
        """Append to `metrics.jsonl`. Non-finite values are written as null."""
        finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                  for key, value in record.items()}
        self._append("metrics.jsonl", finite)

    def append_lines(self, name: str, values: Iterable[dict[str, Any]]) -> None:
        """Append lines to one of the growing files."""
        assert name in GROWING
        for value in values:
            self._append(name, value)

    def _append(self, name: str, value: dict[str, Any]) -> None:
        check_owned(self.path, self.path / name)
        append_line(self.path / name, json.dumps(value, ensure_ascii=False))

    def _replace(self, name: str, text: str) -> None:
        check_owned(self.path, self.path / name)
        write_whole(self.path / name, text.encode(errors="backslashreplace"))  # a path need not be UTF-8


def _is_temporary(name: str) -> bool:
    return _REPLACED.fullmatch(meant_by(name) or "") is not None


def _is_left_over(name: str) -> bool:
    return name in ("lock", GUARD, BEGUN) or _is_temporary(name)


def free_name(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that does not exist."""
    if not path.exists():
        return path
    number = 2
    path = path if path.name not in ("", "..") else path.resolve()
    while (candidate := path.parent / f"{path.name}-{number}").exists():
        number += 1
    return candidate
