"""Files of the store: written under another name, then renamed, so that a killed run leaves whole files only."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from tropism.errors import OutputError


def publish(directory: Path, meta: dict[str, Any], name: str, content: bytes, what: str) -> None:
    """Put a file into a directory of the store, which is made with its `meta.json` if it is new.

    Args:
        meta: what a person wants to know of the directory; written once.
        name: of the file.
        what: whose store this is, for the error.

    Raises:
        OutputError: if the disk refuses.
    """
    temporary = directory / f".{name}.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "meta.json").exists():
            temporary.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            temporary.replace(directory / "meta.json")
        temporary.write_bytes(content)
        temporary.replace(directory / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OutputError(f"{directory}: the {what} store cannot be written: {error.strerror}") from error
