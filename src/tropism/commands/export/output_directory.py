"""The exported directory: written whole or not at all, and read back before it gets its name."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from tropism.errors import OutputError, UsageError, first_line
from tropism.files import system_errors
from tropism.options import size_bytes


def shard_bytes(size: str | int) -> int:
    """A size in bytes: `5GB`, `500MB`, `2GiB`, or a number.

    Raises:
        UsageError: for anything else.
    """
    try:
        count = size_bytes(size)
    except ValueError as error:
        raise UsageError(f"--max-shard-size {error}") from None
    if count < 1:
        raise UsageError(f"--max-shard-size {size}: not a valid size. It must be at least 1 byte.")
    return count


@contextmanager
def whole(path: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary directory next to the target. It takes the target's name on success and is removed on failure.

    Raises:
        OutputError: if the disk refuses.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
        partial.mkdir(parents=True)
        with system_errors():
            yield partial
        for file in (*partial.rglob("*"), partial):
            _sync(file)
        partial.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # before the free bytes are counted
        raise OutputError.because(path, error, needed_bytes, "the model could not be written") from error
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_tensors(files: list[Path], dtype: torch.dtype) -> None:
    """Check that every floating-point tensor in the files has one dtype.

    Raises:
        OutputError: naming a tensor that does not.
    """
    for file in files:
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118  (not a dict)
                found = content.get_tensor(name)
                if found.is_floating_point() and found.dtype != dtype:
                    raise OutputError(f"{file.name}: {name} is {found.dtype}, not {dtype}")


def read_back(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Load a directory with transformers, and compare every weight with the one that was written.

    Args:
        weights: by their names in the model; tied ones under both names.

    Raises:
        OutputError: naming the first weight that is missing, changed or unexpected.
    """
    check_tensors(sorted(path.glob("*.safetensors")), dtype)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", output_loading_info=True, trust_remote_code=trust_remote_code)
    except (ValueError, RuntimeError, KeyError, ImportError) as error:
        raise unreadable(first_line(error)) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found := report.get(kind):
            raise unreadable(f"{kind.replace('_', ' ')}: {sorted(map(str, found))[0]}")
    if model.config.dtype != dtype:
        raise unreadable(f"config.json has dtype {model.config.dtype}, not {dtype}")
    there: dict[str, Any] = model.state_dict()
    if there.keys() != weights.keys():
        raise unreadable(f"missing or unexpected weight: {min(there.keys() ^ weights.keys())}")
    for name, weight in weights.items():
        if not torch.equal(there[name].to(weight.dtype), weight):
            raise unreadable(f"{name} has different values")


def unreadable(what: str) -> OutputError:
    """The error of an export that does not read back."""
    return OutputError(f"the export failed verification and was removed: {what}")
