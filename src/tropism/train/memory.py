"""Memory of the process: what it peaked at, and how the C library hands it out."""

import ctypes
import resource
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST, _SMALLEST = 2**30, 2**20


def keep_freed_memory(keep: bool = True) -> None:
    """Let glibc reuse freed tensors instead of returning each to the kernel; or return each of a MiB and more at once,
    where whole layers come and go and would leave gaps that nothing fits.

    By default every tensor above some hundred KiB is mapped and unmapped anew, and the kernel zeroes its pages at
    first touch: on a CPU that costs more than the element-wise operations themselves. Elsewhere than on glibc this
    does nothing. A user's own MALLOC_* or GLIBC_TUNABLES settings of these thresholds are overruled.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST if keep else _SMALLEST)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST if keep else _SMALLEST)


def peak_gib(device: torch.device) -> float:
    """Peak memory so far in GiB: of the GPU, or resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * per_unit / 2**30
