"""Learning rates, and updates that are applied whole or not at all."""

from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tropism.errors import TropismError, UsageError
from tropism.train.optimizer import Scheduled, build_optimizer, learning_rates, reserve, step_if_finite, trainable
from tropism.train.options import Schedule

NAMES = get_args(Schedule)
YES, NO = torch.tensor(True), torch.tensor(False)


def rates(name: str, peak: float, steps: int, warmup_ratio: float) -> list[float]:
    rate = learning_rates(name, peak, steps, warmup_ratio)
    return [rate(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 100])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.1, 0.5, 1.0])
def test_no_step_has_rate_zero(name: str, steps: int, warmup_ratio: float) -> None:
    """N4: every planned step has a positive rate, at most the peak, and some step has the peak itself."""
    found = rates(name, 2e-5, steps, warmup_ratio)
    assert all(0 < rate <= 2e-5 * (1 + 1e-12) for rate in found)
    assert max(found) == pytest.approx(2e-5, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_warm_up_step_k_has_k_parts(name: str) -> None:
    """DESIGN, Rows and steps: warm-up step k (from 1) uses k / warmup_steps; the first step after it has the peak."""
    found = rates(name, 1.0, 50, 0.1)
    assert found[:5] == [pytest.approx(k / 5) for k in range(1, 6)]
    assert found[5] == pytest.approx(1.0)
    assert all(later <= earlier for earlier, later in pairwise(found[5:]))


def test_linear_in_numbers() -> None:
    """DESIGN, Defaults: linear, warm-up a tenth; the schedule has the length of the planned steps."""
    assert rates("linear", 1.0, 10, 0.1) == [pytest.approx(rate) for rate in (
        1, 1, 8 / 9, 7 / 9, 6 / 9, 5 / 9, 4 / 9, 3 / 9, 2 / 9, 1 / 9)]
    assert rates("linear", 1.0, 4, 0.0) == [1, 0.75, 0.5, 0.25]
    assert rates("constant", 3.0, 3, 0.0) == [3, 3, 3]


@pytest.mark.parametrize(("steps", "ratio", "warmup"), [
    (10, 0.1, 1), (30, 0.1, 3), (11, 0.1, 2), (3, 0.1, 1), (70, 0.1, 7), (9, 1.0, 9)])
def test_warm_up_rounds_up(steps: int, ratio: float, warmup: int) -> None:
    """DESIGN, Rows and steps: a share of the steps, rounded up; 0.1 x 30 is 3 though floats say a little more."""
    assert rates("constant", 1.0, steps, ratio)[:warmup] == [pytest.approx(k / warmup) for k in range(1, warmup + 1)]


@given(st.sampled_from(NAMES), st.integers(1, 60), st.floats(0, 1))
def test_a_rate_of_zero_is_allowed(name: str, steps: int, warmup_ratio: float) -> None:
    """N4: with peak 0 every rate is exactly 0, for any schedule."""
    assert set(rates(name, 0.0, steps, warmup_ratio)) == {0.0}


def test_float32_master_weights() -> None:
    """N3: 100 steps of 1e-3 on a weight of 1.0 give 0.9; in bf16 they would round away and leave 1.0."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = build_optimizer("sgd", trainable(model), weight_decay=0.0)
    for _ in range(100):
        model.weight.grad = torch.ones(1, 1)
        step_if_finite(optimizer, 1e-3, YES)
    assert model.weight.dtype == torch.float32
    # Half a unit in the last place of numbers below 1, a hundred times.
    assert model.weight.item() == pytest.approx(0.9, abs=100 * 2**-25)


def state_of(optimizer: torch.optim.Optimizer) -> dict:
    return {(number, key): value.clone() for number, entries in optimizer.state_dict()["state"].items()
            for key, value in entries.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_non_finite_step_is_a_no_op(name: str) -> None:
    """N1: weights and all optimizer state stay, also under weight decay; the run then goes on as if it never was."""
    def trained(*finite: torch.Tensor) -> tuple[list[torch.Tensor], dict]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = build_optimizer(name, trainable(model), weight_decay=0.1)
        for number, good in enumerate(finite):
            fill = float(sum(map(bool, finite[:number]))) + 1.0 if good else float("nan")
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, fill)
            step_if_finite(optimizer, 0.1, good)
            assert all(parameter.grad is None for parameter in model.parameters())
        return [parameter.detach() for parameter in model.parameters()], state_of(optimizer)

    for some, without in (((YES, NO, YES), (YES, YES)), ((YES, NO), (YES,)), ((NO, NO, YES, NO), (YES,))):
        (weights, state), (wanted_weights, wanted_state) = trained(*some), trained(*without)
        for weight, wanted in zip(weights, wanted_weights, strict=True):
            assert torch.equal(weight, wanted)
        assert state.keys() == wanted_state.keys()
        assert all(torch.equal(state[key], wanted_state[key]) for key in state)
    if name == "adamw":
        assert state_of_steps(trained(YES, NO, YES)[1]) == {2.0}


def state_of_steps(state: dict) -> set[float]:
    return {float(value) for (_, key), value in state.items() if key == "step"}


def test_a_first_non_finite_step_changes_no_weight() -> None:
    """N1: also before the optimizer has any state."""
    for name in ("adamw", "sgd"):
        model = torch.nn.Linear(3, 2)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = build_optimizer(name, trainable(model), weight_decay=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("inf"))
        step_if_finite(optimizer, 0.1, NO)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_adamw_matches_the_plain_kernel() -> None:
    """DESIGN, Defaults: AdamW 0.9 / 0.999 / 1e-8; decay is decoupled and acts on matrices only."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    plain = torch.nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    optimizer = build_optimizer("adamw", trainable(model), weight_decay=0.1)
    wanted = torch.optim.AdamW([{"params": [plain.weight], "weight_decay": 0.1},
                                {"params": [plain.bias], "weight_decay": 0.0}],
                               lr=0.01, betas=(0.9, 0.999), eps=1e-8, foreach=False, fused=False)
    for number in range(5):
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            mine.grad = torch.sin(torch.arange(mine.numel()).reshape(mine.shape) + float(number))
            other.grad = mine.grad.clone()
        step_if_finite(optimizer, 0.01, YES)
        wanted.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_frozen_weights_stay_out() -> None:
    """N4: nothing trainable is refused; frozen weights are not in the optimizer."""
    model = torch.nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    optimizer = build_optimizer("sgd", trainable(model), weight_decay=0.0)
    assert [p is model.bias for group in optimizer.param_groups for p in group["params"]] == [True]
    model.bias.requires_grad_(False)
    with pytest.raises(UsageError, match="no trainable weights"):
        build_optimizer("adamw", trainable(model), weight_decay=0.0)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_reserved_memory_changes_no_update(name: str) -> None:
    """To the bit, decay and moments included."""
    found = []
    for reserved in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 3)
        owned = trainable(module)
        updater = Scheduled(build_optimizer(name, owned, 0.1), owned, lambda step: 0.01 * step)
        before = [weight.detach().clone() for weight in module.parameters()]
        if reserved:
            reserve(updater)
            assert all(weight.grad is None for weight in module.parameters())
            assert all(map(torch.equal, before, module.parameters()))
            assert len(updater.optimizer.state) == (2 if name == "adamw" else 0)
        for step in (1, 2, 3):
            module(torch.ones(2, 4) * step).square().sum().backward()
            updater.apply(step, YES)
        found.append([weight.detach() for weight in module.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_moments_are_reserved(name: str) -> None:
    """Those of matrices and of biases, at step 0, and nothing else changes."""
    module = torch.nn.Linear(64, 64)
    owned = trainable(module)
    optimizer = build_optimizer(name, owned, 0.1)
    before = [weight.detach().clone() for weight in module.parameters()]
    reserve(Scheduled(optimizer, owned, lambda step: 1.0))
    assert set(optimizer.state) == set(module.parameters())
    assert all(int(state["step"]) == 0 and not state["exp_avg"].any() for state in optimizer.state.values())
    assert all(map(torch.equal, before, module.parameters()))
    assert all(weight.grad is None for weight in module.parameters())


def test_an_optimizer_that_does_not_fit_ends_the_run_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    owned = trainable(torch.nn.Linear(4, 3))

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros_like", full)
    with pytest.raises(TropismError, match=r"optimizer state do not fit into memory \(CUDA out of memory\).*--lora"):
        reserve(Scheduled(build_optimizer("adamw", owned, 0.0), owned, lambda step: 1.0))
