"""Options of the model and the run."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from tropism.options import Options

Schedule = Literal["linear", "cosine", "constant", "polynomial", "cosine_with_min_lr", "inverse_sqrt"]


class StoreOptions(Options):
    """Where what can be used again is kept."""

    store: str | None = None
    """Directory of the scores of frozen models and of rendered rows; by default TROPISM_STORE, else
    ~/.cache/tropism/store."""

    @property
    def store_root(self) -> Path:
        """The store's directory."""
        return Path(self.store).expanduser() if self.store else default_root()


def default_root() -> Path:
    """TROPISM_STORE, else tropism/store in the user's cache."""
    if named := os.environ.get("TROPISM_STORE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tropism" / "store"


class ReferenceOptions(StoreOptions):
    """Which model the policy is held close to."""

    reference: str | None = None
    """Reference model: by default the policy as it is before step 1; a directory or hub id for another model;
    `live` keeps a copy in memory instead of stored scores."""


class TeacherOptions(StoreOptions):
    """Which teacher to distil from, and how. Without a teacher none of these has an effect."""

    teacher: str | None = None
    """Teacher model, with the same tokenizer: a Hugging Face directory, a hub id, or a GGUF file."""
    kd_weight: float | None = Field(None, ge=0.0, le=1.0)
    """Weight of the divergence from the teacher, by default 0.5: `tropism kd` minimises (1 - kd_weight) x
    cross-entropy + kd_weight x divergence; other methods add kd_weight x divergence to their loss."""
    divergence: Literal["forward_kl", "reverse_kl", "js", "skew", "tvd"] | None = None
    """Divergence from the teacher; by default forward_kl."""
    divergence_mix: float | None = Field(None, gt=0.0, lt=1.0)
    """Weight of the teacher in the mixture of js (default 0.5) and skew (default 0.1)."""
    temperature: float | None = Field(None, gt=0.0)
    """Temperature T of both distributions; by default 1."""
    temperature_scaling: bool | None = None
    """Multiply the divergence by T^2, so that its gradient keeps its size; by default true."""
    top_k: int | None = Field(None, ge=1)
    """Keep the teacher's k likeliest tokens and the mass of the others in the store, instead of the teacher in
    memory."""


class RunOptions(Options):
    """Which model, how to train it, where the result goes."""

    model: str
    """The policy: a Hugging Face directory, a hub id, or a GGUF file."""
    output: str
    """The run directory; it must not hold anything yet."""
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
    save_every: int | None = Field(None, ge=1)
    """Steps between models that are kept on the way, in RUN/checkpoints; by default only the last is kept."""
    track: str | None = None
    """Also log to these trackers, comma-separated: tensorboard, wandb, trackio, mlflow and others."""
    log_dir: str | None = None
    """Where trackers write; by default RUN/logs."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of the order of rows."""
    samples: int = Field(4, ge=0)
    """Held-out prompts that are answered before and after training."""
    export_dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the exported weights."""
