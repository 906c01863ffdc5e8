"""Files of the store: written under another name, then renamed, so that a killed run leaves whole files only."""

import json
from pathlib import Path
from typing import Any

from tropism.files import write_whole


def publish(directory: Path, meta: dict[str, Any], name: str, content: bytes, what: str) -> None:
    """Put a file into a directory of the store, which is made with its `meta.json` if it is new.

    Args:
        meta: what a person wants to know of the directory; written once.
        name: of the file.
        what: whose store this is, for the error.

    Raises:
        OutputError: if the disk refuses.
    """
    failure = f"the {what} store cannot be written"
    if not (directory / "meta.json").exists():
        write_whole(directory / "meta.json", (json.dumps(meta, indent=2) + "\n").encode(), failure,
                    parents=True)
    write_whole(directory / name, content, failure)
