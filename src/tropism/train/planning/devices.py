"""Devices: their memory and rates, and the time of counted work on them.

The time of an operation is what its FLOPs take at the attainable rate or its bytes at the attainable bandwidth,
whichever is longer (the roofline model, Williams et al. 2009, doi:10.1145/1498765.1498785). A GPU whose host cannot
launch operations as fast waits for the host.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tropism.train.planning.count import Count, Kind

_ATTAINED = 0.7
"""Share of a datasheet's matrix rate and bandwidth that large operations reach."""
_ATTENTION = 0.5
"""The same for attention, whose backward pass is slower than matrix products."""
_TRIAL_S = 0.15


@dataclass(frozen=True)
class Device:
    """A device to plan for.

    Args:
        name: as the command line has it.
        kind: type of the torch device.
        memory_bytes: of the device.
        flops: peak matrix FLOP/s by dtype, dense.
        bandwidth: bytes per second of its memory.
        launch_s: seconds of the host per operation; on a CPU they add to the time of each.
        attained: share of `flops` and `bandwidth` that large operations reach; 1 for measured rates.
    """

    name: str
    kind: str
    memory_bytes: int
    flops: dict[torch.dtype, float]
    bandwidth: float
    launch_s: float
    attained: float = _ATTAINED

    def clock(self, flops: float, size: float, dtype: torch.dtype, kind: Kind) -> float:
        """Seconds of one operation."""
        rate = self.flops.get(dtype, self.flops[torch.float32]) * self.attained
        if kind == "attention":
            rate *= _ATTENTION / _ATTAINED
        seconds = max(flops / rate, size / (self.bandwidth * self.attained))
        return seconds + self.launch_s if self.kind == "cpu" else seconds

    def seconds(self, count: Count) -> float:
        """Seconds of counted work, whose clock was this device's."""
        total = count.total()
        return total.seconds if self.kind == "cpu" else max(total.seconds, total.launches * self.launch_s)


def _gpu(name: str, gib: float, bf16: float, fp32: float, bandwidth: float) -> Device:
    """A GPU by its datasheet: GiB, dense TFLOP/s of the tensor cores in bf16 and of the other cores in fp32, GB/s."""
    rates = {torch.bfloat16: bf16 * 1e12, torch.float16: bf16 * 1e12, torch.float32: fp32 * 1e12,
             torch.float64: fp32 / 2 * 1e12}
    return Device(name, "cuda", int(gib * 2**30), rates, bandwidth * 1e9, 6e-6)


GPUS = {device.name: device for device in (
    _gpu("h100-80gb", 79.1, 989.4, 66.9, 3352.0),  # NVIDIA H100 datasheet (SXM5)
    _gpu("h200", 139.8, 989.4, 66.9, 4800.0),  # NVIDIA H200 datasheet (SXM)
    _gpu("a100-80gb", 79.1, 311.9, 19.5, 2039.0),  # NVIDIA A100 datasheet (SXM4, 80 GB)
    _gpu("rtx4090", 23.6, 165.2, 82.6, 1008.0),  # NVIDIA Ada architecture whitepaper, table 2 (fp32 accumulation)
)}
NAMES = (*GPUS, "cpu")


def this_machine(memory_bytes: int) -> Device:
    """This machine's CPU, by a short trial of matrix products and copies.

    Args:
        memory_bytes: that a process may use.
    """
    rates = {dtype: _product_rate(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)}
    return Device("cpu", "cpu", memory_bytes, rates, _copy_rate(), _launch_seconds(), attained=1.0)


def this_gpu(device: torch.device, memory_bytes: int) -> Device:
    """The GPU of this machine: that of the table with its name, else the one whose memory is nearest."""
    name = torch.cuda.get_device_name(device).lower()
    known = [entry for key, entry in GPUS.items() if key.partition("-")[0].removeprefix("rtx") in name]
    found = known[0] if known else min(GPUS.values(), key=lambda entry: abs(entry.memory_bytes - memory_bytes))
    return Device(found.name, "cuda", memory_bytes, found.flops, found.bandwidth, found.launch_s)


def _timed(action: Callable[[], object]) -> float:
    """Seconds of one call: the median of the calls that fit into the time of a trial."""
    action()
    taken: list[float] = []
    began = time.perf_counter()
    while not taken or time.perf_counter() - began < _TRIAL_S:
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


def _product_rate(dtype: torch.dtype, rows: int = 512, width: int = 768) -> float:
    left, right = torch.ones(rows, width, dtype=dtype), torch.ones(width, 2 * width, dtype=dtype)
    return 4.0 * rows * width * width / _timed(lambda: left @ right)


def _copy_rate(size: int = 2**22) -> float:
    values = torch.ones(size)
    return 2.0 * values.nbytes / _timed(lambda: torch.add(values, 1.0, out=values))


def _launch_seconds() -> float:
    values = torch.ones(8)
    return _timed(lambda: [values + 1.0 for _ in range(100)]) / 100
