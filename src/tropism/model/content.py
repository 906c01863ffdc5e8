"""Hashes of the files that a model is loaded from, without loading it."""

import hashlib
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tropism.errors import ModelError, first_line
from tropism.model.source import ModelSource

_SETTINGS = ("config.json", "generation_config.json", "adapter_config.json", "*.index.json", "tokenizer*.json",
             "added_tokens.json", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
             "chat_template*", "additional_chat_templates/*.jinja", "*.py")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_OLD_WEIGHTS = ("pytorch_model*.bin*",)

_COMMIT = re.compile("[0-9a-f]{40}")
_WHOLE_BYTES = 512 * 2**20
"""Weights of at most this size are read completely, and samples of larger ones."""

_PART_BYTES = 2**20
_SAMPLES = 8192
_SAMPLE_BYTES = 2**14


class ModelFile(NamedTuple):
    """A file that a model is loaded from.

    Args:
        name: within its model.
        path: here.
        hash: of its content.
    """

    name: str
    path: Path
    hash: str


def model_files(source: ModelSource) -> list[ModelFile]:
    """The files of a model directory or GGUF file that decide what is loaded: config, tokenizer, template, code and
    weights. Those of an adapter are not among them.

    Weights of more than 512 MiB are sampled: 16 KiB at every MiB, and at 8192 places if there are more than 8 GiB.

    Raises:
        ModelError: if a file cannot be read.
    """
    directory = Path(source.name)
    if source.gguf_file is not None:
        return _hashed([], [directory / source.gguf_file])
    named = source.base.weight_files()
    weights = _matching(directory, _OLD_WEIGHTS) if named is None else sorted(map(Path, set(named.values())))
    return _hashed(_matching(directory, _SETTINGS), weights)


def adapter_files(directory: str | Path) -> list[ModelFile]:
    """The same of an adapter's directory."""
    return _hashed(_matching(Path(directory), _SETTINGS), _matching(Path(directory), _ADAPTERS))


def revision_of(source: ModelSource) -> str:
    """The commit of a model on the Hub; empty if it is not found, which loading reports."""
    try:
        found = source.find("config.json")
    except (OSError, ValueError):
        return ""
    return Path(found).parent.name if found else ""


def pinned(source: ModelSource) -> ModelSource:
    """The source at the commit that its revision names now. A local one, or one that is not found, is unchanged."""
    if source.gguf_file or Path(source.name).is_dir():
        return source
    commit = revision_of(source)
    return replace(source, revision=commit) if _COMMIT.fullmatch(commit) else source


def _matching(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def _hashed(settings: list[Path], weights: list[Path]) -> list[ModelFile]:
    try:
        total = sum(path.stat().st_size for path in weights)
        spacing = 0 if total <= _WHOLE_BYTES else max(_PART_BYTES, total // _SAMPLES)
        with ThreadPoolExecutor() as pool:
            return [ModelFile(path.name, path, _hash(path, spacing if path in weights else 0, pool))
                    for path in (*weights, *settings)]
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror or first_line(error)}") from error


def _hash(path: Path, spacing: int, pool: ThreadPoolExecutor) -> str:
    """Hash of a file's size and of the checksums of its regions, which threads compute at once.

    CRC-32 is twice as fast as a hash, and the files come from the user.

    Args:
        spacing: distance between the samples; 0 to read all of it.
    """
    size = path.stat().st_size
    regions = _regions(size, spacing)
    sums = pool.map(partial(_checksum, path), regions)
    return hashlib.blake2b(repr((size, list(sums))).encode(), digest_size=16).hexdigest()


def _regions(size: int, spacing: int) -> list[tuple[int, int]]:
    """(start, length) of the regions of a file that are read; samples include the first bytes and the last."""
    if not spacing:
        return [(start, _PART_BYTES) for start in range(0, size, _PART_BYTES)]
    return [*((start, _SAMPLE_BYTES) for start in range(0, size, spacing)),
            (max(0, size - _SAMPLE_BYTES), _SAMPLE_BYTES)]


def _checksum(path: Path, region: tuple[int, int]) -> int:
    start, length = region
    with path.open("rb") as file:
        file.seek(start)
        return zlib.crc32(file.read(length))
