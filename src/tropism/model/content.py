"""Hashes of the files that a model is loaded from, without loading it."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers.utils import cached_file

from tropism.errors import ModelError, first_line
from tropism.model.source import ModelSource

_SETTINGS = ("config.json", "generation_config.json", "adapter_config.json", "*.index.json", "tokenizer*.json",
             "added_tokens.json", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
             "chat_template*", "additional_chat_templates/*.jinja", "*.py")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_OLD_WEIGHTS = ("pytorch_model*.bin*",)

_WHOLE_BYTES = 512 * 2**20
"""Weights of at most this size are hashed completely, and of larger ones the samples below."""

_PART_BYTES = 8 * 2**20
_SAMPLES = 64
_SAMPLE_BYTES = 2**18


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

    Weights of more than 512 MiB are sampled: 64 blocks of 256 KiB in each file, the header of the file among them.

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
        found = cached_file(source.name, "config.json", _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):
        return ""
    return Path(found).parent.name if found else ""


def _matching(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def _hashed(settings: list[Path], weights: list[Path]) -> list[ModelFile]:
    try:
        whole = sum(path.stat().st_size for path in weights) <= _WHOLE_BYTES
        with ThreadPoolExecutor() as pool:
            return [ModelFile(path.name, path, _hash(path, whole or path in settings, pool))
                    for path in (*weights, *settings)]
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror or first_line(error)}") from error


def _hash(path: Path, whole: bool, pool: ThreadPoolExecutor) -> str:
    """Hash of a file's size and of its regions, which threads hash at once."""
    size = path.stat().st_size
    hashes = pool.map(partial(_hash_of_region, path), *zip(*_regions(size, whole), strict=True))
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    for one in hashes:
        digest.update(one)
    return digest.hexdigest()


def _regions(size: int, whole: bool) -> list[tuple[int, int]]:
    """(start, length) of the regions of a file that are hashed: all of it, or samples with the first and last bytes."""
    if whole or size <= _SAMPLES * _SAMPLE_BYTES:
        return [(start, _PART_BYTES) for start in range(0, max(1, size), _PART_BYTES)]
    last = size - _SAMPLE_BYTES
    return [(last * number // (_SAMPLES - 1), _SAMPLE_BYTES) for number in range(_SAMPLES)]


def _hash_of_region(path: Path, start: int, length: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        data = bytearray(length)
        view, filled = memoryview(data), 0
        while filled < length and (got := file.readinto(view[filled:])):
            filled += got
    return hashlib.blake2b(view[:filled], digest_size=16).digest()
