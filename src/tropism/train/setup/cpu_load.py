"""Notes on CPUs that other programs share, where threads wait for each other."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tropism.errors import count_of

_CGROUP = Path("/sys/fs/cgroup")


def cpu_notes(threads: int, processes: int) -> Iterator[str]:
    """Why the threads of a run may have to wait for a core, and what to do.

    Args:
        threads: of a process.
        processes: of the run on this machine.
    """
    cores, limit, wanted = usable_cores(), cpu_limit(), threads * processes
    fewer = f"Set OMP_NUM_THREADS={max(1, int(min(cores, limit or cores) // processes))}"
    of_run = count_of(wanted, "thread") + (f" in {processes} processes" if processes > 1 else "")
    if limit is not None and limit < min(wanted, cores):
        yield (f"this container may use {limit:.3g} CPUs, but the run has {of_run}, which then wait for each other. "
               f"{fewer}, or raise the limit.")
    elif cores < wanted:
        yield f"the run has {of_run}, but only {count_of(cores, 'core')}, so that threads wait for each other. {fewer}."
    load = mean_load()
    if load is not None and load > cores:
        yield (f"other programs use this machine: its load is {load:.1f}, with {count_of(cores, 'core')}. Steps take "
               "longer until they end.")


def cpu_limit() -> float | None:
    """CPUs that the container may use; None without a limit."""
    with suppress(OSError, ValueError, IndexError, ZeroDivisionError):  # version 2, which has `max` for no limit
        quota, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()[:2]
        return int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):  # version 1, which has -1
        quota, period = ((_CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text(encoding="ascii")
                         for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def mean_load() -> float | None:
    """Mean number of threads that wanted a core in the last minute; None on systems that do not say."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
