"""Limits of time and memory for chat templates, which are programs: loops in loops, or text that doubles, never end.

In the main thread an interval timer interrupts a template, also in long operations of Python itself such as a power.
It needs no check in the loops of transformers' environment. In other threads, which get no signals, and where the timer
is in use, a watching thread raises the same error. Worker processes render in their main thread.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

T = TypeVar("T")
_AGAIN_S = 1.0  # an error that is raised in a destructor is lost, so it is raised again
_STALE_S = 0.1


class TemplateTimeout(Exception):
    """A template took too long."""


def limited(render: Callable[[], T], seconds: float, most_bytes: int) -> T:
    """Call a function with limits.

    Args:
        render: what to call.
        seconds: longest time.
        most_bytes: memory that it may allocate; limited in the main thread on Linux only.

    Raises:
        TemplateTimeout: when the time is over.
        MemoryError: for too much memory.
    """
    if threading.current_thread() is not threading.main_thread():
        return _watched(render, seconds)
    if resource is None:
        return _watched(render, seconds)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_memory.limit(most_bytes, *limits), limits[1]))
    try:
        if signal.getitimer(signal.ITIMER_REAL)[0]:  # the caller's own timer stays
            return _watched(render, seconds)
        return _interrupted(render, seconds)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def _ring(number: int, frame: object) -> None:
    raise TemplateTimeout


def _interrupted(render: Callable[[], T], seconds: float) -> T:
    before = signal.signal(signal.SIGALRM, _ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
            return render()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


def _watched(render: Callable[[], T], seconds: float) -> T:
    ended, lock, thread = threading.Event(), threading.Lock(), ctypes.c_ulong(threading.get_ident())
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def watch() -> None:
        wait = seconds
        while not ended.wait(wait):
            with lock:
                if not ended.is_set():
                    throw(thread, ctypes.py_object(TemplateTimeout))
            wait = _AGAIN_S

    threading.Thread(target=watch, daemon=True).start()
    try:
        return render()
    finally:
        with lock:
            ended.set()
        throw(thread, None)  # takes back an error that was not raised yet


class _Memory:
    """The private memory of this process, read again when it may have grown."""

    def __init__(self) -> None:
        self._used, self._read_at = 0, float("-inf")

    def limit(self, more: int, soft: int, hard: int) -> int:
        """A limit that allows so much more memory than is used now, but no more than the process may have."""
        now = time.monotonic()
        if now - self._read_at > _STALE_S:
            self._read_at = now
            with suppress(OSError), open("/proc/self/statm", "rb") as file:
                self._used = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        return min([*known, self._used + more]) if self._used else soft


_memory = _Memory()
