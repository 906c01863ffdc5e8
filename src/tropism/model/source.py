"""Resolve the name of a model: a directory, a hub id, a GGUF file or an adapter."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from tropism.errors import ModelError, clause, first_line
from tropism.model.adapters import files as adapter_files
from tropism.model.options import is_adapter
from tropism.observe.console import Voice


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    Args:
        name: directory or hub id.
        gguf_file: file in that directory, if a GGUF file was named.
        adapter: directory of the adapter, if an adapter was named; `name` is then its base.
        inspect_base: called with the loaded base, before the adapter is merged into it.
    """

    name: str
    gguf_file: str | None = None
    adapter: str | None = None
    inspect_base: Callable[[Any], None] | None = None

    @classmethod
    def of(cls, name: str) -> "ModelSource":
        """Resolve what a user named.

        Raises:
            ModelError: if it looks like a local path and does not exist.
        """
        path = Path(name).expanduser()
        if path.suffix.lower() == ".gguf":
            if not path.is_file():
                raise ModelError(f"{name}: GGUF file not found")
            return cls(str(path.resolve().parent), path.name)
        if path.is_dir():
            if is_adapter(path):
                return cls._of_adapter(path.resolve())
            if not (path / "config.json").is_file():
                if (path / "manifest.json").is_file():
                    raise ModelError(f"{name} is a run directory, not a model" + (
                        f". Use its model, {path / 'model'}" if (path / "model").is_dir() else
                        ", and it has no trained model yet"))
                ggufs = sorted(file.name for file in path.glob("*.gguf"))
                hint = f". To use the GGUF file, name it: {path / ggufs[0]}" if ggufs else ""
                raise ModelError(f"{name}: config.json not found in this directory{hint}")
            return cls(str(path.resolve()))
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or " " in name:
            raise ModelError(f"{name}: directory not found, and not a valid Hub id (owner/name)")
        if path.parent.is_dir():
            _warn_missing(name)
        return cls(name)

    @classmethod
    def _of_adapter(cls, path: Path) -> "ModelSource":
        base = adapter_files.base_of(path)
        try:
            return replace(cls.of(base), adapter=str(path))
        except ModelError as error:
            raise ModelError(f"{path}: the adapter's base was not found: {clause(error)}. "
                             f"{adapter_files.base_advice(path)}") from None

    @property
    def base(self) -> "ModelSource":
        """The same source without the adapter."""
        return replace(self, adapter=None)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments for transformers' loaders."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}

    @property
    def absolute(self) -> str:
        """The name by which another process finds it."""
        return self.adapter or (str(Path(self.name) / self.gguf_file) if self.gguf_file else self.name)


    def weight_files(self) -> dict[str, str] | None:
        """The safetensors file of each weight; None for a GGUF file, an adapter, or a model without such files.

        Raises:
            ModelError: if the files cannot be read.
        """
        if self.gguf_file or self.adapter:
            return None
        try:
            index = cached_file(self.name, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
            if index is not None:
                places: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
                files = {file: str(cached_file(self.name, file)) for file in sorted(set(places.values()))}
                return {weight: files[file] for weight, file in places.items()}
            single = cached_file(self.name, "model.safetensors", _raise_exceptions_for_missing_entries=False)
            if single is None:
                return None
            with safe_open(single, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), str(single))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelError(f"{self.name}: the model could not be loaded: {first_line(error)}") from error


def public_name(name: str) -> str:
    """A name for others: a hub id as it is; of a file or directory its last part, without the directories and the user
    that a path tells of."""
    try:
        path = Path(name).expanduser()
        is_path = (path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or " " in name
                   or path.exists())
        return path.resolve().name if is_path else name
    except (OSError, RuntimeError, ValueError):  # no file here can have this name, as the record of another machine may
        return name.rpartition("/")[2]


@cache
def _warn_missing(name: str) -> None:
    """Warn that a name, which may be a mistyped path, is about to be looked up on the hub."""
    with suppress(ValueError):  # not a valid hub id, which loading reports
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    voice = Voice(loud=os.environ.get("RANK", "0") == "0")
    voice.warn(f"{name}: directory not found in {Path(name).parent}; looking for it on the Hub")
