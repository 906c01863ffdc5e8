"""Options of adapters."""

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tropism.errors import UsageError
from tropism.options import Everyday, Options

RATE_OF_ADAPTERS = 1e-4
"""Default learning rate of adapters."""

LEAST_TEMPERATURE = 0.01
"""Lowest temperature above 0. Logits are divided by it in float32."""

_MODELS = ("model*.safetensors", "pytorch_model*.bin", "*.gguf")
"""Files of a model's weights."""


def is_adapter(name: Any) -> bool:
    """True for a directory that holds an adapter but no model weights; a model config alone does not count."""
    if not isinstance(name, str | Path):
        return False
    path = Path(os.path.expanduser(name))
    return os.path.isfile(path / "adapter_config.json") and not (  # Path.is_file raises for names that are too long
        (path / "config.json").is_file() and any(True for pattern in _MODELS for _ in path.glob(pattern)))


class GenerationOptions(Options):
    """How a model answers."""

    heading: ClassVar[str] = "Generation"

    max_new_tokens: Everyday[int] = Field(512, ge=1)
    """Maximum tokens of an answer."""
    temperature: Everyday[float] = Field(0.0, ge=0.0, le=100.0)
    """Temperature of sampling. 0 takes the most likely token, as the samples of a run do."""
    top_p: Everyday[float] = Field(1.0, gt=0.0, le=1.0)
    """Sample from the most likely tokens that together have this probability. Requires `--temperature`."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Random seed for sampling."""

    @field_validator("temperature")
    @classmethod
    def _can_divide(cls, value: float) -> float:
        if 0.0 < value < LEAST_TEMPERATURE:
            raise ValueError(f"{value:g} is too low. Use 0, or at least {LEAST_TEMPERATURE:g}.")
        return value


class LoraOptions(Options):
    """Train a low-rank adapter (LoRA, arXiv:2106.09685) instead of all weights. Requires `rank` or `adapter`."""

    heading: ClassVar[str] = "Adapters"

    rank: Everyday[int | None] = Field(None, ge=1)
    """Rank of a LoRA adapter to train instead of all weights. See arXiv:2106.09685."""
    alpha: float | None = Field(None, gt=0.0)
    """Scale of the adapter. Its output is multiplied by alpha / rank, or with `--lora.rslora` by alpha / sqrt(rank).
    Default: 2 x rank."""
    targets: str | None = None
    """Modules that get an adapter: name suffixes, comma-separated, such as q_proj,v_proj. Default: every linear
    layer except the head."""
    dora: bool = False
    """Train weight-decomposed adapters (DoRA, arXiv:2402.09353)."""
    rslora: bool = False
    """Use rank-stabilized scaling (rsLoRA, arXiv:2312.03732)."""
    adapter: str | None = None
    """Adapter to continue training. Its rank and targets are kept. The reference is the model with this adapter
    before step 1."""
    modules_to_save: str | None = None
    """Modules to train in full and save with the adapter: name suffixes, comma-separated, such as
    embed_tokens,lm_head."""
    quantize: Everyday[Literal["nf4", "int8"] | None] = None
    """Quantize the frozen weights to 4 bits (nf4) or 8 bits (int8). Requires bitsandbytes and a single process (QLoRA,
    arXiv:2305.14314)."""

    @property
    def wanted(self) -> bool:
        """True if the run trains an adapter."""
        return self.rank is not None or self.adapter is not None

    @field_validator("targets", "modules_to_save", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Join a list from Python or YAML with commas; peft's `all-linear` is the default."""
        if isinstance(value, list | tuple):
            value = ",".join(str(entry).strip() for entry in value)
        if isinstance(value, str) and not value.replace(",", " ").strip():
            raise ValueError("no module is named. Omit the option to use the default.")
        return None if value == "all-linear" else value

    @model_validator(mode="after")
    def _effective(self) -> "LoraOptions":
        """Refuse options that would have no effect."""
        given = [f"--lora.{name.replace('_', '-')}" for name in ("rank", "alpha", "targets", "dora", "rslora",
                 "modules_to_save") if getattr(self, name) not in (None, False)]
        if given and self.adapter is not None:
            raise UsageError(f"{given[0]} has no effect with --lora.adapter, which has its own")
        if given and not self.wanted:  # quantize alone may go with an adapter as the model
            raise UsageError(f"{given[0]} has no effect without --lora.rank")
        return self
