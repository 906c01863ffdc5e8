"""CPU, memory and GPUs as torch sees them, and what a run would use. Imported only if torch and transformers are."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from tropism.errors import first_line
from tropism.model.cpu_products import available as has_onednn
from tropism.model.cpu_products import maker
from tropism.model.weights_check import machine_memory
from tropism.store import size_text
from tropism.train.planning.memory import available
from tropism.train.setup.cpu_load import cpu_limit, cpu_notes, mean_load, usable_cores

_CPU_INFO, _DRIVER = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_LITTLE = 2**30  # bytes of memory
_FAST_BF16 = (8, 0)  # capability that torch's variable-length attention needs


def cpu(notes: list[str]) -> dict[str, Any]:
    """The CPU. `notes` gets why threads would wait."""
    notes += cpu_notes(torch.get_num_threads(), 1)
    text = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.is_file() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    return {"model": model[1] if model else platform.processor() or platform.machine(), "cores": usable_cores(),
            "limit": cpu_limit(), "threads": torch.get_num_threads(), "load": mean_load(),
            "instructions": [flag for flag in _FLAGS if flags and flag in flags[1].split()],
            "torch_uses": torch.backends.cpu.get_cpu_capability()}


def memory(notes: list[str]) -> dict[str, int]:
    """Memory of the machine or the container. `notes` gets a remedy if little is available."""
    there = available(torch.device("cpu"))
    if there < _LITTLE:
        notes.append(f"only {size_text(there)} of memory are available. End other programs, or raise the limit of the "
                     "container.")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"machine_bytes": machine, "usable_bytes": machine_memory(), "available_bytes": there}


def cuda(faults: list[str], notes: list[str]) -> dict[str, Any]:
    """What torch was built for, and the driver.

    Args:
        faults: gets why torch cannot use the GPUs of this machine.
        notes: gets that it is a torch for CPUs.
    """
    text = _read(_DRIVER / "version")
    driver = re.search(r"Kernel Module\D*([\d.]+)", text)
    found = {"built_for": f"CUDA {torch.version.cuda}" if torch.version.cuda else
             f"ROCm {torch.version.hip}" if torch.version.hip else "CPU", "driver": driver[1] if driver else None,
             "nccl": _nccl(), "usable": torch.cuda.is_available()}
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not _has_nvidia() or hidden or found["usable"]:
        return found
    if found["built_for"] == "CPU":
        notes.append("this machine has an NVIDIA GPU, but the installed torch is for CPUs. Install the one for CUDA: "
                     "https://pytorch.org/get-started/locally")
        return found
    faults.append(f"torch cannot use the GPU of this machine: {_why()}. Its {found['built_for']} needs a matching "
                  f"driver, and {found['driver'] or 'an unknown version'} is installed. Install a newer driver, or "
                  "a torch for an older CUDA. To use the CPU, set CUDA_VISIBLE_DEVICES= (empty).")
    return found


def gpus(faults: list[str], notes: list[str]) -> list[dict[str, Any]]:
    """Each GPU that torch can use."""
    found: list[dict[str, Any]] = []
    if not torch.cuda.is_available():
        return found
    for index in range(torch.cuda.device_count()):
        try:
            facts = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            torch.zeros(1, device=f"cuda:{index}").add_(1).cpu()
        except RuntimeError as error:
            faults.append(f"GPU {index} cannot be used: {first_line(error)}. Leave it out with CUDA_VISIBLE_DEVICES, "
                          "or restart its driver.")
            continue
        capability = (facts.major, facts.minor)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        found.append({"index": index, "name": facts.name, "memory_bytes": total, "free_bytes": free,
                      "capability": f"{facts.major}.{facts.minor}", "bf16": bf16})
        if not bf16 or capability < _FAST_BF16:
            notes.append(f"GPU {index} ({facts.name}) has no fast bf16, which is the default precision on GPUs. Use "
                         "--precision fp32.")
    return found


def would_use(devices: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run with default options uses on this machine."""
    if devices:
        triton = _has_triton()
        return {"device": "cuda", "precision": "bf16",
                "attention": "varlen_attn; FlexAttention for soft caps and sinks",
                "head": "Triton kernels" if triton else "torch", "products": "cuBLAS",
                "processes": f"one, or torchrun --nproc-per-node {len(devices)}" if len(devices) > 1 else "one"}
    trial = torch.backends.mkl.is_available() and maker() != "GenuineIntel" and has_onednn()
    return {"device": "cpu", "precision": "fp32", "attention": "scaled_dot_product_attention", "head": "torch",
            "products": "oneDNN or MKL, by a trial at the start of a run" if trial else
            "MKL" if torch.backends.mkl.is_available() else "torch", "processes": "one"}


def _has_triton() -> bool:
    try:
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
    except Exception:
        return False
    return True


def _has_nvidia() -> bool:
    return any((_DRIVER / "gpus").glob("*")) or Path("/dev/nvidia0").exists()


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None


def _why() -> str:
    """Why CUDA cannot start."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error).rstrip(".")
    return "CUDA reports no device"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
