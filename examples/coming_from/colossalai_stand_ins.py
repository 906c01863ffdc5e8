"""What coati_kto.py uses of colossalai and coati, in small: enough to run the script without them."""

import math
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class DistCoordinator:
    """Prints on the main process, as colossalai's does."""

    rank, world_size = 0, 1

    def is_master(self) -> bool:
        return True

    def print_on_master(self, msg: str) -> None:
        print(msg)


class LowLevelZeroPlugin:
    """Holds the settings of a run, and makes its dataloaders."""

    def __init__(self, stage: int = 1, precision: str = "fp16", max_norm: float = 0.0) -> None:
        self.stage, self.precision = stage, precision
        self.zero_optim_kwargs = {"clip_grad_norm": max_norm}

    def prepare_dataloader(self, dataset: Dataset, batch_size: int, shuffle: bool, drop_last: bool, collate_fn: Any,
                           distributed_sampler_cls: type[Sampler]) -> DataLoader:
        return DataLoader(dataset, batch_size, sampler=distributed_sampler_cls(dataset, shuffle=shuffle),
                          drop_last=drop_last, collate_fn=collate_fn)


class BoostedModel(torch.nn.Module):
    """A wrapper around a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def unwrap(self) -> torch.nn.Module:
        return self.module

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.module(*args, **named)


class BoostedOptimizer:
    """A wrapper around an optimizer, which is none itself."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    def step(self) -> None:
        self.optim.step()

    def zero_grad(self) -> None:
        self.optim.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class Booster:
    """Wraps what is trained, and saves it."""

    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin

    def boost(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, criterion: Any = None,
              dataloader: DataLoader | None = None, lr_scheduler: Any = None) -> tuple[Any, ...]:
        return (BoostedModel(model), optimizer and BoostedOptimizer(optimizer), criterion, dataloader, lr_scheduler)

    def backward(self, loss: torch.Tensor, optimizer: BoostedOptimizer) -> None:
        optimizer.backward(loss)

    def save_model(self, model: BoostedModel, checkpoint: str, shard: bool = False) -> None:
        model.unwrap().save_pretrained(checkpoint)


class CosineAnnealingWarmupLR(torch.optim.lr_scheduler.LambdaLR):
    """Linear warmup, then a cosine down to `eta_min`."""

    def __init__(self, optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int = 0,
                 eta_min: float = 0.0) -> None:
        peak = optimizer.param_groups[0]["lr"]

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            share = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            return (eta_min + (peak - eta_min) * (1 + math.cos(math.pi * share)) / 2) / peak

        super().__init__(optimizer, factor)


class StatefulDistributedSampler(Sampler[int]):
    """A shuffled order that starts at an index; the same in each epoch unless `set_epoch` is called."""

    def __init__(self, dataset: Dataset, shuffle: bool = True, seed: int = 0) -> None:
        self.count, self.shuffle, self.seed, self.epoch, self.start_index = len(dataset), shuffle, seed, 0, 0

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist() if self.shuffle else list(range(self.count))
        return iter(order[self.start_index :])

    def __len__(self) -> int:
        return self.count - self.start_index
