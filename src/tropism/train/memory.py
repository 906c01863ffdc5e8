"""Memory of the process: its peak, and how the C library allocates it."""

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST, _SMALLEST = 2**30, 2**20
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def keep_freed_memory(keep: bool = True) -> None:
    """Let glibc reuse freed tensors instead of returning each to the kernel.

    By default every tensor above some hundred KiB is mapped and unmapped again, and the kernel zeroes its pages at
    first touch. On a CPU that costs more than the element-wise operations themselves. Without glibc this does
    nothing. It overrides MALLOC_* and GLIBC_TUNABLES settings of these thresholds.

    Args:
        keep: False returns tensors of 1 MiB and more to the kernel at once. Sharded models need this: they allocate
            and free full layers, which would leave gaps that nothing fits.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST if keep else _SMALLEST)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST if keep else _SMALLEST)


def reset_peak(device: torch.device) -> None:
    """Let `peak_gib` count from now on. On a CPU only Linux can do so; elsewhere it counts from the start.

    What earlier passes left goes back to the system first.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):  # no such file, or a container that forbids it
        _CLEAR.write_text("5")


def peak_gib(device: torch.device) -> float:
    """Peak memory since `reset_peak` in GiB: of the GPU, or resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    with suppress(OSError, StopIteration):  # `ru_maxrss` begins with what the parent held when it started this program
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**20
    per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * per_unit / 2**30
