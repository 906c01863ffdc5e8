"""The directory that is written: whole or not at all, and read back before it counts."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from tropism.errors import OutputError, OutputExistsError, UsageError, first_line
from tropism.observe.rundir import free_name

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
          "TIB": 2**40}
_BESIDE_WEIGHTS = 2**20  # tokenizer, configs and card: about so much, at the least


def shard_bytes(size: str | int) -> int:
    """A size in bytes: `5GB`, `500MB`, `2GiB`, or a number.

    Raises:
        UsageError: for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)?", str(size).strip().upper())
    count = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if count < 1:
        raise UsageError(f"--max-shard-size {size}: is no size; it takes 5GB, 500MB or 2GiB")
    return count


def check_target(path: Path, run: Path) -> None:
    """Find out before anything is loaded whether the directory may be written.

    Raises:
        OutputExistsError: if it holds something, or is a file.
        UsageError: if it lies among what the run keeps.
    """
    resolved = path.resolve()
    for name in ("model", "checkpoints"):
        kept = (run / name).resolve()
        if resolved == kept or kept in resolved.parents:
            raise UsageError(f"--to {path}: lies in {kept}, which belongs to the run; name another place")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OutputExistsError(f"{path} exists and is not empty; nothing was changed. Choose another place: "
                                f"--to {free_name(path)}")


def check_space(path: Path, weight_bytes: int) -> None:
    """Find out before weights are read whether the result fits on the disk.

    Raises:
        OutputError: saying how much is needed and how much is free.
    """
    needed = int(weight_bytes * 1.02) + _BESIDE_WEIGHTS
    free = shutil.disk_usage(next(place for place in path.absolute().parents if place.exists())).free
    if free < needed:
        raise OutputError(f"{path}: cannot be written: {needed:,} bytes are needed, {free:,} are free")


@contextmanager
def whole(path: Path, needed_bytes: int) -> Iterator[Path]:
    """A directory beside the one that is wanted; it takes its place when all went well, else nothing of it stays.

    Raises:
        OutputError: if the disk refuses.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir(parents=True)
        yield partial
        for file in (*partial.rglob("*"), partial):
            _sync(file)
        partial.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        failure = OutputError.because(path, error, needed_bytes, "the model could not be written")
        shutil.rmtree(partial, ignore_errors=True)
        raise failure from error
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
    """Every floating tensor in the files has one dtype.

    Raises:
        OutputError: naming one that has not.
    """
    for file in files:
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118  (it is no dict)
                found = content.get_tensor(name)
                if found.is_floating_point() and found.dtype != dtype:
                    raise OutputError(f"{file.name}: {name} is {found.dtype} and not {dtype}")


def read_back(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Load a directory as anyone would, and compare every weight with what was to be written.

    Args:
        weights: by their names in the model; of tied ones both.

    Raises:
        OutputError: naming the first weight that is not there, not as it was, or that nobody wrote.
    """
    check_tensors(sorted(path.glob("*.safetensors")), dtype)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", output_loading_info=True, trust_remote_code=trust_remote_code)
    except (ValueError, RuntimeError, KeyError, ImportError) as error:
        raise _wrong(first_line(error)) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found := report.get(kind):
            raise _wrong(f"{kind.replace('_', ' ')}: {sorted(map(str, found))[0]}")
    if model.config.dtype != dtype:
        raise _wrong(f"config.json says {model.config.dtype} and not {dtype}")
    there: dict[str, Any] = model.state_dict()
    if there.keys() != weights.keys():
        raise _wrong(f"other weights: {min(there.keys() ^ weights.keys())}")
    for name, weight in weights.items():
        if not torch.equal(there[name].to(weight.dtype), weight):
            raise _wrong(f"{name} has other values")


def _wrong(what: str) -> OutputError:
    return OutputError(f"what was written does not read back as it should, and was removed: {what}")
