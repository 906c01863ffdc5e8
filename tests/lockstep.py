"""Processes that share something, played by threads which wait for each other at every exchange."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Meeting:
    """Where threads wait for each other with a tensor each."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.brought: list[Tensor] = [torch.empty(0)] * size
        self.calls = 0

    def bring(self, rank: int, values: Tensor) -> Tensor:
        self.brought[rank] = values.detach().clone()
        self.barrier.wait()
        found = torch.stack(self.brought)
        self.calls += rank == 0
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class Seat:
    """One thread's side of a meeting."""

    meeting: Meeting
    rank: int

    @property
    def size(self) -> int:
        return len(self.meeting.brought)

    def sum(self, values: Tensor) -> Tensor:
        return self.meeting.bring(self.rank, values).sum(0)

    def gather(self, values: Tensor) -> Tensor:
        return self.meeting.bring(self.rank, values)


def together(size: int, task: Callable[[Seat], Any]) -> tuple[list[Any], int]:
    """What each of `size` processes finds, and how often they spoke; the first error of one is raised."""
    meeting, found, errors = Meeting(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            found[rank] = task(Seat(meeting, rank))
        except Exception as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return found, meeting.calls
