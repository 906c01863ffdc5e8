"""Matrix products by oneDNN: as exact as torch's own, and without a trace in the model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tropism.model import cpu_products
from tropism.model.cpu_products import available, choose_products, products_of, use_products

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not available(), reason="this build of torch has no oneDNN products")


def gradients(layer: nn.Linear, states: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients by states and parameters of a layer."""
    states = states.clone().requires_grad_()
    layer.zero_grad()
    out = layer(states)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), states.grad, *(one.grad for one in layer.parameters() if one.requires_grad)]


@pytest.mark.parametrize(("shape", "out", "bias"), [
    ((40, 96), 64, False), ((2, 33, 96), 200, True), ((1, 17, 8), 3, True), ((300, 64), 64, False)])
def test_results_and_gradients_are_those_of_torch(shape: tuple[int, ...], out: int, bias: bool) -> None:
    torch.manual_seed(0)
    states, layer = torch.randn(shape), nn.Linear(shape[-1], out, bias=bias)
    theirs = gradients(layer, states)
    use_products(layer, "onednn")
    ours = gradients(layer, states)
    assert products_of(layer) == "onednn"
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert float((one - other).norm()) <= 1e-6 * float(other.norm()) + 1e-12
    layer.requires_grad_(False)
    for one, other in zip(gradients(layer, states), theirs[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    use_products(layer, "mkl")
    assert products_of(layer) == "mkl"
    assert torch.equal(layer(states), theirs[0])


@pytest.mark.parametrize("states", [torch.ones(3, 8), torch.ones(1, 1, 8), torch.ones(0, 8),
                                    torch.ones(40, 8, dtype=torch.float64)])
def test_other_inputs_are_computed_as_before(states: torch.Tensor) -> None:
    """Few rows, as in generation, no rows, and another dtype."""
    layer = nn.Linear(8, 5).to(states.dtype)
    plain = layer(states)
    use_products(layer, "onednn")
    assert torch.equal(layer(states), plain)


def test_autocast_decides_the_dtype() -> None:
    layer = nn.Linear(8, 5)
    use_products(layer, "onednn")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(40, 8)).dtype == torch.bfloat16


def test_names_types_and_copies_stay() -> None:
    class Scaled(nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(states)

    model = nn.Sequential(nn.Linear(8, 8), Scaled(8, 8))
    names = list(model.state_dict())
    use_products(model, "onednn")
    assert list(model.state_dict()) == names
    assert [type(layer) for layer in model] == [nn.Linear, Scaled]
    assert "forward" not in model[1].__dict__  # it is not torch's own
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].weight.zero_()
        copied[0].bias.zero_()
    states = torch.ones(40, 8)
    assert float(copied[0](states).abs().sum()) == 0.0  # of the copy's own weights
    assert float(model[0](states).abs().sum()) > 0.0


def test_the_faster_library_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gain, maker = nn.Sequential(nn.Linear(256, 300)), 2.0, "AuthenticAMD"
    monkeypatch.setattr(cpu_products, "_gain", lambda width, out: gain)
    monkeypatch.setattr(cpu_products, "maker", lambda: maker)
    assert choose_products(model, "fp32", CPU) == "onednn"
    for precision, device in (("bf16", CPU), ("fp64", CPU), ("fp32", torch.device("cuda"))):
        assert choose_products(model, precision, device) == "mkl"
    for other in (nn.Linear(8, 8), nn.LayerNorm(8)):
        assert choose_products(other, "fp32", CPU) == "mkl"
    gain = 1.05
    assert choose_products(model, "fp32", CPU) == "mkl"
    gain, maker = 2.0, "GenuineIntel"  # noise must not decide where none can win
    assert choose_products(model, "fp32", CPU) == "mkl"


def test_the_trial_changes_no_random_numbers() -> None:
    before = torch.get_rng_state()
    assert available()
    assert cpu_products._gain(64, 64) > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, NotImplementedError, TypeError])
def test_a_release_without_the_operation_has_none(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fails(*args: Any) -> None:
        raise error("gone")

    monkeypatch.setattr(cpu_products, "_product", fails)
    assert not available()


def test_products_that_round_more_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ONEDNN_DEFAULT_FPMATH_MODE=BF16."""
    monkeypatch.setattr(cpu_products, "_product",
                        lambda left, right: (left.bfloat16() @ right.bfloat16().t()).float())
    assert not available()


def test_states_may_be_passed_by_name() -> None:
    """As torch names them."""
    layer, states = nn.Linear(8, 4), torch.ones(20, 8)
    use_products(layer, "onednn")
    assert torch.equal(layer(input=states), layer(states))
