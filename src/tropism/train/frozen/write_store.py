"""Writes files of scores, and reads the description beside them."""

import json
import shlex
from pathlib import Path
from typing import Any

from tropism import store
from tropism.store import META

_META_BYTES = 2**16
_TEXT_CHARACTERS = 200


def publish(directory: Path, meta: dict[str, Any], name: str, content: bytes, what: str) -> None:
    """Write a file into a directory of the store, which is created with its description if it is new.

    Args:
        meta: description of the directory for people; written once.
        name: of the file.
        what: name of the store in the error.

    Raises:
        OutputError: if the file cannot be written.
    """
    failure = f"the {what} store cannot be written"
    if not (directory / META).exists():
        store.write(directory / META, (json.dumps(meta, indent=2) + "\n").encode(), failure)
    store.write(directory / name, content, failure)


def advice(root: Path) -> str:
    """How to get rid of scores that cannot be used."""
    return f"Remove the stored scores with: tropism store clean --store {shlex.quote(str(root))}"


def described(directory: Path) -> dict[str, str]:
    """The texts of a description, at most so long; empty if it is missing or damaged."""
    path = directory / META
    if not store.is_file(path):
        return {}
    try:
        with path.open("rb") as file:
            meta = json.loads(file.read(_META_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    texts = meta if isinstance(meta, dict) else {}
    return {name: value[:_TEXT_CHARACTERS] for name, value in texts.items() if isinstance(value, str)}
