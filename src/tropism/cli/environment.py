"""Settings of libraries that they read when torch is imported. What the user sets counts."""

import os
import sys


def set_environment() -> None:
    """Set the defaults of a run. They change no result."""
    # Threads of a CPU run sleep while they wait for each other. Those that spin take the cores from the ones that
    # compute whenever another program runs, and a step then takes several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # CUDA memory in segments that grow, so that packs of different sizes leave no gaps.
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its old name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
