"""Files that commands write besides models: checked before the work, written whole or not at all."""

import json
from pathlib import Path
from typing import Any

from tropism.errors import UsageError
from tropism.files import check_writable, write_whole
from tropism.printable import json_text


def check_new(path: Path) -> None:
    """Check before the work that a file does not exist and can be written.

    Raises:
        UsageError: if it exists.
        OutputError: if it cannot be written.
    """
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} already exists and was not changed. Choose another name, or remove the file.")
    check_writable(path.parent, path)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; its directory is created.

    Raises:
        OutputError: if the disk refuses.
    """
    write_whole(path, text.encode(errors="backslashreplace"), parents=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write what `--json` asks for. Shown in a terminal, nothing in it acts on the terminal.

    Raises:
        OutputError: if the disk refuses.
    """
    write_text(path, json_text(json.dumps(content, indent=2, ensure_ascii=False)) + "\n")
