"""The run directory: a contract that training writes and everything else reads."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tropism.errors import OutputError, OutputExistsError


class RunDirectory:
    """Writes the files of a run. Files that are read while a run goes on are replaced whole or appended by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse_if_used(self) -> None:
        """Stop before anything is spent.

        Raises:
            OutputExistsError: if the directory holds anything already.
        """
        path = self.path
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise OutputExistsError(f"{path} exists and is not empty; nothing was changed. Choose another place: "
                                    f"--output {free_name(path)}")

    def create(self) -> None:
        """Make the directory.

        Raises:
            OutputExistsError: if it holds anything already.
            OutputError: if it cannot be made or written.
        """
        self.refuse_if_used()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error

    @property
    def model(self) -> Path:
        """Where the result goes."""
        return self.path / "model"

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A directory for what is kept after a step; it counts only with its COMPLETE file, written last.

        Raises:
            OutputError: if the disk refuses.
        """
        path = self.path / "checkpoints" / f"step-{step:08d}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            yield path
            (path / "COMPLETE").touch()
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from error

    def write_config(self, options: dict[str, Any]) -> None:
        """`config.yaml`: every option with its value."""
        self._replace("config.yaml", yaml.safe_dump(options, sort_keys=False, allow_unicode=True))

    def write_json(self, name: str, value: Any) -> None:
        """A JSON file, replaced whole."""
        self._replace(name, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def append_record(self, record: dict[str, Any]) -> None:
        """One line of `metrics.jsonl`. A value that is not finite is written as null, and so is visible."""
        finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                  for key, value in record.items()}
        self._append("metrics.jsonl", finite)

    def append_sample(self, sample: dict[str, Any]) -> None:
        """One line of `samples.jsonl`."""
        self._append("samples.jsonl", sample)

    def _append(self, name: str, value: dict[str, Any]) -> None:
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(value, ensure_ascii=False) + "\n")
        except OSError as error:
            raise OutputError(f"{self.path / name}: cannot be written: {error.strerror}") from error

    def _replace(self, name: str, text: str) -> None:
        target = self.path / name
        temporary = target.with_name(f".{name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)
        except OSError as error:
            raise OutputError(f"{target}: cannot be written: {error.strerror}") from error


def free_name(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that does not exist."""
    if not path.exists():
        return path
    number = 2
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate
