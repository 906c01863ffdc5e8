"""Which model a name means: a directory, a hub id, a GGUF file, an adapter."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from tropism.errors import ModelError
from tropism.model.adapters import files as adapter_files
from tropism.model.options import is_adapter
from tropism.observe.console import Voice


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: a directory or hub id, a GGUF file in it where that is what was named, and an adapter
    where that is what was named: the others are then its base. `look` is called with the base when it is loaded, before
    the adapter is merged into it."""

    name: str
    gguf_file: str | None = None
    adapter: str | None = None
    look: Callable[[Any], None] | None = None

    @classmethod
    def of(cls, name: str) -> "ModelSource":
        """Understand what a user named.

        Raises:
            ModelError: if it looks like a local path and is not there.
        """
        path = Path(name).expanduser()
        if path.suffix.lower() == ".gguf":
            if not path.is_file():
                raise ModelError(f"{name}: no such GGUF file")
            return cls(str(path.resolve().parent), path.name)
        if path.is_dir():
            if is_adapter(path):
                return cls._of_adapter(path.resolve())
            if not (path / "config.json").is_file():
                if (path / "manifest.json").is_file():
                    raise ModelError(f"{name}: is a run; " + (f"name its result: {path / 'model'}" if (
                        path / "model").is_dir() else "it has no result yet"))
                ggufs = sorted(file.name for file in path.glob("*.gguf"))
                hint = f"; name the file: {path / ggufs[0]}" if ggufs else ""
                raise ModelError(f"{name}: no config.json in this directory{hint}")
            return cls(str(path.resolve()))
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or " " in name:
            raise ModelError(f"{name}: no such directory, and not a hub id (owner/name)")
        if path.parent.is_dir():
            _say_missing(name)
        return cls(name)

    @classmethod
    def _of_adapter(cls, path: Path) -> "ModelSource":
        base = adapter_files.base_of(path)
        try:
            return replace(cls.of(base), adapter=str(path))
        except ModelError as error:
            raise ModelError(f"{path}: an adapter of {base}, which is not to be found ({error}); "
                             f"{adapter_files.advice(path)}") from None

    @property
    def base(self) -> "ModelSource":
        """The same without the adapter."""
        return replace(self, adapter=None)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments for transformers' loaders."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}

    @property
    def absolute(self) -> str:
        """The name under which another process finds it."""
        return self.adapter or (str(Path(self.name) / self.gguf_file) if self.gguf_file else self.name)


@cache
def _say_missing(name: str) -> None:
    """Say of what may be a mistyped path, or a hub id, that it is no directory before the hub is asked for it."""
    with suppress(ValueError):  # no hub id either, which loading says
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    voice = Voice(loud=os.environ.get("RANK", "0") == "0")
    voice.warn(f"{name}: no such directory, though {Path(name).parent} is one; looked for as a hub id (owner/name)")
