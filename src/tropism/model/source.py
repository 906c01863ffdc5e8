"""Resolve the name of a model: a directory, a hub id, a GGUF file or an adapter."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from transformers.utils import cached_file

from tropism.borders import CONFIG_BYTES, TOKENIZER_BYTES, border, check_regular, read_object
from tropism.errors import ModelError, clause
from tropism.model.adapters import files as adapter_files
from tropism.model.config import check_generation, check_values
from tropism.model.gguf_header import check_gguf
from tropism.model.names import find_model, split_revision
from tropism.model.options import is_adapter
from tropism.observe.console import Voice

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
            "added_tokens.json", _INDEX, "pytorch_model.bin.index.json")
"""Files of a model that hold a JSON object and are small."""
_TOKENIZER = re.compile(r"(tokenizer|vocab|merges|special_tokens|chat_template|(pre)?processor).*|"
                        r".*\.(jinja|model|tiktoken)")
"""Names of the other files that a tokenizer is read from. A model's directory may also hold data of any size."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    Args:
        name: directory or hub id.
        gguf_file: file in that directory, if a GGUF file was named.
        adapter: directory of the adapter, if an adapter was named; `name` is then its base.
        revision: branch, tag or commit of a hub id; None for its main branch.
        inspect_base: called with the loaded base, before the adapter is merged into it.
    """

    name: str
    gguf_file: str | None = None
    adapter: str | None = None
    inspect_base: Callable[[Any], None] | None = None
    revision: str | None = None

    @classmethod
    def of(cls, name: str) -> "ModelSource":
        """Resolve what a user named.

        Raises:
            ModelError: if it looks like a local path and does not exist.
        """
        path = find_model(name)
        if path is None:
            hub_id, revision = split_revision(name)
            if Path(name).expanduser().parent.is_dir():
                _warn_missing(hub_id)
            return cls(hub_id, revision=revision)
        if path.is_file():
            return cls(str(path.resolve().parent), path.name)
        return cls._of_adapter(path.resolve()) if is_adapter(path) else cls(str(path.resolve()))

    @classmethod
    def _of_adapter(cls, path: Path) -> "ModelSource":
        base = adapter_files.base_of(path)
        with border(f"{path}: the adapter's base was not found"):
            below = is_adapter(base)
        if below:
            raise ModelError(f"{path}: the base of this adapter is {base}, which is an adapter itself. Merge that one "
                             f"into its own base, and name the result. {adapter_files.base_advice(path)}")
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
        return ({"gguf_file": self.gguf_file} if self.gguf_file else {}) | (
            {"revision": self.revision} if self.revision else {})

    @property
    def absolute(self) -> str:
        """The name by which another process finds it."""
        return self.adapter or (str(Path(self.name) / self.gguf_file) if self.gguf_file else self.base_name)

    @property
    def base_name(self) -> str:
        """The name of the base with its revision."""
        return f"{self.name}@{self.revision}" if self.revision else self.name

    def find(self, file: str) -> str | None:
        """The path of one of its files, downloaded if it is on the hub; None if it has no such file.

        Raises:
            OSError: if the hub cannot be asked.
        """
        found = cached_file(self.name, file, revision=self.revision, _raise_exceptions_for_missing_entries=False)
        return None if found is None else str(found)

    def check_files(self) -> None:
        """Check a local model's files before a library reads them: regular files of a plausible size, and configs that
        are JSON objects with plausible sizes in them.

        Raises:
            ModelError: with the file.
        """
        path = Path(self.name)
        if self.gguf_file:
            check_gguf(path / self.gguf_file)
        if not path.is_dir() or self.gguf_file:
            return
        for file in sorted(path.iterdir()):
            named = file.name in _OBJECTS
            if not file.is_dir() or named:
                with border(f"{file}: cannot be read"):
                    found = file.stat() if named or file.exists() else file.lstat()
                if not file.is_symlink() or file.exists():
                    check_regular(file, found)
                most = CONFIG_BYTES if named else TOKENIZER_BYTES
                if (named or _TOKENIZER.fullmatch(file.name)) and found.st_size > most:
                    raise ModelError(f"{file}: too large: at most {most / 2**20:g} MiB are read")
            if named:
                values = read_object(file)
                if file.name == "config.json":
                    check_values(values, str(file))
                elif file.name == "generation_config.json":
                    check_generation(values, str(file))

    def weight_files(self) -> dict[str, str] | None:
        """The safetensors file of each weight; None for a GGUF file, an adapter, or a model without such files.

        Raises:
            ModelError: if the files cannot be read, or the index names files outside of the model's directory.
        """
        if self.gguf_file or self.adapter:
            return None
        with border(f"{self.name}: the model could not be loaded"):
            # In transformers' order: an index beside a single file is a leftover that is not read.
            named = self._named_weights()
            for name in [named] if named else [_SINGLE, _INDEX]:
                index = self.find(name)
                if index is not None:
                    break
            else:
                return None
            if not name.endswith(".index.json"):
                with safe_open(index, framework="pt") as opened:
                    return dict.fromkeys(opened.keys(), index)
            places = _weight_map(Path(index))
            files = {file: str(cached_file(self.name, file, revision=self.revision))
                     for file in sorted(set(places.values()))}
            return {weight: files[file] for weight, file in places.items()}

    def _named_weights(self) -> str | None:
        """The file of weights, or their index, that the config names in place of the usual ones."""
        config = self.find("config.json")
        named = read_object(Path(config)).get("transformers_weights") if config else None
        return named if isinstance(named, str) and named.endswith((".safetensors", ".safetensors.index.json")) else None


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each weight, by the index of a model.

    Raises:
        ModelError: if it is anything else, or a file is not inside the model's directory.
    """
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ModelError(f"{index}: weight_map must name a file for each weight")
    for file in sorted(set(places.values())):
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts or not file.endswith(".safetensors"):
            raise ModelError(f"{index}: {file[:100]!r} is not the name of a safetensors file in this directory")
    return places


def public_name(name: str) -> str:
    """A name for others: a hub id as it is; of a file or directory its last part, without the directories and the user
    that a path tells of."""
    try:
        path = Path(name).expanduser()
        hub_id, _ = split_revision(name)
        is_path = (path.is_absolute() or name.startswith((".", "~")) or hub_id.count("/") != 1 or " " in name
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
    voice = Voice(loud=os.environ.get("RANK", "0") == "0", errors=True)  # standard output may be what a command writes
    voice.warn(f"{name}: directory not found in {Path(name).parent}; looking for it on the Hub")
