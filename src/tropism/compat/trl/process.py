"""What scripts ask of `trainer.accelerator`: which process this is."""

import os
from typing import Any

import torch

from tropism.observe.console import Voice


class Process:
    """This process among those that torchrun started."""

    @property
    def process_index(self) -> int:
        """Number of this process, from 0."""
        return int(os.environ.get("RANK", "0"))

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process."""
        return self.process_index == 0

    is_local_main_process = is_main_process

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else (
            torch.device("cpu"))

    def print(self, *parts: Any) -> None:
        """Print on the main process."""
        if self.is_main_process:
            Voice().say(*" ".join(map(str, parts)).split("\n"))

    def wait_for_everyone(self) -> None:
        """train(), evaluate() and predict() end together on all processes."""
