"""Matrix products of linear layers by oneDNN on CPUs where MKL is slow.

MKL chooses its kernels by the maker of the CPU. On others than Intel's, oneDNN does the same float32 products about
twice as fast. Results differ by rounding. The operation is a private one of torch (`mkldnn::_linear_pointwise`, on
plain weights), so it is tried before it is used.
"""

import platform
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

Products = Literal["mkl", "onednn"]

_FEWEST_ROWS = 16  # below, as in generation, the call itself costs more than it wins
_SMALLEST = 2**16  # weights in a layer: products of smaller ones take no time
_GAIN = 1.1  # by which oneDNN must be faster
_TRIAL = (256, 1024)  # rows, and the most columns: 3 x 0.5 GFLOP in a round, so about 50 ms in all
_ROUNDS = 3


def choose_products(module: Any, precision: str, device: torch.device) -> Products:
    """The faster library for the linear layers of a model, by a trial. All but float32 on a CPU stays with torch's own
    choice."""
    sizes = [(layer.in_features, layer.out_features) for layer in _layers(module)]
    if device.type != "cpu" or precision != "fp32" or not sizes or not torch.backends.mkl.is_available():
        return "mkl"
    width, out = (min(size, _TRIAL[1]) for size in max(sizes, key=lambda size: size[0] * size[1]))
    if width * out < _SMALLEST or maker() == "GenuineIntel" or not available():
        return "mkl"
    return "onednn" if _gain(width, out) > _GAIN else "mkl"


def available() -> bool:
    """Whether this build of torch has the operation, on this CPU, and with the exactness of float32."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 256, generator=generator) for _ in range(2))
    try:
        found = _product(left, right)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    exact = left.double() @ right.double().t()
    return float((found.double() - exact).norm() / exact.norm()) < 1e-6  # TF32 or bfloat16 inside would give 1e-3


def use_products(module: Any, products: Products) -> None:
    """Let the linear layers of a model compute with a library. Names, weights and types of its modules stay."""
    for layer in _layers(module):
        layer.__dict__.pop("forward", None)
        if products == "onednn":
            layer.forward = MethodType(_forward, layer)


def products_of(module: Any) -> Products:
    """The library that the linear layers of a model compute with."""
    return "onednn" if any(map(_is_served, _layers(module))) else "mkl"


def _layers(module: Any) -> list[torch.nn.Linear]:
    """The linear layers whose forward pass is torch's own, or ours."""
    return [layer for layer in module.modules() if type(layer) is torch.nn.Linear
            and ("forward" not in layer.__dict__ or _is_served(layer))]


def _is_served(layer: Any) -> bool:
    return getattr(layer.__dict__.get("forward"), "__func__", None) is _forward


def _forward(layer: Any, input: Tensor) -> Tensor:
    states, weight, bias = input, layer.weight, layer.bias
    plain = (type(states) is Tensor and type(weight) in (Tensor, torch.nn.Parameter)  # no DTensors
             and all(one is None or (one.dtype == torch.float32 and one.device.type == "cpu")
                     for one in (states, weight, bias)))
    if not plain or states.numel() < _FEWEST_ROWS * states.shape[-1] or torch.is_autocast_enabled("cpu"):
        return functional.linear(states, weight, bias)
    flat: Tensor = _Linear.apply(states.reshape(-1, states.shape[-1]), weight, bias)
    return flat.view(*states.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return _product(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (_product(upstream, weight.t()) if wanted[0] else None,
                _product(upstream.t(), states.t()) if wanted[1] else None,
                upstream.sum(0) if wanted[2] else None)


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left @ right.T + bias` by oneDNN."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return found


def _gain(width: int, out: int) -> float:
    """Time of MKL over time of oneDNN, for the three products of a layer in a step."""
    states, weight, upstream = torch.ones(_TRIAL[0], width), torch.ones(out, width), torch.ones(_TRIAL[0], out)

    def seconds(product: Callable[[Tensor, Tensor], Tensor]) -> float:
        began = time.perf_counter()
        for left, right in ((states, weight), (upstream, weight.t()), (upstream.t(), states.t())):
            product(left, right)
        return time.perf_counter() - began

    kinds = (lambda left, right: left @ right.t(), _product)
    times = [[seconds(kind) for kind in kinds] for _ in range(1 + _ROUNDS)][1:]  # the first warms up
    return min(mkl for mkl, _ in times) / min(onednn for _, onednn in times)


def maker() -> str:
    """The maker of the CPU, as it calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), None)
    return named or platform.processor().rpartition(" ")[2]
