"""The process that a lock names, and whether it is gone."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import SoftFileLease

SILENT_S = 600.0
"""An owner that cannot be seen is gone after this time without a heartbeat."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that a lock names.

    Args:
        pid: process number.
        started: start of the process in the kernel's clock ticks after boot; None if unknown. Tells the process from a
            later one with the same number.
        host: name of its machine.
        boot: identity of the machine's boot; empty if unknown.
        namespace: in which the number counts; empty if unknown. Containers on one machine may share its name and boot,
            and none sees the processes of another.
        since: UTC time of the lock.
        command: command line, shortened if it is long.
    """

    pid: int
    started: int | None
    host: str
    boot: str
    namespace: str
    since: str
    command: str

    @classmethod
    def of(cls, lease: SoftFileLease) -> "Owner | None":
        """The owner that the lease's file names; None for a file of another program, or an incomplete one."""
        record = lease.owner
        if record is None:
            return None
        try:
            lines = Path(lease.lock_file).read_text(encoding="utf-8").splitlines()
            ours = dict(line.split("=", 1) for line in lines[1:])
            return cls(record.pid, None if record.start is None else record.start % 2**64,
                       record.hostname.partition("?")[0], ours["boot"], ours["namespace"], ours["since"],
                       ours["command"])
        except (OSError, ValueError, KeyError):
            return None

    @property
    def visible(self) -> bool:
        """Whether this process can see whether the owner runs: same boot of the same machine, same container. A name
        alone proves nothing: machines, and containers of one machine, may share it."""
        here = (boot(), namespace(), socket.gethostname())
        return all(here[:2]) and here == (self.boot, self.namespace, self.host)

    @property
    def runs(self) -> bool:
        """Whether a visible owner still runs."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:  # a process of another user
            pass
        with suppress(OSError):
            if os.readlink("/proc/self") != str(os.getpid()):  # of another container, with other process numbers
                return True
            # The command's name is in brackets and may contain anything.
            state, *fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            return state not in "ZX" and self.started in (None, int(fields[18]))
        return True

    def gone(self, silent_s: float) -> bool:
        """Whether the lock can be taken over.

        Args:
            silent_s: seconds since the last heartbeat.
        """
        return not self.runs if self.visible else silent_s >= SILENT_S

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"


def boot() -> str:
    """Identity of this boot of this machine; empty if unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def namespace() -> str:
    """Identity of the namespace of process numbers, and of the clock by which a process started; empty if unknown."""
    with suppress(OSError):
        spaces = [os.readlink("/proc/self/ns/pid")]
        with suppress(FileNotFoundError):  # a kernel without time namespaces
            spaces.append(os.readlink("/proc/self/ns/time"))
        return " ".join(spaces)
    return ""
