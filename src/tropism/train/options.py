"""Options of the model and the run."""

from typing import Literal

from pydantic import Field

from tropism.options import Options

Schedule = Literal["linear", "cosine", "constant", "polynomial", "cosine_with_min_lr", "inverse_sqrt"]


class RunOptions(Options):
    """Which model, how to train it, where the result goes."""

    model: str
    """The policy: a Hugging Face directory, a hub id, or a GGUF file."""
    output: str
    """The run directory; it must not hold anything yet."""
    reference: str | None = None
    """Reference model: by default the policy as it is before step 1; a directory or hub id for another model;
    `live` keeps a copy in memory instead of stored scores."""
    trust_remote_code: bool = False
    """Run code that comes with a model."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Dtype of the computation: bf16 on GPUs, fp32 on CPUs; weights and optimizer stay float32 (float64 in fp64)."""
    layout: Literal["auto", "tree", "padded"] = "auto"
    """`tree` computes every prompt once; `padded` puts each completion beside its own copy of the prompt; `auto`
    takes the tree where the start-up comparison shows that it is exact for this model."""
    batch_size: int = Field(32, ge=1)
    """Rows of an optimiser step, over all ranks."""
    microbatch_tokens: int | None = Field(None, ge=1)
    """Tokens of one forward and backward pass: memory and speed, never the result. Default 2048 on a CPU, 16384 on
    a GPU."""
    epochs: int = Field(1, ge=1)
    """Passes over the data."""
    max_steps: int | None = Field(None, ge=1)
    """Optimiser steps; wins over epochs."""
    learning_rate: float = Field(1e-6, ge=0.0)
    """Peak learning rate."""
    schedule: Schedule = "linear"
    """Learning-rate schedule after warm-up, by its name in transformers."""
    warmup_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Share of the steps that warm up; step k of them uses k / warm-up steps of the peak."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW (0.9, 0.999, 1e-8), or plain SGD."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Weight decay, on matrices only; decoupled in AdamW."""
    max_grad_norm: float = Field(1.0, ge=0.0)
    """Clip the gradient to this global norm; 0 does not clip."""
    eval_every: int | None = Field(None, ge=0)
    """Steps between evaluations; by default a tenth of the run; 0 evaluates at start and end only."""
    log_every: int = Field(1, ge=1)
    """Steps per line of metrics.jsonl."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of the order of rows."""
    samples: int = Field(4, ge=0)
    """Held-out prompts that are answered before and after training."""
    store: str | None = None
    """Directory of stored reference scores; by default TROPISM_STORE, else ~/.cache/tropism/store."""
    export_dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the exported weights."""
