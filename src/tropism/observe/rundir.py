"""The run directory: a contract that training writes and everything else reads."""

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tropism.errors import OutputError, OutputExistsError
from tropism.files import append_line, check_writable, meant_by, write_whole
from tropism.observe.lock import BEGUN, GUARD

GROWING = ("metrics.jsonl", "samples.jsonl", "notices.jsonl", "skipped.jsonl")
"""Files of a run that grow line by line; a run that goes on cuts them back to where it goes on."""

_REPLACED = re.compile(r"config\.yaml|writable|[a-z]+\.json")
"""What is written under another name first, and then renamed."""


class RunDirectory:
    """Writes the files of a run. Files that are read while a run goes on are replaced whole or appended by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse_if_used(self) -> None:
        """Stop before anything is spent.

        Raises:
            OutputExistsError: if the directory holds anything, but what a kill leaves before a run has begun.
        """
        path = self.path
        if path.exists() and (not path.is_dir() or not all(_is_left_over(entry.name) for entry in path.iterdir())):
            on = f", or go on with the run that is there: tropism resume {path}" if self.holds_run else ""
            raise OutputExistsError(f"{path} exists and is not empty; nothing was changed. Choose another place: "
                                    f"--output {free_name(path)}{on}")

    @property
    def holds_run(self) -> bool:
        """Whether a run began here, however far it came."""
        return any((self.path / name).exists() for name in ("config.yaml", "manifest.json"))

    def create(self) -> None:
        """Make the directory, or look whether the one that is there can be written. What a kill left half written goes.

        Raises:
            OutputError: if it cannot be made or written.
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
        """Where the run is kept on the way."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> tuple[Path, ...]:
        """Files that grow line by line."""
        return tuple(self.path / name for name in GROWING)

    def offsets(self) -> dict[str, int]:
        """How long the files are that grow."""
        return {file.name: file.stat().st_size for file in self.logs if file.exists()}

    def truncate(self, offsets: dict[str, int]) -> None:
        """Cut the files that grow back to what they were; one that is not named goes.

        Raises:
            OutputError: if the disk refuses.
        """
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
        """What `metrics.jsonl` holds so far; a last line that a kill cut off is left out."""
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return []
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    @property
    def model(self) -> Path:
        """Where the result goes."""
        return self.path / "model"

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

    def append_samples(self, samples: Sequence[dict[str, Any]]) -> None:
        """Lines of `samples.jsonl`."""
        for sample in samples:
            self._append("samples.jsonl", sample)

    def append_line(self, name: str, value: dict[str, Any]) -> None:
        """One line of a file that grows."""
        assert name in GROWING
        self._append(name, value)

    def _append(self, name: str, value: dict[str, Any]) -> None:
        append_line(self.path / name, json.dumps(value, ensure_ascii=False))

    def _replace(self, name: str, text: str) -> None:
        write_whole(self.path / name, text.encode())


def _is_temporary(name: str) -> bool:
    return _REPLACED.fullmatch(meant_by(name) or "") is not None


def _is_left_over(name: str) -> bool:
    return name in ("lock", GUARD, BEGUN) or _is_temporary(name)


def free_name(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that does not exist."""
    if not path.exists():
        return path
    number = 2
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate
