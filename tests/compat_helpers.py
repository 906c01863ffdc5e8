"""What tests of the published trainers' classes share: models, rows of random ids, and loaders that shuffle."""

import copy
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from published_batches import Known, known

PAD = 2


class Actor(torch.nn.Module):
    """OpenRLHF's wrapper: the transformers model is `.model`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def strategy_of(accumulation: int, **args: Any) -> Any:
    """OpenRLHF's strategy, as far as it is read. `args` has what its scripts always set."""
    default = {"aux_loss_coef": 0.0, "use_wandb": None, "use_tensorboard": None, "eval_steps": -1, "save_steps": -1,
               "logging_steps": 1, "max_ckpt_num": 3, "max_ckpt_mem": 1e8, "load_checkpoint": False}
    return SimpleNamespace(args=SimpleNamespace(**{**default, **args}), accumulated_gradient=accumulation)


def rows_of(count: int, completions: int = 1, seed: int = 0) -> list[Known]:
    """Rows of random ids and uneven lengths; some share a prompt."""
    generator = random.Random(seed)

    def ids(most: int) -> list[int]:
        return [generator.randint(5, 100) for _ in range(generator.randint(1, most))]

    prompts = [ids(12) for _ in range(count // 2)]
    return [known(generator.choice(prompts), *(ids(9) for _ in range(completions)), label=number % 2 == 0)
            for number in range(count)]


def loader_of(rows: Sequence[Known], collate: Callable[..., Any], size: int = 3, rank: int = 0, world: int = 1,
              shuffle: bool = True) -> DataLoader[Any]:
    """A dataloader whose sampler has another order in every epoch."""
    sampler: Any = DistributedSampler(rows, num_replicas=world, rank=rank, shuffle=shuffle, seed=5)  # type: ignore
    return DataLoader(rows, batch_size=size, sampler=sampler,  # type: ignore[arg-type]
                      collate_fn=lambda some: collate(some, PAD, "right"))


def models(directory: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A policy, and a frozen model with slightly other weights."""
    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    frozen = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in frozen.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator).to(dtype)
    return policy, frozen


def optimizer_of(model: Any, rate: float = 1e-3) -> tuple[Any, Any]:
    """AdamW as OpenRLHF's scripts make it, and a schedule that changes at every update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def weights_of(model: Any) -> torch.Tensor:
    """All weights as one vector."""
    return torch.cat([weight.detach().double().flatten() for weight in model.parameters()])


def apart(one: Any, other: Any, start: torch.Tensor) -> float:
    """Distance of two models relative to what the second one travelled from `start`."""
    ours, theirs = weights_of(one), weights_of(other)
    return float((ours - theirs).norm() / (theirs - start).norm())
