"""N4: after the first step with a learning rate above 0 at least one trainable weight has changed."""

import pytest
import torch
from torch import nn

from tropism.errors import NothingLearnedError
from tropism.observe.metrics import Tally
from tropism.train.monitor.first_update import FirstUpdate, snapshot
from tropism.train.step_log import StepOutcome

YES, NO, NORM = torch.tensor(True), torch.tensor(False), torch.tensor(0.5)


def outcome(rate: float, finite: torch.Tensor, norm: torch.Tensor) -> StepOutcome:
    return StepOutcome(1, Tally(), norm, finite, None, learning_rate=rate)


def model() -> nn.Module:
    torch.manual_seed(0)
    module = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7)})
    module["embed"].requires_grad_(False)
    return module


def test_a_step_that_changes_nothing_is_an_error_with_counts() -> None:
    """N4."""
    first = FirstUpdate(model())
    with pytest.raises(NothingLearnedError) as error:
        first.look(outcome(1e-6, YES, NORM))
    assert "28 of 49 weights in 2 tensors" in str(error.value)
    assert "head" in str(error.value)
    assert "rounding of float32" in str(error.value)
    with pytest.raises(NothingLearnedError, match="gradient is exactly 0"):
        FirstUpdate(model()).look(outcome(1e-6, YES, torch.tensor(0.0)))


@pytest.mark.parametrize(("norm", "size", "allowed"), [
    (0.0, 0.0, True), (1e-8, 2e-8, True), (0.0, 0.5, False), (0.1, 0.0, False)])
def test_where_the_loss_is_zero_there_is_nothing_to_learn(norm: float, size: float, allowed: bool) -> None:
    """N4: a student that is its teacher stays as it is; a loss above 0 without a gradient is an error still."""
    done = outcome(1e-3, YES, torch.tensor(norm))
    done.size = torch.tensor(size)
    first = FirstUpdate(model())
    if allowed:
        first.look(done)
        assert first.done
    else:
        with pytest.raises(NothingLearnedError):
            first.look(done)


def test_a_rate_of_zero_and_a_step_left_out_say_nothing() -> None:
    """N4: a rate of 0 is allowed; the next step is looked at."""
    module = model()
    first = FirstUpdate(module)
    first.look(outcome(0.0, YES, NORM))
    first.look(outcome(1e-3, NO, NORM))
    assert not first.done
    with torch.no_grad():
        module["head"].bias[2] += 1e-3
    first.look(outcome(1e-3, YES, NORM))
    assert first.done
    first.look(outcome(1e-3, YES, NORM))  # only one step is looked at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 4), (2, 3, 4), ()])
def test_one_bit_of_one_element_is_seen(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = torch.ones(shape, dtype=dtype)
    before = snapshot([weight])
    flat = weight.reshape(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(2.0, dtype=dtype))
    assert not torch.equal(before[0], snapshot([weight])[0])


def test_an_adamw_step_at_a_small_rate_changes_float32_weights() -> None:
    """N3, N4: 5e-6 is far above the rounding of weights of size 0.02 to 1."""
    module = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-6)
    first = FirstUpdate(module)
    module(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    first.look(outcome(5e-6, YES, NORM))
    assert first.done


def test_a_run_that_goes_on_does_not_look_again() -> None:
    first = FirstUpdate(model(), done=True)
    first.look(outcome(1.0, YES, NORM))
