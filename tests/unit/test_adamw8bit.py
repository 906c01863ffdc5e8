"""AdamW with 8-bit moments: which weights have them, that blocks do not depend on sharding, and its state."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tropism.distributed.shard import Owned, block_shape
from tropism.distributed.training_state import TrainingState, read_tensors, write_tensors
from tropism.errors import UsageError
from tropism.train import adamw8bit
from tropism.train.adamw8bit import AdamW8bit, bytes_per_value, check_usable, eight_bit
from tropism.train.optimizer import build_optimizer, step_if_finite, trainable

CPU = torch.device("cpu")
YES, NO = torch.tensor(True), torch.tensor(False)
NEEDS = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes")


class Layers(torch.nn.Module):
    """An embedding, matrices with full and broken rows of blocks, a small matrix, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(64, 128)
        self.wide = torch.nn.Linear(256, 32)
        self.narrow = torch.nn.Linear(48, 128)
        self.odd = torch.nn.Linear(100, 101)
        self.small = torch.nn.Linear(8, 8)


def built(module: torch.nn.Module, name: str = "adamw8bit", decay: float = 0.1) -> torch.optim.Optimizer:
    tables = {id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Embedding)}
    return build_optimizer(name, trainable(module), decay, tables)


def advance(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for weight in module.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator) * 1e-3
        step_if_finite(optimizer, 1e-3, YES)


@pytest.mark.parametrize("name", adamw8bit.NAMES)
def test_what_cannot_be_used_is_a_usage_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, with what to do."""
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object())
    cuda = torch.device("cuda")
    check_usable(name, "auto", cuda, 1)
    check_usable("adamw", "fp64", CPU, 2)
    for precision, tensor, words in (("fp64", 1, "fp64. Use --optimizer adamw"), ("bf16", 2, "Use --parallel.shard")):
        with pytest.raises(UsageError, match=words):
            check_usable(name, precision, cuda, tensor)
    if name.startswith("paged"):
        with pytest.raises(UsageError, match=r"requires a GPU.*Use --optimizer adamw8bit"):
            check_usable(name, "auto", CPU, 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(UsageError, match=rf"^--optimizer {name} requires .*pip install 'tropism\[quant\]'"):
        check_usable(name, "auto", cuda, 1)


def test_large_matrices_of_full_blocks_have_8_bits() -> None:
    module = Layers()
    tables = {id(module.table.weight)}
    found = dict(zip(dict(module.named_parameters()), eight_bit(module.parameters(), tables), strict=True))
    assert {name for name, fits in found.items() if fits} == {"wide.weight", "narrow.weight"}


@pytest.mark.parametrize(("shape", "blocks"), [
    ((32, 256), (32, 1)), ((16, 512), (16, 2)), ((128, 48), (8, 3)), ((8, 4, 64), (8, 1)), ((3, 100), None),
    ((512,), (2, 1)), ((500,), None), ((49152, 576), (12288, 9)), ((), None)])
def test_blocks_of_a_tensor(shape: tuple[int, ...], blocks: tuple[int, ...] | None) -> None:
    assert block_shape(torch.Size(shape)) == blocks


@NEEDS
def test_a_non_finite_step_is_a_no_op() -> None:
    """Weights and state stay, before and after the first update."""
    module = Layers()
    optimizer = built(module)
    for done in ([], [1, 2]):
        advance(module, optimizer, done)
        before = [weight.detach().clone() for weight in module.parameters()]
        state = str(optimizer.state_dict()["state"])
        for weight in module.parameters():
            weight.grad = torch.full_like(weight, torch.nan)
        step_if_finite(optimizer, 1e-3, NO)
        assert all(map(torch.equal, before, module.parameters()))
        assert str(optimizer.state_dict()["state"]) == state


@NEEDS
def test_other_weights_are_updated_as_by_adamw() -> None:
    """To the bit; those with 8-bit moments within the rounding of their moments."""
    ours, theirs = Layers(), Layers()
    advance(ours, built(ours), range(5))
    advance(theirs, built(theirs, "adamw"), range(5))
    start = dict(Layers().named_parameters())
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if name in ("wide.weight", "narrow.weight"):
            gap = (one - other).norm() / (other - start[name]).norm()
            assert 0 < float(gap.detach()) < 0.05
        else:
            assert torch.equal(one, other), name


@NEEDS
@pytest.mark.parametrize(("shape", "cut"), [((32, 256), 10), ((128, 48), 48), ((8, 8, 64), 3)])
def test_parts_of_a_matrix_are_updated_as_the_matrix(shape: tuple[int, ...], cut: int) -> None:
    """To the bit, so results do not depend on sharding. A process without rows of a matrix updates nothing."""
    def updated(weights: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
        optimizer = AdamW8bit([{"params": parameters, "weight_decay": 0.1}], [id(one) for one in parameters])
        for step in grads:
            for parameter, grad in zip(parameters, step, strict=True):
                parameter.grad = grad.clone()
            step_if_finite(optimizer, 1e-2, YES)
        return [parameter.detach() for parameter in parameters]

    torch.manual_seed(1)
    weight, grads = torch.randn(shape), [torch.randn(shape) for _ in range(4)]
    whole, = updated([weight], [[grad] for grad in grads])
    parts = updated([weight[:cut], weight[cut:], weight[:0]], [[grad[:cut], grad[cut:], grad[:0]] for grad in grads])
    assert torch.equal(torch.cat(parts), whole)


@NEEDS
@pytest.mark.parametrize("begun", [True, False])
def test_a_checkpoint_restores_every_bit(begun: bool, tmp_path: Path) -> None:
    """Through the disk into a new optimizer: the steps after it are those of a run that never stopped."""
    module = Layers()
    optimizer = built(module)
    advance(module, optimizer, [1, 2, 3] if begun else [])
    state = TrainingState.of(module, optimizer)
    if begun:
        assert state.tensors["optimizer/narrow.weight/exp_avg_scales"].shape == (8, 3)
        assert state.tensors["optimizer/wide.weight/exp_avg"].dtype == torch.uint8
    write_tensors(state.copied(), tmp_path)
    other = Layers()
    fresh = built(other)
    into = TrainingState.of(other, fresh, begun=begun)
    read_tensors(into.tensors, tmp_path)
    into.groups, into.values = state.groups, state.values
    into.apply(other, fresh)
    for one, its in ((module, optimizer), (other, fresh)):
        advance(one, its, [4, 5])
    assert all(map(torch.equal, module.parameters(), other.parameters()))


def test_bytes_of_state() -> None:
    """2 bytes and two scales for each block of 256, or 8 bytes."""
    module = Layers()
    optimizer: Any = built(module)
    owned = Owned(list(module.parameters()))
    found = {name: bytes_per_value(optimizer, part) for name, part in zip(
        dict(module.named_parameters()), owned.parts, strict=True)}
    assert found["wide.weight"] == 2 + 8 / 256
    assert found["table.weight"] == found["wide.bias"] == 8
    assert bytes_per_value(built(module, "sgd"), owned.parts[0]) == 4
    assert bytes_per_value(built(module, "adamw"), owned.parts[0]) == 8
