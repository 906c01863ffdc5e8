"""Processes of the command line in which a chosen file operation is the last, fails, or finds a full disk."""

import errno
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from processes import fork_server

CHANGES = frozenset(("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink",
                     "os.chmod", "os.utime"))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Fault:
    """What happens at a file operation that changes something below some directories.

    Args:
        kind: `kill` before the operation; `kill soon`: within 2 ms of it; `full`: from here on no file can be opened
            for writing or made, as on a full disk; `fail`: this one operation fails with an I/O error; `fill`: others
            fill the disk up.
        operation: number of the operation, from 1; 0 for none.
        below: directories in which operations count.
        log: file that gets the number of operations.
        memory_bytes: limit of the process's address space beyond what it has at its start; 0 for none.
        ballast: file that fills the disk up, but for `leave_bytes`.
    """

    kind: str = "kill"
    operation: int = 0
    below: tuple[str, ...] = ()
    log: str = ""
    memory_bytes: int = 0
    ballast: str = ""
    leave_bytes: int = 0


def _changes(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        mode, flags = args[1], args[2]
        return bool(set(mode or "") & set("wax+")) or bool(isinstance(flags, int) and flags & _WRITES)
    return event in CHANGES


def _arm(fault: Fault) -> None:
    """Count operations by an audit hook, which sees each before it is done, and act at the chosen one."""
    count, guard = 0, threading.Lock()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event != "open" and event not in CHANGES:
            return
        if not _changes(event, args) or not str(_text(args[0])).startswith(fault.below):
            return
        with guard:
            count += 1
            number = count
        if fault.log:
            os.pwrite(log, f"{number:9}".encode(), 0)
        if fault.kind == "kill" and number == fault.operation:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "kill soon" and number == fault.operation:
            threading.Thread(target=_kill_soon, args=(number,), daemon=True).start()
        if fault.kind == "fail" and number == fault.operation:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault.kind == "fill" and number == fault.operation:
            _fill(Path(fault.ballast), fault.leave_bytes)
        if fault.kind == "full" and 0 < fault.operation <= number and event in ("open", "os.mkdir", "os.link"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = os.open(fault.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if fault.log else -1
    sys.addaudithook(hook)


def _fill(ballast: Path, leave_bytes: int) -> None:
    ballast.write_bytes(bytes(max(0, shutil.disk_usage(ballast.parent).free - leave_bytes)))


def _text(path: Any) -> str:
    return os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""


def _kill_soon(number: int) -> None:
    time.sleep((number % 7) * 3e-4)
    os.kill(os.getpid(), signal.SIGKILL)


def _child(arguments: Sequence[str], fault: Fault, output: str) -> None:
    torch.set_num_threads(1)
    out = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    from tropism.cli.app import main

    if fault.below:
        _arm(fault)
    if fault.memory_bytes:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + fault.memory_bytes,) * 2)
    code = main(list(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as a process that is asked for its exit code alone: threads of a broken run must not hold it


def _rank(rank: int, size: int, port: int, arguments: Sequence[str], faults: Sequence[Fault], output: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _child(arguments, faults[rank], f"{output}.{rank}")


def start(arguments: Sequence[object], fault: Fault = Fault(), output: Path | None = None) -> Any:
    """A process of a fork server, whose imports are done already."""
    process = fork_server().Process(target=_child, args=([str(one) for one in arguments], fault, str(output or "")))
    process.start()
    return process


def call(arguments: Sequence[object], fault: Fault = Fault(), output: Path | None = None, limit_s: float = 120,
         ) -> int | None:
    """Exit code of a process; -9 if it was killed; None if it ran longer than the limit."""
    process = start(arguments, fault, output)
    process.join(limit_s)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code


def ranks(arguments: Sequence[object], faults: Sequence[Fault], port: int, output: Path, limit_s: float = 120,
          ) -> list[int | None]:
    """Exit codes of as many ranks as there are faults; None of those that ran longer than the limit."""
    context = fork_server()
    given = [str(one) for one in arguments]
    all_of_them = [context.Process(target=_rank, args=(rank, len(faults), port, given, faults, str(output)))
                   for rank in range(len(faults))]
    for one in all_of_them:
        one.start()
    deadline = time.monotonic() + limit_s
    codes = []
    for one in all_of_them:
        one.join(max(0.0, deadline - time.monotonic()))
        codes.append(one.exitcode)
        if one.exitcode is None:
            one.kill()
            one.join()
    return codes


def operations(log: Path) -> int:
    """Number of operations that a process with that log did."""
    return int(log.read_text())
