"""NeMo-Aligner's configuration, read by the shape of its objects: OmegaConf's, dicts or plain namespaces."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tropism.errors import UsageError


def read(cfg: Any, name: str, default: Any = None) -> Any:
    """A key or attribute of a configuration; `default` if it is absent or None."""
    if isinstance(cfg, Mapping):
        value = cfg.get(name)
    else:
        getter = getattr(cfg, "get", None)
        value = getter(name, None) if callable(getter) else getattr(cfg, name, None)
    return default if value is None else value


def owner_of(model: Any) -> Any:
    """The model that has the configuration, inside the wrappers of DDP and of compilation."""
    held = None if hasattr(model, "cfg") else getattr(model, "module", None) or getattr(model, "_orig_mod", None)
    return model if held is None else owner_of(held)


def batches(number: int, limit: Any, name: str) -> int:
    """How many of some batches a limit leaves: a share if it is a float, a count if it is an int.

    Raises:
        UsageError: if it is neither.
    """
    if limit is None or (isinstance(limit, float) and math.isinf(limit)):
        return number
    if isinstance(limit, bool) or not isinstance(limit, int | float) or limit < 0 or limit != limit:
        raise UsageError(f"{name}: must be a share (1.0), a number of batches (10) or inf (got {limit!r})")
    return min(number, int(number * limit) if isinstance(limit, float) else limit)


def batches_of(loader: Any) -> int:
    """Batches of an epoch: whole global batches of a Megatron sampler, or the length of the dataloader.

    Raises:
        UsageError: if it has none.
    """
    sampler = getattr(loader, "batch_sampler", None)
    samples, size = (getattr(sampler, name, None) for name in ("total_samples", "global_batch_size"))
    if isinstance(samples, int) and isinstance(size, int) and size:
        return samples // size
    try:
        return len(loader)
    except TypeError:
        raise UsageError(f"train_dataloader is a {type(loader).__name__} without a length, from which the steps of an "
                         "epoch follow. Pass a DataLoader.") from None


def steps(interval: Any, per_epoch: int, name: str) -> int:
    """Steps of an interval: a share of an epoch if it is a float, and at least one step. 0 for none: that is what 0,
    None, infinity and negative values mean.

    Raises:
        UsageError: if it is no number.
    """
    if interval is None:
        return 0
    if isinstance(interval, bool) or not isinstance(interval, int | float) or interval != interval:
        raise UsageError(f"{name}: must be a number of steps (10), a share of an epoch (0.1) or 0 for none (got "
                         f"{interval!r})")
    if interval <= 0 or math.isinf(interval):
        return 0
    return max(int(interval * per_epoch), 1) if isinstance(interval, float) else interval


@dataclass(frozen=True)
class Intervals:
    """When to validate and save.

    Args:
        validate: steps between validations; 0 for none.
        save: steps between checkpoints; 0 for none.
        max_steps: the last step.
    """

    validate: int
    save: int
    max_steps: int

    def after(self, step: int, expired: bool) -> tuple[bool, bool, bool]:
        """Whether to validate and save after a step, and whether it is the last one. A step that saves validates too,
        because the checkpoint may be chosen by the validation."""
        last = step >= self.max_steps
        save = bool(self.save) and (last or expired or step % self.save == 0)
        return bool(self.validate) and (save or last or expired or step % self.validate == 0), save, last


class Timer:
    """The time limit of a run.

    Args:
        duration: "DD:HH:MM:SS" or a timedelta; None for no limit.

    Raises:
        UsageError: for anything else.
    """

    def __init__(self, duration: Any) -> None:
        self.limit = math.inf
        self.began = time.monotonic()
        if duration is None:
            return
        if isinstance(duration, timedelta):
            self.limit = duration.total_seconds()
            return
        parts = duration.split(":") if isinstance(duration, str) else []
        if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
            raise UsageError(f"run_timer: must be DD:HH:MM:SS, as 00:03:30:00 (got {duration!r})")
        self.limit = sum(int(part) * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=True))

    def start_time(self) -> None:
        """Begin to count."""
        self.began = time.monotonic()

    def is_finished(self) -> bool:
        """Whether the limit is reached."""
        return time.monotonic() - self.began >= self.limit
