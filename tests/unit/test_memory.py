"""Peak memory counts from its reset on."""

import subprocess
import sys

import pytest

CODE = """
import torch
from tropism.train.memory import peak_gib, reset_peak
device = torch.device("cpu")
large = torch.ones(2**28)
before = peak_gib(device)
del large
reset_peak(device)
after = peak_gib(device)
small = torch.ones(2**27)
print(before - after, peak_gib(device) - after)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset it")
def test_what_came_before_does_not_count() -> None:
    """A tensor of 1 GiB that is gone, and one of 0.5 GiB that came later. A busy machine may take away pages of
    libraries in between, so the bounds are wide."""
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    gone, came = map(float, found.stdout.split())
    assert gone > 0.6
    assert 0.1 < came < 0.6
