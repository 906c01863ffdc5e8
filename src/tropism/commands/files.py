"""Files that commands write besides models: checked before the work, written whole or not at all."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tropism.errors import OutputExistsError, UsageError
from tropism.files import check_output, descriptor, is_stream, output
from tropism.observe.console import Voice
from tropism.observe.rundir import RunDirectory, free_name
from tropism.printable import json_text

_PARTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "adapter_config.json", "manifest.json", "audit.json", "export.json", "profile.json")
_REPORTS = (".json", ".html")
"""Other files of these kinds directly in a run directory are earlier reports, which may be replaced."""


def check_new(path: Path) -> None:
    """Check before the work that a file does not exist and can be written. Devices, pipes and open descriptors exist
    and can be written.

    Raises:
        UsageError: if it exists.
        OutputError: if it cannot be written.
    """
    if not is_stream(path) and (path.exists() or path.is_symlink()):
        raise UsageError(f"{path} already exists and was not changed. Choose another name, or remove the file.")
    check_output(path)


def check_scores(path: Path) -> None:
    """Check before the scoring that its result can be written.

    Raises:
        UsageError: for an unsupported kind of file, or one that exists.
        OutputError: if it cannot be written.
    """
    if path.suffix not in (".jsonl", ".parquet") and not is_stream(path):
        raise UsageError(f"{path}: scores are written as .jsonl or .parquet")
    check_new(path)


def check_run(path: Path, command: str) -> None:
    """Check that a run was started in a directory, and that its files are files.

    Args:
        command: that reads it, for the advice.

    Raises:
        UsageError: if not.
        OutputExistsError: for a pipe, link or device in place of a file.
    """
    if not RunDirectory(path).holds_run:
        run, hint = path.parent.parent, ""
        if (path / "COMPLETE").is_file() and (run / "manifest.json").is_file():
            chosen = f" --checkpoint {path.name}" if command == "export" else ""
            hint = f". It is a checkpoint: use `tropism {command} {shlex.quote(str(run))}{chosen}`."
        elif path.name == "model" and (path.parent / "manifest.json").is_file():
            hint = f". It is the model of a run: use `tropism {command} {shlex.quote(str(path.parent))}`."
        raise UsageError(f"{path}: not a run directory (no manifest.json){hint}" if path.exists()
                         else f"{path}: not a run directory: directory not found")
    RunDirectory(path).check_kinds()


def check_export(path: Path, run: Path, push: bool = False) -> None:
    """Check before anything is loaded that an export may be written to a directory.

    Args:
        push: an earlier export there is pushed, if it is of this run.

    Raises:
        OutputExistsError: if it is not empty, or is a file.
        UsageError: if it is inside the run's model or checkpoints.
    """
    resolved = path.resolve()
    for name in ("model", "checkpoints"):
        kept = (run / name).resolve()
        if resolved == kept or kept in resolved.parents:
            raise UsageError(f"--to {path} is inside {kept}, which belongs to the run. Choose another directory.")
    if push and (path / "export.json").is_file():
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OutputExistsError(f"{path} exists and is not empty. Nothing was changed. Choose another directory: "
                                f"--to {free_name(path)}")


def check_reports(*paths: Path | None, inputs: str = "", runs: Sequence[Path] = (), beside: Path | None = None) -> None:
    """Check before the work that the files of `--json` and `--html` can be written.

    Args:
        inputs: what the command reads, separated by commas; names that are no local files are ignored.
        runs: run directories that it reads.
        beside: another file that the command writes.

    Raises:
        UsageError: if two of them are the same file.
            Or if one is a file that the command reads.
        OutputError: if one cannot be written.
    """
    given = [path for path in paths if path is not None]
    names = [Path(name.strip()) for name in inputs.split(",") if name.strip()]
    read = [one.expanduser() for one in (*names, *runs)]
    for path in given:
        check_output(path)
        if not is_stream(path) and path.exists() and any(_belongs_to(path.resolve(), one.resolve()) for one in read):
            raise UsageError(f"{path} is read by this command, and was not changed. Choose another name.")
    files = [path.resolve() for path in (*given, *([] if beside is None else [beside])) if not is_stream(path)]
    if len(set(files)) < len(files):
        raise UsageError(f"{given[0]} is named twice. Give each output a name of its own.")


def _belongs_to(path: Path, read: Path) -> bool:
    """Whether an existing file is what is read, or a file of the model, run or data directory that is read."""
    inside = read in path.parents and (path.parent != read or path.name in _PARTS or path.suffix not in _REPORTS)
    return inside or (read.is_file() and path.samefile(read))


def voice_beside(*paths: Path | None) -> Voice:
    """A voice that prints to standard error if one of the files is standard output, so that a pipe gets that alone."""
    return Voice(errors=any(path is not None and descriptor(path) == 1 for path in paths))


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; its directory is created.

    Raises:
        OutputError: if it cannot be written.
    """
    content = text.encode(errors="backslashreplace")
    with output(path, len(content)) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write what `--json` asks for. Shown in a terminal, nothing in it acts on the terminal.

    Raises:
        OutputError: if it cannot be written.
    """
    write_text(path, json_text(json.dumps(content, indent=2, ensure_ascii=False)) + "\n")
