"""Options of adapters, and how to recognize an adapter directory."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tropism.errors import UsageError
from tropism.options import Options

RATE_OF_ADAPTERS = 1e-4
"""Default learning rate of adapters."""


_MODELS = ("model*.safetensors", "pytorch_model*.bin", "*.gguf")
"""Files of a model's weights."""


def is_adapter(name: Any) -> bool:
    """Whether a name is a directory with an adapter and without a model. A config.json alone is not a model."""
    if not isinstance(name, str | Path):
        return False
    path = Path(name).expanduser()
    return (path / "adapter_config.json").is_file() and not (
        (path / "config.json").is_file() and any(True for pattern in _MODELS for _ in path.glob(pattern)))


def _flag(name: str) -> str:
    return f"--lora.{name.replace('_', '-')}"


class LoraOptions(Options):
    """Train a low-rank adapter (LoRA, arXiv:2106.09685) in place of the weights. Without `rank` and `adapter` none of
    these has an effect."""

    rank: int | None = Field(None, ge=1)
    """Rank r of the adapter; without it, and without an adapter to start from, all weights learn."""
    alpha: float | None = Field(None, gt=0.0)
    """Scale: the adapter's output counts alpha / r times (alpha / sqrt r under rslora); by default 2 r."""
    targets: str | None = None
    """Modules that get an adapter, by the ends of their names, comma-separated (q_proj,v_proj); by default every linear
    layer but the head."""
    dora: bool = False
    """Weight-decomposed adapters (DoRA, arXiv:2402.09353)."""
    rslora: bool = False
    """Rank-stabilised scale (rsLoRA, arXiv:2312.03732)."""
    adapter: str | None = None
    """Start from this adapter, which has its own rank and targets. The reference is the model with it, as it is before
    step 1."""
    modules_to_save: str | None = None
    """Modules that learn whole beside the adapter and are saved with it, by the ends of their names, comma-separated
    (embed_tokens,lm_head)."""
    quantize: Literal["nf4", "int8"] | None = None
    """Hold the frozen weights in 4 or 8 bits (QLoRA, arXiv:2305.14314), by bitsandbytes; on one process."""

    @property
    def wanted(self) -> bool:
        """Whether an adapter is trained."""
        return self.rank is not None or self.adapter is not None

    @field_validator("targets", "modules_to_save", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Join a list from Python or YAML with commas. peft's `all-linear` is the default."""
        if isinstance(value, list | tuple):
            value = ",".join(str(entry).strip() for entry in value)
        if isinstance(value, str) and not value.replace(",", " ").strip():
            raise ValueError("names no module. Remove the option to use the default")
        return None if value == "all-linear" else value

    @model_validator(mode="after")
    def _effective(self) -> "LoraOptions":
        if self.adapter is not None:
            for name in ("rank", "alpha", "targets", "dora", "rslora", "modules_to_save"):
                if getattr(self, name) not in (None, False):
                    raise UsageError(f"{_flag(name)} has no effect with --lora.adapter, which has its own. Remove it")
        if not self.wanted:
            for name in ("alpha", "targets", "dora", "rslora", "modules_to_save"):  # quantize: with an adapter as model
                if getattr(self, name) not in (None, False):
                    raise UsageError(f"{_flag(name)} has no effect without --lora.rank")
        return self
