"""Writes files of the store under a temporary name, then renames them. A killed run leaves complete files only."""

import json
from pathlib import Path
from typing import Any

from tropism.files import write_whole


def publish(directory: Path, meta: dict[str, Any], name: str, content: bytes, what: str) -> None:
    """Write a file into a directory of the store, which is created with its `meta.json` if it is new.

    Args:
        meta: description of the directory for people; written once.
        name: of the file.
        what: name of the store in the error.

    Raises:
        OutputError: if the file cannot be written.
    """
    failure = f"the {what} store cannot be written"
    if not (directory / "meta.json").exists():
        write_whole(directory / "meta.json", (json.dumps(meta, indent=2) + "\n").encode(), failure,
                    parents=True)
    write_whole(directory / name, content, failure)
