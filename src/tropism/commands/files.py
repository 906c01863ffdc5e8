"""Files that commands write besides models: checked before the work, written whole or not at all."""

import json
from pathlib import Path
from typing import Any

from tropism.errors import UsageError
from tropism.files import check_output, descriptor, is_stream, output
from tropism.observe.console import Voice
from tropism.printable import json_text

_PARTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "adapter_config.json", "manifest.json", "audit.json", "export.json")
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


def check_reports(*paths: Path | None, inputs: str = "", beside: Path | None = None) -> None:
    """Check before the work that the files of `--json` and `--html` can be written.

    Args:
        inputs: what the command reads, separated by commas; names that are no local files are ignored.
        beside: another file that the command writes.

    Raises:
        UsageError: if two of them are the same file.
            Or if one is a file that the command reads.
        OutputError: if one cannot be written.
    """
    given = [path for path in paths if path is not None]
    read = [Path(name.strip()).expanduser() for name in inputs.split(",") if name.strip()]
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
