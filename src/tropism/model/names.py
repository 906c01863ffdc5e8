"""Finds what a user named as a model, without torch: wrong paths are reported before it is imported."""

import re
from pathlib import Path

from tropism.errors import ModelError, UsageError
from tropism.model.options import is_adapter

_WITH_REVISION = re.compile(r"([\w.-]+/[\w.-]+)@(\w[\w./-]*)", re.ASCII)


def split_revision(name: str) -> tuple[str, str | None]:
    """A Hub id and the branch, tag or commit after it: `owner/name@revision`. Other names have none."""
    found = _WITH_REVISION.fullmatch(name)
    return (name, None) if found is None or Path(name).exists() else (found[1], found[2])


def find_model(name: str) -> Path | None:
    """The directory or GGUF file of a model or adapter; None for a name to look up on the Hub.

    Raises:
        ModelError: if it looks like a local path and does not exist, or is no model.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"{name}: GGUF file not found")
        return path
    if path.is_dir():
        if not is_adapter(path) and not (path / "config.json").is_file():
            if (path / "manifest.json").is_file():
                raise ModelError(f"{name} is a run directory, not a model" + (
                    f". Use its model, {path / 'model'}" if (path / "model").is_dir() else
                    ", and it has no trained model yet"))
            ggufs = sorted(file.name for file in path.glob("*.gguf"))
            hint = f". To use the GGUF file, name it: {path / ggufs[0]}" if ggufs else ""
            raise ModelError(f"{name}: config.json not found in this directory{hint}")
        return path
    hub_id, _ = split_revision(name)
    if path.is_absolute() or name.startswith((".", "~")) or hub_id.count("/") != 1 or " " in name:
        raise ModelError(f"{name}: directory not found, and not a valid Hub id (owner/name or owner/name@revision)")
    return None


def find_adapter(name: str) -> Path:
    """The directory of an adapter to train further.

    Raises:
        UsageError: if it is not found, or is no adapter.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UsageError(f"--lora.adapter {name}: directory not found")
    if not (path / "adapter_config.json").is_file():
        hint = f". For the adapter of this run, use {path / 'model'}" if is_adapter(path / "model") else ""
        raise UsageError(f"--lora.adapter {name}: adapter_config.json not found{hint}")
    return path
